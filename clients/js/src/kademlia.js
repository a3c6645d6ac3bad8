// Servers by the provider records that they leave in Kademlia (docs/protocol.md#announcements): the way in for who knows a peer of any
// DHT of libp2p, and no directory.
import { multiaddr } from '@multiformats/multiaddr'
import { concat, hex, peerText, sha256 } from './canonical.js'
import { OFFLINE, askOwn } from './directory.js'
import { Messages, deadline } from './framing.js'
import { KADEMLIA } from './wire.js'

const PROTOCOL = '/ipfs/kad/1.0.0'
const GET_PROVIDERS = 3
const MAX_ANSWER = 256 << 10 // bytes
const DIGITS = 12 // of a model version in a key
const RANGES = 8 // of blocks of a model, at most, and keys of directories
const LIMITS = {
  closest: 10, // peers nearest to a key that are asked for its records
  asked: 24, // peers of one key
  askedAtOnce: 4,
  asking: 4, // seconds
  closer: 20, // peers taken of an answer
  providers: 32,
  addrs: 8, // of a peer in an answer
  known: 16, // addresses of a peer, whoever has named them
  failures: 4, // of the peers that one address has named, after which the others come last
  keysAtOnce: 2,
  tried: 16, // providers of a key that are asked for their announcements
  triedAtOnce: 4,
  triedInAll: 64,
  enough: 4, // servers found under a key
  seconds: 15 // of a search
}

/** Addresses of this machine and its networks. */
export const PRIVATE = /^\/(ip4\/(10|127|169\.254|192\.168|172\.(1[6-9]|2\d|3[01])|0)\.|ip6\/(::|fe80|f[cd]))/i

const place = bytes => BigInt(`0x${hex(sha256(bytes))}`)

/** By what peers count: an IPv4 address, a /64 of IPv6, or a name. */
export function originOf (addr) {
  const [, kind, host = addr] = addr.split('/')
  if (kind !== 'ip6') return host
  const [left, right] = host.split('::').map(half => half === '' ? [] : half.split(':'))
  const groups = right === undefined ? left : [...left, ...Array(Math.max(0, 8 - left.length - right.length)).fill('0'), ...right]
  return groups.slice(0, 4).join(':')
}

/** Where a contact is said to be: on the internet, if there is such an address. */
function originsOf ({ peer, addrs }) {
  const everywhere = addrs.filter(addr => !PRIVATE.test(addr))
  const origins = (everywhere.length > 0 ? everywhere : addrs).map(originOf)
  return origins.length > 0 ? [...new Set(origins)] : [peer]
}

function shuffled (items) {
  const out = [...items]
  for (let at = out.length - 1; at > 0; at--) {
    const other = Math.floor(Math.random() * (at + 1));
    [out[at], out[other]] = [out[other], out[at]]
  }
  return out
}

/** The keys of a search, each with what tells whether an announcement is one that is looked for there. */
export function keysOf (version) {
  const isNamed = version.length >= DIGITS
  const keyOf = number => isNamed ? `petalnode/blocks/${version.slice(0, DIGITS)}/${number}` : `petalnode/directory/${number}`
  return Array.from({ length: RANGES }, (_, number) => ({
    key: concat([Uint8Array.of(0x12, 0x20), sha256(new TextEncoder().encode(keyOf(number)))]),
    fits: ({ version: found, numBlocks, span: { start, end } }) => {
      const size = Math.max(4, Math.ceil(numBlocks / RANGES))
      return found.startsWith(version) && (!isNamed || (start < (number + 1) * size && end > number * size))
    }
  }))
}

/** A look-up: whom to ask next, and who was named. Contacts are { peer, id, addrs }, with multiaddrs as text. */
export class Lookup {
  constructor (key, start) {
    this._target = place(key)
    this._known = new Map()
    this._gone = new Set()
    this._sources = new Map() // address -> how often the peers that it has named were there, and were not
    this._named = new Map() // address -> the providers that it has named
    this.asked = 0
    for (const contact of start) this._learn(contact, '')
  }

  _learn (contact, source) {
    if (this._gone.has(contact.peer)) return
    const known = this._known.get(contact.peer)
    if (known === undefined) {
      const far = place(contact.id) ^ this._target
      this._known.set(contact.peer, { contact, far, origins: originsOf(contact), by: new Set([source]), isAsked: false })
      return
    }
    known.by.add(source)
    if (!known.isAsked) known.contact = { ...contact, addrs: [...new Set([...known.contact.addrs, ...contact.addrs])].slice(0, LIMITS.known) }
  }

  /** The nearest peer of each address, then the second nearest of each. Those that only misleading peers have named come last. */
  _ranked () {
    const turns = new Map()
    const all = [...this._known.values()].sort((one, other) => one.far < other.far ? -1 : 1)
    for (const known of all) {
      known.turn = Math.max(...known.origins.map(origin => turns.get(origin) ?? 0))
      for (const origin of known.origins) turns.set(origin, (turns.get(origin) ?? 0) + 1)
      known.isDoubtful = !known.isAsked && [...known.by].every(source => this._misleads(source))
    }
    return all.sort((one, other) => one.isDoubtful - other.isDoubtful || one.turn - other.turn || (one.far < other.far ? -1 : 1))
  }

  _misleads (source) {
    const { there, gone } = this._sources.get(source) ?? { there: 0, gone: 0 }
    return gone >= LIMITS.failures && gone > 3 * there
  }

  /** Whom to ask now; undefined if nobody, as long as no further answer comes. */
  next () {
    const known = this.asked < LIMITS.asked && this._ranked().slice(0, LIMITS.closest).find(({ isAsked }) => !isAsked)
    if (!known) return undefined
    known.isAsked = true
    this.asked++
    return known.contact
  }

  _count (known, what) {
    for (const source of known.by) {
      const counts = this._sources.get(source) ?? { there: 0, gone: 0 }
      counts[what]++
      this._sources.set(source, counts)
    }
  }

  /** `origin` is where the peer is that said so. */
  answered (peer, { closer, providers }, origin) {
    const known = this._known.get(peer)
    this._count(known, 'there')
    known.origins = [origin]
    this._named.set(origin, [...this._named.get(origin) ?? [], ...providers.slice(0, LIMITS.providers)])
    const near = closer.map(contact => [place(contact.id) ^ this._target, contact]).sort(([one], [other]) => one < other ? -1 : 1)
    for (const [, contact] of near.slice(0, LIMITS.closer)) this._learn(contact, origin)
  }

  failed (peer) {
    this._count(this._known.get(peer), 'gone')
    this._known.delete(peer)
    this._gone.add(peer)
  }

  /** Who was named, in random order, but going around the addresses of who named them: thousands of names are heard as often as one. */
  providers () {
    const heaps = shuffled(this._named.values()).map(shuffled)
    const found = new Map()
    for (let turn = 0; heaps.some(heap => turn < heap.length); turn++) {
      for (const contact of heaps.flatMap(heap => heap.slice(turn, turn + 1))) {
        const addrs = [...new Set([...found.get(contact.peer)?.addrs ?? [], ...contact.addrs])].slice(0, LIMITS.known)
        found.set(contact.peer, { ...contact, addrs })
      }
    }
    return [...found.values()]
  }
}

/** An address of a record as text, without /p2p of the peer itself; undefined if it is none that a client dials. */
function dialable (bytes) {
  try {
    const addr = multiaddr(bytes).toString().replace(/\/p2p\/[^/]+$/, '')
    return /^\/(ip4|ip6|dns|dns4|dns6)\//.test(addr) ? addr : undefined
  } catch {
    return undefined
  }
}

function contactsOf (peers, most) {
  return shuffled(peers.filter(({ id }) => id.length >= 2 && id.length <= 64)).slice(0, 4 * most).map(({ id, addrs }) => (
    { id, peer: peerText(id), addrs: addrs.slice(0, LIMITS.addrs).map(dialable).filter(addr => addr !== undefined) }
  ))
}

/** `work` on each item, some at once. */
async function each (items, atOnce, work) {
  const waiting = items[Symbol.iterator]()
  await Promise.all(Array.from({ length: atOnce }, async () => {
    for (const item of waiting) await work(item)
  }))
}

async function ask (client, contact, key, signal) {
  const until = deadline(LIMITS.asking, signal)
  const messages = new Messages(await client.open(contact, PROTOCOL, until), KADEMLIA, contact.peer, MAX_ANSWER)
  try {
    await messages.send({ type: GET_PROVIDERS, key }, [], until)
    const { type, closerPeers, providerPeers } = await messages.receive(until)
    if (type !== GET_PROVIDERS) throw new Error(`${contact.peer} answered something else`)
    const closer = contactsOf(closerPeers, LIMITS.closer)
    const isReachable = await Promise.all(closer.map(other => client.canDial(other)))
    return { closer: closer.filter((_, at) => isReachable[at]), providers: contactsOf(providerPeers, LIMITS.providers) }
  } finally {
    messages.abort(new Error('this was all'))
  }
}

async function lookUp (client, key, signal) {
  const lookup = new Lookup(key, client.contacts)
  const running = new Set()
  while (!signal.aborted) {
    const contact = running.size < LIMITS.askedAtOnce ? lookup.next() : undefined
    if (contact === undefined && running.size === 0) break
    if (contact === undefined) {
      await Promise.race(running)
      continue
    }
    const asked = ask(client, contact, key, signal).then(
      answer => lookup.answered(contact.peer, answer, client.originOf(contact.peer)),
      () => lookup.failed(contact.peer)
    ).finally(() => running.delete(asked))
    running.add(asked)
  }
  return lookup
}

/**
 * Servers of the model version that begins so, or of any where it is shorter than 12 digits, each by its own word: their announcements.
 * Never throws; takes some seconds at most.
 */
export async function searchRecords (client, version, signal) {
  const until = deadline(LIMITS.seconds, signal)
  const tried = new Map() // peer -> its announcement, or undefined, once it is there
  await each(shuffled(keysOf(version)), LIMITS.keysAtOnce, async ({ key, fits }) => {
    const lookup = await lookUp(client, key, until)
    let [count, found] = [0, 0]
    await each(lookup.providers(), LIMITS.triedAtOnce, async contact => {
      const isOver = count >= LIMITS.tried || found >= LIMITS.enough || until.aborted
      if (isOver || (tried.size >= LIMITS.triedInAll && !tried.has(contact.peer))) return
      count++
      if (!tried.has(contact.peer)) {
        const open = (peer, protocol) => client.open(peer, protocol, until)
        tried.set(contact.peer, askOwn(open, contact, until).catch(() => undefined))
      }
      const said = await tried.get(contact.peer)
      if (said !== undefined && said.state !== OFFLINE && fits(said)) found++
    })
  })
  return (await Promise.all(tried.values())).filter(said => said !== undefined && said.state !== OFFLINE)
}
