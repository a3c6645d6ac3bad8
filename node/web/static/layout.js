// Where things of the swarm page are drawn. No DOM.

const WIDE = 760;
const ROW = 32;
const MAX_NODES = 24;
const MAX_LABELS = 21;

/** Blocks from left to right, a row for each server, the coverage above, in a picture of `width` pixels. */
export function lanes(blocks, coverage, servers, width = WIDE) {
  const left = width < 500 ? 74 : 110;
  const cell = (width - left) / Math.max(1, blocks);
  const x = (block) => left + block * cell;
  const top = 30;
  const placed = (span) => ({ x: x(span[0]), size: Math.max(3, (span[1] - span[0]) * cell - 1) });
  const bars = servers.map((server, index) => {
    const next = server.next_blocks;
    const goes = next && (next[0] !== server.blocks[0] || next[1] !== server.blocks[1]);
    return { server, ...placed(server.blocks), y: top + index * ROW, next: goes ? placed(next) : null };
  });
  const cover = coverage.map((number, block) => ({ block, number, x: x(block) }));
  return { width, height: top + servers.length * ROW + 20, left, cell, row: ROW, coverTop: 0, bars, cover };
}

/** Block numbers that are written at the axis: round steps, about `most` of them, and the end. */
export function ticks(blocks, most = 8) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  const step = steps.find((one) => blocks / one <= most) ?? 2000;
  const found = [];
  for (let tick = 0; tick < blocks - step / 2; tick += step) found.push(tick);
  return [...found, blocks];
}

/** Nodes on an ellipse, you first (at the left), and the least round trip between each two as a line. */
export function graph({ self, servers, round_trips: trips }, width = WIDE) {
  const margin = width < 500 ? 56 : 110;
  const known = new Set(servers.map((server) => server.peer_id));
  const used = new Set(trips.flatMap(({ from, to }) => [from, to]));
  const peers = [self, ...servers.map((server) => server.peer_id).filter((peer) => used.has(peer))].slice(0, MAX_NODES);
  const height = peers.length > 2 ? 340 : 130;
  const nodes = peers.map((peer, index) => {
    const angle = Math.PI + (2 * Math.PI * index) / peers.length;
    return { peer, x: Math.round(width / 2 + (width / 2 - margin) * Math.cos(angle)), y: Math.round(height / 2 + (height / 2 - 44) * Math.sin(angle)) };
  });
  const at = new Map(nodes.map((node) => [node.peer, node]));
  const least = new Map();
  for (const { from, to, ms } of trips) {
    if (!at.has(from) || !at.has(to) || from === to || (from !== self && !known.has(from))) continue;
    const key = [from, to].sort().join(" ");
    least.set(key, Math.min(ms, least.get(key) ?? Infinity));
  }
  const edges = [...least].map(([key, ms]) => {
    const [from, to] = key.split(" ").map((peer) => at.get(peer));
    return { from, to, ms, slow: slowness(ms), label: null };
  });
  if (edges.length <= MAX_LABELS) for (const edge of edges) edge.label = labelled(edge);
  return { width, height, nodes, edges };
}

// Not in the middle, where lines cross; two thirds of the way from the one that is further to the left.
function labelled({ from, to }) {
  const [one, other] = from.x <= to.x ? [from, to] : [to, from];
  return { x: Math.round(one.x + (other.x - one.x) * 0.36), y: Math.round(one.y + (other.y - one.y) * 0.36) };
}

/** 0 within a building, 1 within a country, 2 between continents, 3 more. */
export function slowness(ms) {
  return ms < 5 ? 0 : ms < 40 ? 1 : ms < 150 ? 2 : 3;
}
