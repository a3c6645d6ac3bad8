// Which token follows.

/** Numbers in [0, 1) that follow from the seed (mulberry32). */
export function numbers (seed) {
  let state = seed >>> 0
  return () => {
    state = state + 0x6d2b79f5 | 0
    let t = Math.imul(state ^ state >>> 15, 1 | state)
    t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t
    return ((t ^ t >>> 14) >>> 0) / 4294967296
  }
}

/** Greedy at temperature 0; else by chance among the likeliest `topK` (0: all) that have `topP` of the probability together. */
export function choose (logits, { temperature = 0, topK = 0, topP = 1 } = {}, random = Math.random) {
  let best = 0
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id
  if (!(temperature > 0)) return best
  let ids = Array.from(logits.keys())
  if (topK > 0 || topP < 1) ids.sort((one, other) => logits[other] - logits[one])
  if (topK > 0) ids = ids.slice(0, topK)
  const weights = ids.map(id => Math.exp((logits[id] - logits[best]) / temperature))
  let total = weights.reduce((sum, weight) => sum + weight, 0)
  if (topP < 1) {
    let kept = 0
    let sum = 0
    while (kept < ids.length && sum < topP * total) sum += weights[kept++]
    ids.length = Math.max(kept, 1)
    total = sum
  }
  let left = random() * total
  for (let at = 0; at < ids.length; at++) if ((left -= weights[at]) < 0) return ids[at]
  return ids[ids.length - 1]
}
