// Numbers and names for people. No DOM.

export function milliseconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  if (value < 1e6) return `${(value / 1e3).toFixed(1)} kB`;
  return `${(value / 1e6).toFixed(1)} MB`;
}

export function count(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : String(value);
}

/** "1 server", "2 servers". */
export function numbered(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** The end of a peer id, by which people tell peers apart. */
export function shortPeer(peer) {
  return `…${String(peer).slice(-6)}`;
}

/** Blocks a to b-1, as every command writes them. */
export function span([start, end]) {
  return `${start}:${end}`;
}

/** Why a server is missed, without what stands beside it anyway: which one it is. */
export function reasonFor(text, name) {
  return text.replace(/^server \S+ \(blocks \S+\) failed: /, "").replace(/12D3Koo\w{40,50}/g, name);
}

/** An error as a sentence; peers by their names. */
export function sentence(text, name = shortPeer) {
  const told = String(text).trim().replace(/12D3Koo\w{40,50}/g, name);
  // What begins with a name, a path or an option keeps its first letter.
  const first = /^(?!petalnode)[a-z]+(?=[\s,'])/.test(String(text).trim()) ? told[0].toUpperCase() + told.slice(1) : told;
  return /[.!?…]$/.test(first) ? first : `${first}.`;
}

/** What a server is doing, as this node knows it. */
export function stateOf({ state, answers, blocks, next_blocks: next }) {
  if (answers === false) return "not answering";
  return next && span(next) !== span(blocks) ? `${state}, goes to ${span(next)}` : state;
}

/** What this node thinks of a server, from 0 to 1. */
export function reputationOf({ reputation, banned_until: until }) {
  return reputation || until ? reputation.toFixed(2) : "new";
}
