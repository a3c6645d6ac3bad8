// Asks `petalnode api`: models, the swarm, and answers as a stream of server-sent events. No DOM.

/** What the server refused, or that it cannot be reached (status 0). */
export class Refused extends Error {
  constructor(message, status = 0, code = "", retryAfter = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** Takes a stream apart into the data of its events; `feed` may be given any pieces of it. */
export class EventReader {
  #rest = "";

  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  }
}

export class Client {
  /** What its key is, for a person. */
  keyed = {
    name: "API key",
    a: "a key",
    missing: "This server answers only who has a key.",
    wrong: "The server does not know this key.",
    made: "Made with: petalnode api --new-api-key NAME --api-key-file FILE",
    note: "Only if this petalnode was started with keys.",
  };

  /** What the models behind the first are. */
  others = "With an adapter";

  /** `base` is the page's address; `key()` the API key or "". */
  constructor(base, key) {
    this.base = base;
    this.key = key;
  }

  async models() {
    return (await this.#json("v1/models")).data;
  }

  async swarm() {
    return this.#json("v1/petalnode/swarm");
  }

  async invite() {
    return this.#json("v1/petalnode/invite");
  }

  async receipts(id) {
    return this.#json(`v1/petalnode/receipts/${encodeURIComponent(id)}`);
  }

  /** What comes of computing the answer again on the machine of the API. */
  async check(id) {
    return (await this.#json(`v1/petalnode/receipts/${encodeURIComponent(id)}/check`, { method: "POST" })).answers;
  }

  /** Streams an answer: `onChunk` gets every chunk. Ends early, without an error, when `signal` is aborted. */
  async chat(body, { signal, onChunk }) {
    const stream = { ...body, stream: true, stream_options: { include_usage: true, include_progress: true } };
    try {
      const response = await this.#ask("v1/chat/completions", { method: "POST", body: JSON.stringify(stream), signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const events = new EventReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        for (const data of events.feed(part.value)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw refusal(503, chunk);
          onChunk(chunk);
        }
      }
      throw new Refused("The connection ended before the answer did.");
    } catch (error) {
      if (signal?.aborted) return;
      throw error instanceof Refused ? error : new Refused("The connection to petalnode was lost.");
    }
  }

  async #json(path, options = {}) {
    return (await this.#ask(path, options)).json();
  }

  async #ask(path, options) {
    const headers = { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    let response;
    try {
      response = await fetch(new URL(path, this.base), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("petalnode does not answer. Is `petalnode api` still running?");
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => ({}));
    throw refusal(response.status, told, Number(response.headers.get("Retry-After")) || 0);
  }
}

function refusal(status, told, retryAfter = 0) {
  const error = told.error ?? {};
  return new Refused(String(error.message ?? `The server answered with status ${status}.`), status, error.code ?? "", retryAfter);
}
