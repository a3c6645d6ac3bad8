// Who serves what: signed announcements, from any peer that keeps them (docs/protocol.md#announcements).
import { hex, isSigned, peerText } from './canonical.js'
import { Messages, deadline } from './framing.js'
import { ANNOUNCEMENT, DIRECTORY, decode } from './wire.js'

export const ONLINE = 2
export const OFFLINE = 4
const MAX_SERVERS = 10_000
const TOLERANCE = 10_000 // milliseconds between clocks
const PAGES = 64

/** The announcement in a record, if its signature and times are in order now; undefined otherwise. */
export function readAnnouncement (record, now = Date.now()) {
  let said
  try {
    said = decode(ANNOUNCEMENT, record.announcement)
  } catch {
    return undefined
  }
  const made = Number(said.sequence / 1_000_000n)
  const tolerance = Math.min(TOLERANCE, (said.expiresMs - made) / 3)
  const fits = record.announcement.length <= 16384 && said.modelVersion.length === 32 && said.numBlocks > 0 && said.numBlocks <= 4096 &&
    said.span !== undefined && said.span.start < said.span.end && said.span.end <= said.numBlocks && said.addrs.length <= 16
  if (!fits || made > now + TOLERANCE || said.expiresMs < now - tolerance || said.expiresMs > now + 3_610_000) return undefined
  if (!isSigned(said.peerId, 'petalnode/announcement/1', record.announcement, record.signature)) return undefined
  return { ...said, peer: peerText(said.peerId), version: hex(said.modelVersion), toString () { return this.peer } }
}

/** Puts questions to a peer's directory, on one stream: `work` gets a function from a query to the records of its answer. */
async function withDirectory (open, peer, signal, work) {
  const messages = new Messages(await open(peer, '/petalnode/directory/1'), DIRECTORY, peer, 576 << 10)
  try {
    return await work(async query => {
      await messages.send({ query }, [], deadline(10, signal))
      const { records } = await messages.receive(deadline(10, signal))
      if (records === undefined) throw new Error(`${peer} answered something else`)
      return records
    })
  } finally {
    await messages.close()
  }
}

/** The newest announcement of each server that the peer knows. */
export async function askDirectory (open, peer, signal) {
  const found = new Map()
  await withDirectory(open, peer, signal, async ask => {
    let after = new Uint8Array(0)
    for (let page = 0; page < PAGES && found.size < MAX_SERVERS; page++) {
      const { records, truncated } = await ask({ after })
      for (const record of records) {
        const said = readAnnouncement(record)
        if (said === undefined) continue
        if (!found.has(said.peer) || found.get(said.peer).sequence < said.sequence) found.set(said.peer, said)
        after = said.peerId
      }
      if (!truncated) break
    }
  })
  return found
}

/** What a server, { peer, id, addrs }, announces of itself at this moment; undefined if it says nothing that is in order. */
export async function askOwn (open, server, signal) {
  const after = server.id.slice() // as a number, less one
  for (let at = after.length - 1; at >= 0 && after[at]-- === 0;) at--
  const { records } = await withDirectory(open, server, signal, ask => ask({ limit: 1, after }))
  return records.map(record => readAnnouncement(record)).find(said => said?.peer === server.peer)
}

/** Servers for blocks start .. end, each with the blocks that it shall run, or undefined if some block has none. */
export function chooseChain (servers, start, end, excluded) {
  const chain = []
  const usable = servers.filter(server => server.state === ONLINE && !excluded.has(server.peer))
  while (start < end) {
    const here = usable.filter(server => server.span.start <= start && start < server.span.end)
    here.sort((one, other) => Math.min(other.span.end, end) - Math.min(one.span.end, end) || one.stepUs - other.stepUs)
    if (here.length === 0) return undefined
    const upTo = Math.min(here[0].span.end, end)
    chain.push({ server: here[0], start, end: upTo })
    start = upTo
  }
  return chain
}
