// The route of an answer through the swarm, as chunks tell of it: the hops, what it waits for, who was replaced. No DOM.
//
// {hops: [{peer, blocks, relayed, ms, sent, received}], waiting, changes: [{at, lost, came}], recoveries, receipts, tokens, names}

export const NO_ROUTE = { hops: [], waiting: null, changes: [], recoveries: 0, receipts: null, tokens: 0, names: {} };

/** The route after a chunk; the same object if the chunk says nothing of it. */
export function followed(route, chunk) {
  const told = chunk.x_petalnode;
  if (!told) return route;
  if (told.progress) return withHops(route, told.progress, told.progress.waiting ?? null, told.progress.tokens);
  const choice = told.choices?.[0];
  if (!choice) return route;
  const tokens = chunk.usage?.completion_tokens ?? route.tokens;
  return { ...withHops(route, choice, null, tokens), receipts: told.receipts?.count ? { ...told.receipts, id: chunk.id } : null };
}

/** What the page says of an answer that was computed again; `answers` as the API tells of them. */
export function checkedText(answers) {
  if (answers.length && answers.every((answer) => answer.verdict === "yes")) return "Verified to the bit.";
  return answers.map((answer) => (answer.verdict === "no" ? `Wrong: ${answer.reason}.` : `Not verified: ${answer.reason}.`)).join(" ");
}

function withHops(route, told, waiting, tokens) {
  const hops = (told.hops ?? []).map((hop) => ({
    peer: hop.peer_id,
    blocks: hop.blocks,
    relayed: hop.relayed ?? false,
    ms: hop.last_step_ms,
    sent: hop.bytes_sent,
    received: hop.bytes_received,
  }));
  const recoveries = told.recoveries ?? route.recoveries;
  const lost = leavers(route.hops, hops);
  const came = leavers(hops, route.hops);
  const changed = recoveries > route.recoveries;
  // The server may have come back itself.
  const change = { at: tokens, lost: lost.length ? lost : route.waiting ? [asHop(route.waiting)] : [], came };
  return {
    ...route,
    hops: hops.length ? hops : route.hops,
    waiting: waiting && { peer: waiting.peer_id, blocks: waiting.blocks, lost: waiting.lost, reason: waiting.reason, seconds: waiting.seconds },
    changes: changed ? [...route.changes, change] : route.changes,
    recoveries,
    tokens,
  };
}

const asHop = ({ peer, blocks }) => ({ peer, blocks });

function leavers(before, after) {
  const kept = new Set(after.map((hop) => `${hop.peer} ${hop.blocks}`));
  return before.filter((hop) => !kept.has(`${hop.peer} ${hop.blocks}`)).map(asHop);
}

/** The route with the names by which its servers go now: they are kept when the servers are gone. */
export function named(route, names) {
  const peers = [...route.hops, ...route.changes.flatMap(({ lost, came }) => [...lost, ...came])].map(({ peer }) => peer);
  const found = peers.filter((peer) => names.has(peer) && route.names?.[peer] !== names.get(peer));
  return found.length ? { ...route, names: { ...route.names, ...Object.fromEntries(found.map((peer) => [peer, names.get(peer)])) } } : route;
}

/** Milliseconds in which a step passes all servers. */
export function stepMilliseconds(route) {
  return route.hops.reduce((sum, hop) => sum + hop.ms, 0);
}

/** What a screen reader says of a change, or null if there is nothing to say. */
export function spoken(before, after, name) {
  if (after.waiting && before.waiting?.peer !== after.waiting.peer) {
    return `${after.waiting.lost ? "Lost" : "No answer from"} server ${name(after.waiting.peer)}. Looking for another one.`;
  }
  if (after.recoveries > before.recoveries) {
    const { came } = after.changes[after.changes.length - 1];
    return came.length ? `Recovered: ${came.map((hop) => name(hop.peer)).join(", ")} took over.` : "Recovered.";
  }
  return null;
}
