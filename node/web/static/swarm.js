// <pn-swarm>: who serves which blocks, what is missing and what would help, and the round trips between servers.

import { copied, h, iconButton, svg } from "./dom.js";
import { graph, lanes, ticks } from "./layout.js";
import { count, milliseconds, numbered, reputationOf, sentence, shortPeer, span, stateOf } from "./text.js";

class Swarm extends HTMLElement {
  connectedCallback() {
    this.failure = h("p", { class: "notice", hidden: true });
    this.body = h("div", {}, h("p", { class: "note" }, "Asking the swarm …"));
    this.live = h("div", { class: "unseen", role: "status", "aria-live": "polite" });
    new ResizeObserver(() => this.#draw()).observe(this);
    this.append(h("div", { class: "scroll swarm-scroll", tabindex: "-1" }, this.failure, this.body, this.live));
  }

  fail(message) {
    this.failure.hidden = false;
    this.failure.textContent = this.known ? `${sentence(message)} What stands below was seen before.` : sentence(message);
    if (!this.known) this.body.replaceChildren();
  }

  show(swarm) {
    this.failure.hidden = true;
    this.known = swarm;
    this.#draw();
  }

  /** A link for others, made when somebody wants it; stays until the page is left. */
  #invite() {
    this.invited ??= h("section", { class: "invite" }, h("h2", {}, "Invite"), h("p", {}, "A link with which somebody else joins this swarm, to serve or to chat."), h("button", { type: "button", class: "plain", onclick: () => this.#ask() }, "Make a link"));
    return this.invited;
  }

  async #ask() {
    const button = this.invited.querySelector("button");
    button.disabled = true;
    try {
      const found = await this.page.client.invite();
      this.invited.replaceChildren(h("h2", {}, "Invite"), ...invitation(found));
    } catch (error) {
      button.disabled = false;
      this.invited.querySelector("p").textContent = sentence(error.message, this.page.name);
    }
  }

  #draw() {
    const swarm = this.known;
    const width = Math.min(1000, this.body.clientWidth - (this.body.clientWidth < 700 ? 30 : 42));
    const drawing = JSON.stringify({ ...swarm, time: 0, width });
    if (!swarm || this.hidden || drawing === this.drawing) return;
    this.drawing = drawing;
    const said = headline(swarm);
    if (said !== this.said) this.live.textContent = said;
    this.said = said;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.body.replaceChildren(
      h("section", { class: "facts" }, facts(swarm)),
      swarm.help ? help(swarm.help) : "",
      this.page.client.invite ? this.#invite() : "",
      h("section", {}, h("h2", {}, "Blocks"), picture(swarm, width), legend()),
      h("section", {}, h("h2", {}, "Servers"), table(swarm.servers)),
      h("section", {}, h("h2", {}, "Round trips"), trips(swarm, width)),
    );
    // What had the focus before the drawing was made anew has it again.
    if (focused) [...this.body.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
  }
}

const label = (server) => server.name || shortPeer(server.peer_id);

/** How many servers there are, for a person. */
export function answering(servers) {
  const silent = servers.filter((server) => server.answers === false).length;
  const there = servers.length - silent;
  return `${numbered(there, "server")}${silent ? `, ${silent} not answering` : ""}`;
}

function headline({ num_blocks: blocks, missing_blocks: missing, servers }) {
  const lacking = missing.reduce((sum, [start, end]) => sum + end - start, 0);
  const held = `${blocks - lacking} of ${blocks} blocks are served`;
  return `${answering(servers)}, ${held}.`;
}

function facts(swarm) {
  const missing = swarm.missing_blocks.reduce((sum, [start, end]) => sum + end - start, 0);
  const online = swarm.servers.filter((server) => server.state === "online" && server.answers !== false);
  const free = online.reduce((sum, server) => sum + server.cache_tokens_free, 0);
  const least = swarm.coverage.length ? Math.min(...swarm.coverage) : 0;
  return [
    fact("Model", swarm.model, swarm.model_version.slice(0, 12)),
    fact("Servers", String(online.length), online.length < swarm.servers.length ? `online, of ${swarm.servers.length} that are known` : "online"),
    fact("Blocks served", `${swarm.num_blocks - missing} of ${swarm.num_blocks}`, missing ? "no answers until all are" : `each by at least ${least}`, missing > 0),
    fact("Free cache", count(free), "tokens, all servers together"),
  ];
}

function fact(name, value, note, bad = false) {
  return h("div", { class: `fact${bad ? " bad" : ""}` }, h("p", { class: "fact-name" }, name), h("p", { class: "value" }, value), h("p", { class: "note" }, note));
}

function help({ text, command, join }) {
  const others = join ? [h("p", {}, "Or somebody else's machine; this is for them:"), copiable(join, "Copy the command with the link")] : [];
  return h("section", { class: "help" }, h("h2", {}, "What would help"), h("p", {}, text), copiable(command, "Copy the command"), ...others);
}

function copiable(command, label) {
  const code = h("pre", { tabindex: "0", "aria-label": "Command" }, h("code", {}, command));
  const copy = iconButton("copy", label, () => copied(command, copy));
  return h("div", { class: "command" }, code, copy);
}

function invitation({ command, check_word: word, expires, reached_from: from, qr }) {
  const copy = iconButton("copy", "Copy the command with the link", () => copied(command, copy));
  const path = qr.flatMap((row, y) => [...row].map((module, x) => (module === "1" ? `M${x} ${y}h1v1h-1z` : ""))).join("");
  const size = qr.length + 8;
  const code = svg("svg", { viewBox: `-4 -4 ${size} ${size}`, role: "img", "aria-label": "The link as a QR code", class: "qr" }, svg("rect", { x: -4, y: -4, width: size, height: size, fill: "#fff" }), svg("path", { d: path, fill: "#000" }));
  const until = new Date(expires * 1000).toLocaleString();
  return [
    h("p", {}, `For who has petalnode (--chat to chat only). Good until ${until}; its peers are reached from ${from}. Check word: ${word}.`),
    h("div", { class: "command" }, h("pre", { tabindex: "0", "aria-label": "Command with the link" }, h("code", {}, command)), copy),
    code,
  ];
}

function picture({ num_blocks: blocks, coverage, servers }, width) {
  const drawing = lanes(blocks, coverage, servers, width);
  const { height, left, cell, row } = drawing;
  const parts = [svg("text", { x: 0, y: drawing.coverTop + 15, class: "axis" }, "covered")];
  for (const { block, number, x } of drawing.cover) {
    const level = number === 0 ? "none" : number === 1 ? "one" : "more";
    const square = svg("rect", { x, y: drawing.coverTop, width: cell - 1, height: 20, rx: 3, class: `cover ${level}` });
    square.append(svg("title", {}, `block ${block}: ${numbered(number, "server")}`));
    parts.push(square);
    if (number === 0 && cell > 9) parts.push(svg("text", { x: x + (cell - 1) / 2, y: drawing.coverTop + 15, class: "in-cover" }, "!"));
  }
  for (const tick of ticks(blocks, width < 500 ? 5 : 10)) {
    parts.push(svg("text", { x: left + tick * cell, y: height - 4, class: tick === blocks ? "axis end" : "axis" }, String(tick)));
    parts.push(svg("line", { x1: left + tick * cell, x2: left + tick * cell, y1: drawing.coverTop + 26, y2: height - 18, class: "grid" }));
  }
  for (const { server, x, y, size, next } of drawing.bars) {
    if (next) parts.push(svg("rect", { x: next.x, y, width: next.size, height: row - 8, rx: 5, class: "bar-next" }));
    const bar = svg("rect", { x, y, width: size, height: row - 8, rx: 5, class: `bar ${server.answers === false ? "silent" : server.state}${server.banned_until ? " banned" : ""}` });
    bar.append(svg("title", {}, `${label(server)}: blocks ${span(server.blocks)}, ${stateOf(server)}`));
    const text = `${span(server.blocks)} · ${server.throughput.toFixed(0)}/s`;
    parts.push(
      svg("text", { x: 0, y: y + 16, class: "axis who" }, label(server).slice(0, left > 80 ? 14 : 9)),
      bar,
      size > text.length * 7 + 8 ? svg("text", { x: x + 8, y: y + 15, class: "in-bar" }, text) : "",
    );
  }
  const text = `Servers over ${blocks} blocks. ${headline({ num_blocks: blocks, missing_blocks: missingOf(coverage), servers })} The table below says the same.`;
  const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text, class: "lanes" }, parts);
  return image;
}

function missingOf(coverage) {
  return coverage.flatMap((number, block) => (number ? [] : [[block, block + 1]]));
}

const LEGEND = {
  "A block has": [
    ["none", "no server"],
    ["one", "one"],
    ["more", "more"],
  ],
  "A server is": [
    ["online", "online"],
    ["joining", "loading"],
    ["draining", "leaving"],
    ["silent", "not answering"],
    ["banned", "not used here"],
  ],
};

function legend() {
  const entry = ([kind, text]) => h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
  const line = ([title, entries]) => h("ul", { class: "legend" }, h("li", {}, `${title}:`), entries.map(entry));
  return Object.entries(LEGEND).map(line);
}

const COLUMNS = ["Server", "Blocks", "State", "Steps/s", "Free cache", "Round trip", "Path", "Reputation", "Last verdict"];
const NUMBERS = new Set(["Steps/s", "Free cache", "Round trip", "Reputation"]);

function table(servers) {
  if (!servers.length) return h("p", { class: "note" }, "No server is known.");
  const rows = servers.map((server) => {
    const free = server.cache_tokens ? `${count(server.cache_tokens_free)} of ${count(server.cache_tokens)}` : count(server.cache_tokens_free);
    const texts = [
      span(server.blocks),
      stateOf(server),
      server.throughput.toFixed(1),
      free,
      server.round_trip_ms === null ? "–" : milliseconds(server.round_trip_ms),
      server.path ?? "not connected",
      reputationOf(server),
      verdict(server),
    ];
    const data = texts.map((text, index) => h("td", { class: NUMBERS.has(COLUMNS[index + 1]) ? "right" : null }, text));
    return h("tr", { class: server.banned_until || server.answers === false ? "banned" : null }, h("th", { scope: "row", title: server.peer_id }, label(server)), data);
  });
  const head = h("tr", {}, COLUMNS.map((text) => h("th", { scope: "col", class: NUMBERS.has(text) ? "right" : null }, text)));
  const inner = h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
  return h("div", { class: "wide", role: "group", tabindex: "0", "aria-label": "Servers" }, inner);
}

function verdict({ verdict: last, banned_until: until }) {
  if (!last) return "none";
  const text = last.reason ? `${last.verdict}: ${last.reason}` : last.verdict;
  return until ? `${text} (not used until ${new Date(until * 1000).toLocaleString()})` : text;
}

function trips(swarm, width) {
  const drawing = graph(swarm, width);
  if (!drawing.edges.length) return h("p", { class: "note" }, "Nobody has measured any yet.");
  const named = new Map(swarm.servers.map((server) => [server.peer_id, label(server)])).set(swarm.self, "you");
  const parts = [];
  for (const { from, to, ms, slow } of drawing.edges) {
    const line = svg("line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y, class: `edge slow-${slow}` });
    line.append(svg("title", {}, `${named.get(from.peer)} – ${named.get(to.peer)}: ${milliseconds(ms)}`));
    parts.push(line);
  }
  for (const { ms, label: at } of drawing.edges) {
    if (!at) continue;
    const text = milliseconds(ms);
    parts.push(svg("rect", { x: at.x - text.length * 3.4 - 3, y: at.y - 9, width: text.length * 6.8 + 6, height: 18, rx: 4, class: "edge-back" }));
    parts.push(svg("text", { x: at.x, y: at.y + 4, class: "edge-ms" }, text));
  }
  for (const { peer, x, y } of drawing.nodes) {
    parts.push(svg("circle", { cx: x, cy: y, r: 9, class: peer === swarm.self ? "node self" : "node" }));
    parts.push(svg("text", { x, y: y + (y > drawing.height / 2 ? 26 : -16), class: "node-name" }, named.get(peer).slice(0, 14)));
  }
  const image = svg("svg", { viewBox: `0 0 ${width} ${drawing.height}`, width, height: drawing.height, role: "img", "aria-label": "Round trips between you and the servers; the list below says the same", class: "graph" }, parts);
  const items = swarm.round_trips.map(({ from, to, ms }) => h("li", {}, `${named.get(from) ?? shortPeer(from)} – ${named.get(to) ?? shortPeer(to)}: ${milliseconds(ms)}`));
  return h("div", {}, image, h("details", {}, h("summary", {}, `All ${items.length} as a list`), h("ul", { class: "trips" }, items)));
}

customElements.define("pn-swarm", Swarm);
