import assert from "node:assert/strict";
import { test } from "node:test";

import { add, branches, exported, imported, mentions, messagesTo, newConversation, path, restored, titleOf, turn } from "../../node/web/static/conversations.js";
import { chosen, PICTURES } from "../../node/web/static/pictures.js";
import { NO_ROUTE } from "../../node/web/static/route.js";
import { Storage } from "../../node/web/static/storage.js";

function asked() {
  const chat = newConversation(1);
  const question = add(chat, null, "user", "one?", 2);
  const answer = add(chat, question.id, "assistant", "1", 3);
  const second = add(chat, answer.id, "user", "two?", 4);
  return { chat, question, answer, second };
}

const shown = (chat) => path(chat).map((node) => node.content);

test("messages stand in their order, and the first question is the title", () => {
  const { chat } = asked();
  assert.deepEqual(shown(chat), ["one?", "1", "two?"]);
  assert.equal(chat.title, "one?");
});

test("an edited question begins a branch, and the old one is still there", () => {
  const { chat, question } = asked();
  const edited = add(chat, question.parent, "user", "three?", 5);
  assert.deepEqual(shown(chat), ["three?"]);
  assert.deepEqual(branches(chat, edited.id), { ids: [question.id, edited.id], index: 1 });
  turn(chat, edited.id, -1);
  assert.deepEqual(shown(chat), ["one?", "1", "two?"]);
  turn(chat, question.id, -1); // there is none before
  assert.deepEqual(shown(chat), ["one?", "1", "two?"]);
});

test("an answer made anew is a branch, and what followed the old one stays with it", () => {
  const { chat, question, answer } = asked();
  const again = add(chat, question.id, "assistant", "uno", 6);
  assert.deepEqual(shown(chat), ["one?", "uno"]);
  turn(chat, again.id, -1);
  assert.deepEqual(shown(chat), ["one?", "1", "two?"]);
  assert.equal(branches(chat, answer.id).ids.length, 2);
});

test("what is sent leads to the message that is answered", () => {
  const { chat, question, second } = asked();
  add(chat, question.id, "assistant", "uno", 6);
  chat.system = "Be brief.";
  assert.deepEqual(messagesTo(chat, second.id), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "one?" },
    { role: "assistant", content: "1" },
    { role: "user", content: "two?" },
  ]);
});

test("an answer of which nothing came is not sent", () => {
  const { chat, question } = asked();
  const empty = add(chat, question.id, "assistant", "", 6);
  const next = add(chat, empty.id, "user", "and?", 7);
  assert.deepEqual(messagesTo(chat, next.id).map(({ content }) => content), ["one?", "and?"]);
});

test("an answer that a closed page left open has stopped", () => {
  const { chat, answer } = asked();
  answer.state = "answering";
  answer.route = { ...NO_ROUTE, waiting: { peer: "a", blocks: [0, 3], lost: true, reason: "gone", seconds: 30 } };
  const again = restored(JSON.parse(JSON.stringify(chat)));
  assert.equal(again.nodes[answer.id].state, "stopped");
  assert.equal(again.nodes[answer.id].route.waiting, null); // nothing looks for another server any more
  for (const data of [null, {}, { id: "a" }, { id: "a", nodes: { b: {} }, top: {} }]) assert.equal(restored(data), null);
});

test("an answer goes on while a browser without storage reads its chats", async () => {
  const { chat, answer } = asked();
  answer.state = "answering";
  delete globalThis.BroadcastChannel; // an open one keeps Node from ending
  const storage = await new Storage().open();
  await storage.put(chat);
  const [read] = await storage.all();
  assert.deepEqual([read.nodes[answer.id].state, answer.state], ["stopped", "answering"]);
});

test("titles are one short line of whole characters", () => {
  assert.equal(titleOf("  a\n b"), "a");
  assert.equal([...titleOf("😀".repeat(200))].length, 160);
});

test("chats are searched in all that was said", () => {
  const { chat } = asked();
  for (const text of ["TWO", " one?", "1"]) assert.ok(mentions(chat, text));
  assert.ok(!mentions(chat, "three"));
});

test("chats come from a file as they went into it", () => {
  const { chat } = asked();
  assert.deepEqual(imported(exported([chat])), [chat]);
  for (const text of ["", "{", "null", "[]", "{}", '{"petalnode_chats": 1}', '{"petalnode_chats": 2, "conversations": []}']) assert.equal(imported(text), null, text);
});

test("a file that somebody else made gives no chat that is not whole", () => {
  const spoiled = [
    (chat, { question }) => (question.parent = chat.top.chosen), // its own parent
    (chat, { question, second }) => (question.parent = second.id), // in a circle
    (chat, { question }) => (question.parent = "nobody"),
    (chat, { question }) => (question.parent = "__proto__"),
    (chat, { answer }) => (answer.content = { toString: 1 }),
    (chat, { answer }) => (answer.role = "system"),
    (chat, { answer }) => (answer.id = "other"),
    (chat, { answer }) => (chat.nodes[answer.id] = null),
    (chat, { answer, question }) => (answer.chosen = question.id),
    (chat, { answer }) => (chat.top.chosen = answer.id),
    (chat) => (chat.nodes = null),
  ];
  for (const spoil of spoiled) {
    const made = asked();
    spoil(made.chat, made);
    assert.deepEqual(imported(JSON.stringify({ petalnode_chats: 1, conversations: [made.chat, asked().chat] })).length, 1, String(spoil));
  }
  const { chat, answer } = asked();
  answer.route = { hops: 1 };
  assert.equal(imported(exported([chat]))[0].nodes[answer.id].route, null);
  answer.route = { hops: [], changes: [], receipts: { digest: "ab", count: 1, checked: [{ verdict: "yes" }] } };
  assert.equal(imported(exported([chat]))[0].nodes[answer.id].route.receipts.checked, undefined);
});

const PICTURE = `data:image/png;base64,${"iVBORw0KGgo".repeat(3)}`;

test("pictures go with their question, and come back from storage if they are some", () => {
  const chat = newConversation(1);
  const question = add(chat, null, "user", "", 2, [PICTURE]);
  const url = { type: "image_url", image_url: { url: PICTURE } };
  assert.deepEqual(messagesTo(chat, question.id), [{ role: "user", content: [url, { type: "text", text: "" }] }]);
  assert.equal(chat.title, "A picture");
  assert.deepEqual(restored(JSON.parse(JSON.stringify(chat))).nodes[question.id].pictures, [PICTURE]);
  const wrong = ["data:image/svg+xml;base64,AAAA", "https://evil.example/a.png", `${PICTURE}" x`, "data:image/png;base64,", `${PICTURE}${"A".repeat(PICTURES.characters)}`, 7];
  for (const pictures of [...wrong.map((one) => [PICTURE, one]), Array(9).fill(PICTURE), "x", {}]) {
    question.pictures = pictures;
    assert.deepEqual(restored(JSON.parse(JSON.stringify(chat))).nodes[question.id].pictures, []);
  }
});

test("files that are no pictures, too large or too many are left out, and the page says why", () => {
  const file = (type, size = 1000) => ({ type, size });
  const named = ({ files, why }) => [files.length, why];
  assert.deepEqual(named(chosen([file("image/png"), file("text/plain")], 0)), [1, ""]);
  assert.match(chosen([file("image/svg+xml")], 0).why, /PNG, JPEG/);
  assert.deepEqual(named(chosen([], 0)), [0, ""]);
  assert.match(chosen([file("image/png", 1 << 30)], 0).why, /32 MB/);
  assert.deepEqual(named(chosen(Array(9).fill(file("image/jpeg")), 3)), [5, "A chat has 8 pictures at most."]);
  assert.equal(chosen([file("image/webp")], 9).files.length, 0);
});

test("a chat full of pictures fits into a request", () => {
  assert.ok(PICTURES.count * PICTURES.characters < 0.9 * 2 ** 20);
});
