import assert from "node:assert/strict";
import { test } from "node:test";

import { EventReader } from "../../node/web/static/client.js";
import { graph, lanes, slowness, ticks } from "../../node/web/static/layout.js";
import { bytes, count, milliseconds, numbered, reasonFor, reputationOf, sentence, shortPeer, span, stateOf } from "../../node/web/static/text.js";
import { checkedText, followed, named, NO_ROUTE, spoken, stepMilliseconds } from "../../node/web/static/route.js";

const hop = (peer_id, blocks, last_step_ms = 2) => ({ peer_id, blocks, last_step_ms, bytes_sent: 1, bytes_received: 2 });
const progress = (hops, more = {}) => ({
  choices: [],
  x_petalnode: { progress: { index: 0, tokens: 4, recoveries: 0, waiting: null, hops, ...more } },
});
const name = (peer) => peer.toUpperCase();

test("hops come as the answer does", () => {
  const route = followed(NO_ROUTE, progress([hop("a", [0, 3]), hop("b", [3, 6], 5)]));
  assert.deepEqual(route.hops.map(({ peer, ms }) => [peer, ms]), [["a", 2], ["b", 5]]);
  assert.equal(stepMilliseconds(route), 7);
  assert.equal(followed(route, { choices: [{ delta: { content: "x" } }] }), route);
});

test("a lost server is shown while it is missed, then who took over", () => {
  const before = followed(NO_ROUTE, progress([hop("a", [0, 3]), hop("b", [3, 6])]));
  const waiting = { peer_id: "b", blocks: [3, 6], lost: true, reason: "the stream ended", seconds: 30 };
  const held = followed(before, progress([hop("a", [0, 3]), hop("b", [3, 6])], { waiting }));
  assert.equal(held.waiting.peer, "b");
  assert.match(spoken(before, held, name), /Lost server B/);
  assert.equal(spoken(held, held, name), null);
  const after = followed(held, progress([hop("a", [0, 3]), hop("c", [3, 5]), hop("d", [5, 6])], { recoveries: 1, tokens: 9 }));
  assert.equal(after.waiting, null);
  assert.deepEqual(after.changes, [
    { at: 9, lost: [{ peer: "b", blocks: [3, 6] }], came: [{ peer: "c", blocks: [3, 5] }, { peer: "d", blocks: [5, 6] }] },
  ]);
  assert.match(spoken(held, after, name), /C, D took over/);
});

test("a server that comes back itself is a recovery too", () => {
  const hops = [hop("a", [0, 6])];
  const waiting = { peer_id: "a", blocks: [0, 6], lost: false, reason: "", seconds: 30 };
  const held = followed(followed(NO_ROUTE, progress(hops)), progress(hops, { waiting }));
  assert.match(spoken(NO_ROUTE, held, name), /No answer from server A/);
  const after = followed(held, progress(hops, { recoveries: 1 }));
  assert.deepEqual(after.changes, [{ at: 4, lost: [{ peer: "a", blocks: [0, 6] }], came: [] }]);
  assert.equal(spoken(held, after, name), "Recovered.");
});

test("the last chunk has the receipts and all tokens", () => {
  const chunk = {
    id: "chatcmpl-1",
    choices: [],
    usage: { completion_tokens: 12 },
    x_petalnode: { receipts: { count: 3, digest: "ab" }, choices: [{ index: 0, recoveries: 0, hops: [hop("a", [0, 6])] }] },
  };
  const route = followed(NO_ROUTE, chunk);
  assert.deepEqual([route.tokens, route.receipts], [12, { count: 3, digest: "ab", id: "chatcmpl-1" }]);
});

test("events are read whatever the pieces in which they come", () => {
  const stream = 'data: {"a": 1}\n\ndata: [DONE]\n\n';
  for (let cut = 0; cut <= stream.length; cut += 1) {
    const reader = new EventReader();
    assert.deepEqual([...reader.feed(stream.slice(0, cut)), ...reader.feed(stream.slice(cut))], ['{"a": 1}', "[DONE]"]);
  }
});

const server = (peer_id, blocks, next_blocks = null) => ({ peer_id, blocks, next_blocks });

test("servers lie over their blocks", () => {
  const { bars, cover, width, left, cell } = lanes(10, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [server("a", [0, 5]), server("b", [5, 6], [6, 9])]);
  assert.equal(cover.length, 10);
  assert.ok(Math.abs(left + 10 * cell - width) < 1e-6);
  assert.equal(lanes(10, [], [], 330).width, 330);
  assert.equal(bars[0].x, left);
  assert.ok(bars[1].next.x > bars[1].x && bars[0].next === null && bars[1].y > bars[0].y);
});

test("the axis has few numbers, and the last one", () => {
  assert.deepEqual(ticks(6), [0, 1, 2, 3, 4, 5, 6]);
  assert.deepEqual(ticks(30), [0, 5, 10, 15, 20, 25, 30]);
  for (const blocks of [1, 7, 80, 126, 4096]) assert.ok(ticks(blocks).length <= 10 && ticks(blocks).at(-1) === blocks);
});

test("the graph has each pair once, with its least round trip, and bounds", () => {
  const trips = [
    { from: "me", to: "a", ms: 3 },
    { from: "a", to: "b", ms: 20 },
    { from: "b", to: "a", ms: 10 },
    { from: "a", to: "unknown", ms: 1 },
  ];
  const { nodes, edges, width, height } = graph({ self: "me", servers: [server("a", [0, 1]), server("b", [1, 2])], round_trips: trips });
  assert.deepEqual(edges.map(({ ms, slow }) => [ms, slow]), [[3, 0], [10, 1]]);
  assert.ok(nodes.every(({ x, y }) => x > 0 && x < width && y > 0 && y < height));
  const many = Array.from({ length: 200 }, (_, index) => server(`s${index}`, [0, 1]));
  const all = many.map(({ peer_id }) => ({ from: "me", to: peer_id, ms: 1 }));
  assert.ok(graph({ self: "me", servers: many, round_trips: all }).nodes.length <= 24);
  assert.deepEqual([1, 10, 100, 1000].map(slowness), [0, 1, 2, 3]);
});

test("numbers for people", () => {
  assert.deepEqual([0.26, 12.34, 123.4, 1234, 65432, NaN].map(milliseconds), ["0.3 ms", "12.3 ms", "123 ms", "1.2 s", "65 s", "–"]);
  assert.deepEqual([12, 3456, 7.8e6].map(bytes), ["12 B", "3.5 kB", "7.8 MB"]);
  assert.deepEqual([950, 131072, 2.5e6].map(count), ["950", "131 k", "2.5 M"]);
  assert.equal(shortPeer("12D3KooWabcdef"), "…abcdef");
  assert.deepEqual([0, 1, 2].map((number) => numbered(number, "token")), ["0 tokens", "1 token", "2 tokens"]);
  assert.equal(span([0, 10]), "0:10");
  const peer = `12D3Koo${"W".repeat(45)}`;
  assert.equal(reasonFor(`server ${peer} (blocks 0:3) failed: the stream to ${peer} is closed`, () => "attic"), "the stream to attic is closed");
});

test("a route keeps the names of its servers", () => {
  const before = followed(NO_ROUTE, progress([hop("a", [0, 3]), hop("b", [3, 6])]));
  const route = named(before, new Map([["a", "attic"], ["x", "other"]]));
  assert.deepEqual(route.names, { a: "attic" });
  assert.equal(named(route, new Map()), route);
  const after = named(followed(route, progress([hop("c", [0, 3]), hop("b", [3, 6])], { recoveries: 1 })), new Map([["c", "cellar"]]));
  assert.deepEqual(after.names, { a: "attic", c: "cellar" });
});

test("errors are sentences", () => {
  const peer = `12D3Koo${"W".repeat(45)}`;
  assert.equal(sentence("nobody holds blocks 2:4"), "Nobody holds blocks 2:4.");
  assert.equal(sentence("petalnode does not answer. Is it running?"), "petalnode does not answer. Is it running?");
  assert.equal(sentence(`${peer} is gone`, () => "attic"), "attic is gone.");
  assert.equal(sentence("--blocks is wrong"), "--blocks is wrong.");
});

test("a server is what it says, unless it does not answer", () => {
  const server = { state: "online", blocks: [0, 3], next_blocks: null, answers: null, reputation: 0, banned_until: null };
  assert.deepEqual([stateOf(server), reputationOf(server)], ["online", "new"]);
  assert.equal(stateOf({ ...server, next_blocks: [3, 6] }), "online, goes to 3:6");
  assert.equal(stateOf({ ...server, answers: false }), "not answering");
  assert.deepEqual([{ reputation: 0.5 }, { reputation: 0, banned_until: 1 }].map(reputationOf), ["0.50", "0.00"]);
});

test("only an answer whose every choice was computed again is verified", () => {
  const right = { verdict: "yes", reason: "" };
  assert.equal(checkedText([right, right]), "Verified to the bit.");
  assert.equal(checkedText([right, { verdict: "no", reason: "server a lies" }]).includes("Wrong: server a lies."), true);
  assert.equal(checkedText([{ verdict: "unknown", reason: "no receipt" }]), "Not verified: no receipt.");
  assert.notEqual(checkedText([]), "Verified to the bit.");
});
