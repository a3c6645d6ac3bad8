// npm's `openai` against the API: node openai_client.mjs URL MODULE. Started by check_npm_client.py.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const [url, module] = process.argv.slice(2);
const { default: OpenAI, NotFoundError, BadRequestError, toFile } = await import(pathToFileURL(module));

const model = "tiny-llama";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "where is it?" }];
const parameters = {
  type: "object",
  properties: { where: { enum: ["here", "there"] } },
  required: ["where"],
  additionalProperties: false,
};
const where = (text) => assert.match(JSON.parse(text).where, /^(t?here)$/);

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const checks = {
  async models() {
    assert.deepEqual((await collected(client.models.list())).map((found) => found.id), [model]);
    assert.equal((await client.models.retrieve(model)).object, "model");
    await assert.rejects(client.models.retrieve("other"), (error) => {
      assert(error instanceof NotFoundError);
      return error.code === "model_not_found";
    });
  },

  async chat() {
    const asked = { model, messages, temperature: 0, max_tokens: 12 };
    const whole = await client.chat.completions.create(asked);
    const text = whole.choices[0].message.content;
    assert(text.length > 0 && whole.usage.completion_tokens <= 12);
    const chunks = await collected(
      await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
    );
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), text);
    assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
    assert.equal((await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.content, text);
  },

  async aStreamThatIsLeft() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 500, stream: true });
    for await (const chunk of stream) {
      assert.equal(chunk.model, model);
      stream.controller.abort();
    }
  },

  async tools() {
    const tools = [{ type: "function", function: { name: "look_up", parameters } }];
    const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(whole.choices[0].finish_reason, "tool_calls");
    where(call.function.arguments);
    const streamed = await client.chat.completions.stream(asked).finalMessage();
    assert.equal(streamed.tool_calls[0].function.arguments, call.function.arguments);
    const output = { role: "tool", tool_call_id: call.id, content: "nothing" };
    const said = [...messages, whole.choices[0].message, output];
    const after = await client.chat.completions.create({ model, messages: said, tools, tool_choice: "none", max_tokens: 3 });
    assert.equal(after.choices[0].message.tool_calls, undefined);
  },

  async anAnswerWithASchema() {
    const response_format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: parameters } };
    const answer = await client.chat.completions.create({ model, messages, response_format, max_tokens: 60 });
    where(answer.choices[0].message.content);
  },

  async completions() {
    const asked = { model, prompt: "abc", temperature: 0, max_tokens: 5 };
    const whole = await client.completions.create({ ...asked, logprobs: 2 });
    assert.equal(whole.choices[0].logprobs.tokens.length, whole.usage.completion_tokens);
    const chunks = await collected(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
  },

  async responses() {
    const asked = { model, input: "where is it?", temperature: 0, max_output_tokens: 12 };
    const whole = await client.responses.create(asked);
    assert(whole.output_text.length > 0);
    assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);
    assert.equal((await client.responses.stream(asked).finalResponse()).output_text, whole.output_text);
    const events = await collected(await client.responses.create({ ...asked, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
    await client.responses.create({ ...asked, previous_response_id: whole.id });
    assert.equal((await collected(client.responses.inputItems.list(whole.id))).length, 1);
    const tools = [{ type: "function", name: "look_up", parameters, strict: true }];
    const { max_output_tokens, ...open } = asked;
    const called = await client.responses.create({ ...open, tools, tool_choice: { type: "function", name: "look_up" } });
    where(called.output[0].arguments);
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), NotFoundError);
  },

  async embeddings() {
    const [one] = (await client.embeddings.create({ model, input: "abc" })).data; // by base64, unless asked otherwise
    const [other] = (await client.embeddings.create({ model, input: "abc", encoding_format: "float" })).data;
    assert.equal(one.embedding.length, other.embedding.length);
    one.embedding.forEach((value, index) => assert(Math.abs(value - other.embedding[index]) < 1e-6));
  },

  async filesAndBatches() {
    const body = { model, messages, max_tokens: 2 };
    const line = JSON.stringify({ custom_id: "1", method: "POST", url: "/v1/chat/completions", body });
    const file = await client.files.create({ file: await toFile(Buffer.from(line), "asked.jsonl"), purpose: "batch" });
    let batch = await client.batches.create({
      input_file_id: file.id,
      endpoint: "/v1/chat/completions",
      completion_window: "24h",
    });
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.equal(answer.response.body.object, "chat.completion");
    assert.equal((await collected(client.files.list({ limit: 1 }))).length, 2);
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ model, messages: [] }), (error) => {
      assert(error instanceof BadRequestError);
      return error.param === "messages" && error.type === "invalid_request_error";
    });
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
