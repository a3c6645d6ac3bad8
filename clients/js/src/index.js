// A client of petalnode swarms, from docs/protocol.md: joins, fetches what a client needs, and generates over other people's machines.
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { Template } from '@huggingface/jinja'
import { Tokenizer } from '@huggingface/tokenizers'
import { circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { peerIdFromString } from '@libp2p/peer-id'
import { preSharedKey } from '@libp2p/pnet'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { hex } from './canonical.js'
import { Conversation, MOST_NEW } from './conversation.js'
import { ONLINE, askDirectory, chooseChain } from './directory.js'
import { Ends } from './ends.js'
import { deadline } from './framing.js'
import { PRIVATE, originOf, searchRecords } from './kademlia.js'
import { readLink } from './link.js'
import { readStored, store } from './storage.js'
import { transports } from './transports.js'
import { fetchManifest, fetchPart } from './weights.js'

export { Cheated } from './session.js'
export { Refused } from './framing.js'
export { readLink }

const FRESH = 10_000 // milliseconds for which what was said of servers is used again
const STALE = 60_000 // and for which it is still used while it is asked anew
const DIALING = 15 // seconds
const PINGS = 15_000 // milliseconds; 5,000 are libp2p's
const JOINING = 4 // turns, where no peer answers in time
const SEARCHED = 20_000 // milliseconds between two searches in Kademlia

/** What failed at one address or several, as one error. Of a WebSocket there is an event only: nobody is told why, for safety's sake. */
function told (error) {
  const all = error.errors ?? [error]
  if (all[0] === error && error instanceof Error) return error
  const reasons = all.map(one => one instanceof Error ? one.message : 'no line: nobody is there, or its certificate is not taken here')
  return Object.assign(new Error([...new Set(reasons)].join(', ')), { name: error.name ?? 'Error' })
}

function addressesOf (peer) {
  if (typeof peer.getComponents === 'function') return peer
  // A name that stands for addresses would be asked for over HTTP.
  return peer.addrs.map(addr => multiaddr(addr)).filter(addr => !addr.toString().startsWith('/dnsaddr/')).map(addr => addr.encapsulate(`/p2p/${peer.peer}`))
}

export class Client {
  constructor (node, peers, wanted) {
    this._node = node
    this._peers = peers // multiaddrs by which it joined
    this._servers = new Map()
    this._known = this._searched = 0
    this.distrusted = new Set() // peers that signed what is not so: sessions leave them out
    /** What the link means, { model, version }; empty without one. */
    this.wanted = wanted
    this.peerId = node.peerId.toString()
  }

  /**
   * Joins a swarm by the addresses of its peers, or a link. Browsers dial only WebSocket, and from a page that came by https
   * only with TLS; `transports` are more of libp2p's, such as `webRTC()`, for swarms that are not private.
   */
  static async join ({ peers = [], link, swarmKey, transports: more = [], signal } = {}) {
    const said = link === undefined ? undefined : readLink(link)
    const addrs = [...peers, ...said?.peers ?? []].map(addr => multiaddr(addr))
    const key = swarmKey ?? said?.swarmKey
    const isPrivate = addrs.some(addr => PRIVATE.test(addr.toString()))
    const node = await createLibp2p({
      transports: [...transports(), ...key === undefined ? more : [], circuitRelayTransport()],
      connectionEncrypters: [noise()],
      streamMuxers: [yamux()],
      connectionProtector: key === undefined
        ? undefined
        : preSharedKey({ psk: new TextEncoder().encode(`/key/swarm/psk/1.0.0/\n/base16/\n${key}`) }),
      // Addresses that strangers announce lead into this machine and its networks only if the person's own do.
      connectionGater: { denyDialMultiaddr: addr => !isPrivate && PRIVATE.test(addr.toString()) },
      // A machine that is busy may be late; what is aborted here are all answers of a server.
      connectionMonitor: { pingTimeout: { minTimeout: PINGS } },
      services: { identify: identify() }
    })
    const client = new Client(node, addrs, { model: said?.model, version: said?.modelVersion })
    for (let turn = 1; ; turn++) {
      try {
        await client.servers(client.wanted.version, true, signal)
        return client
      } catch (error) {
        // A machine that is busy may be late once; one that refuses says so at once.
        if (turn < JOINING && error.isLate && !signal?.aborted) continue
        await client.close()
        throw error
      }
    }
  }

  /** A stream for the protocol to a server, by its announcement, or to a peer, by its multiaddr. `Messages` agrees on the protocol. */
  async open (peer, protocol, signal) {
    const options = { signal: deadline(DIALING, signal) }
    try {
      const connection = this._connectionTo(peer) ?? await this._node.dial(addressesOf(peer), options)
      // libp2p's own newStream waits a round trip until the protocol is agreed on, before anything is sent.
      const stream = await connection.muxer.createStream(options)
      stream.protocol = protocol
      return stream
    } catch (error) {
      throw told(error)
    }
  }

  /** The one to a server that there is, the direct one first. */
  _connectionTo ({ peer }) {
    const open = peer === undefined ? [] : this._node.getConnections(peerIdFromString(peer)).filter(({ status }) => status === 'open')
    return open.find(({ direct }) => direct) ?? open[0]
  }

  /** How bytes to a peer travel: 'direct', 'relay', or null where it is not connected. */
  pathTo (peer) {
    const connections = this._node.getConnections(peerIdFromString(peer))
    const isRelayed = ({ remoteAddr }) => remoteAddr.toString().includes('/p2p-circuit')
    return connections.length === 0 ? null : connections.every(isRelayed) ? 'relay' : 'direct'
  }

  /** Whether it could be dialed from here, at some address. */
  async canDial (peer) {
    try {
      return this._connectionTo(peer) !== undefined || await this._node.isDialable(addressesOf(peer))
    } catch {
      return false
    }
  }

  /** The peers that it is connected to: { peer, id, addrs }. */
  get contacts () {
    return this._node.getConnections().map(({ remotePeer, remoteAddr }) => (
      { peer: remotePeer.toString(), id: remotePeer.toMultihash().bytes, addrs: [remoteAddr.toString()] }
    ))
  }

  /** The address by which a peer counts: a relay's, where it is reached through one. */
  originOf (peer) {
    const found = this._connectionTo({ peer })
    return found === undefined ? peer : originOf(found.remoteAddr.toString())
  }

  /**
   * The servers that the swarm knows of, of model versions that begin so or of all; asked anew if `anew`, or after a minute. Where no peer
   * has a directory, or some block has no server but those `without`, they are looked for in Kademlia.
   */
  async servers (version = '', anew = false, signal, without) {
    const age = Date.now() - this._known
    if (anew || age > STALE) await this._refresh(signal, version, without)
    else if (age > FRESH) this._refreshing ??= this._refresh().catch(() => {}).finally(() => { this._refreshing = undefined })
    return this._of(version)
  }

  _of (version) {
    return [...this._servers.values()].filter(said => said.version.startsWith(version))
  }

  async _refresh (signal, version = '', without) {
    const asked = { reasons: [], answers: 0, isLate: false }
    await this._askDirectories([...this._peers, ...this._servers.values()], asked, signal)
    if (asked.answers === 0 || this._lacks(version, without ?? new Set())) {
      const searching = this._search(version, signal)
      if (without === undefined || asked.answers === 0) {
        const found = await searching
        await this._askDirectories(found, asked, signal)
        asked.answers += found.length
      } else {
        searching.catch(() => {}) // a session asks again each second, and does not wait for it
      }
    }
    if (asked.answers === 0) {
      const told = asked.reasons.join('; ') || 'no address was given'
      throw Object.assign(new Error(`no peer of the swarm answers: ${told}`), { isLate: asked.isLate })
    }
    for (const [id, said] of this._servers) if (said.expiresMs < Date.now() - 10_000) this._servers.delete(id)
    this._known = Date.now()
  }

  /** Takes in what the first two of these peers know that answer. */
  async _askDirectories (peers, asked, signal) {
    let answers = 0
    for (const peer of peers) {
      try {
        const found = await askDirectory((at, protocol) => this.open(at, protocol, signal), peer, signal)
        for (const said of found.values()) this._take(said)
        asked.answers++
        if (++answers === 2) return
      } catch (error) {
        signal?.throwIfAborted()
        asked.reasons.push(error.message)
        asked.isLate ||= /time/i.test(error.name)
      }
    }
  }

  _take (said) {
    if (!(this._servers.get(said.peer)?.sequence > said.sequence)) this._servers.set(said.peer, said)
  }

  /** Whether some block of these versions has no server; those of one version have the same number of blocks. */
  _lacks (version, without) {
    const known = this._of(version)
    return known.length === 0 || (version !== '' && chooseChain(known, 0, known[0].numBlocks, without) === undefined)
  }

  /** Servers that Kademlia leads to, from the peers that it is connected to. */
  async _search (version, signal) {
    if (Date.now() - this._searched < SEARCHED) return []
    this._searched = Date.now()
    const before = this.contacts.map(({ peer }) => peer)
    const found = await searchRecords(this, version, signal)
    const used = new Set([...before, ...this._servers.keys(), ...found.map(({ peer }) => peer)])
    for (const connection of this._node.getConnections()) {
      const isIdle = !used.has(connection.remotePeer.toString()) && connection.streams.length === 0
      if (isIdle) connection.close().catch(() => {}) // of those that were asked on the way
    }
    signal?.throwIfAborted()
    for (const said of found) this._take(said)
    return found
  }

  /**
   * The models of the swarm of this name, and a version that begins so: { name, version, numBlocks, servers, missing }, `missing` being
   * blocks that nobody holds.
   */
  async models ({ model: name, version = '' } = {}) {
    const found = new Map()
    const isMeant = server => (!name || server.modelName === name) && server.version.startsWith(version)
    for (const server of (await this.servers()).filter(isMeant)) {
      const model = found.get(server.version) ?? { name: server.modelName, version: server.version, numBlocks: server.numBlocks, servers: [] }
      model.servers.push({ peer: server.peer, blocks: [server.span.start, server.span.end], online: server.state === ONLINE })
      found.set(server.version, model)
    }
    for (const model of found.values()) {
      const held = block => model.servers.some(({ blocks, online }) => online && blocks[0] <= block && block < blocks[1])
      model.missing = Array.from({ length: model.numBlocks }, (_, block) => block).filter(block => !held(block))
    }
    return [...found.values()]
  }

  /** Fetches and checks what a client needs of a model: by its name, or the first digits of its version; or the link's; or the only one. */
  async load ({ model = this.wanted.model, version = this.wanted.version, onProgress, signal } = {}) {
    const models = await this.models({ model, version })
    if (models.length !== 1) throw new Error(`the swarm has ${models.length} such models: ${models.map(found => `${found.name}@${found.version.slice(0, 12)}`).join(', ')}`)
    const [found] = models
    const servers = await this.servers(found.version)
    const bytes = servers[0].modelVersion
    const open = (peer, protocol) => this.open(peer, protocol, signal)
    const manifest = await fetchManifest(open, [...servers, ...this._peers], bytes, signal)
    const count = manifest.blocks.length
    // The digest of the tokenizer is only the word of who gives it: the peers that the person named come first.
    const part = (number, expected) => fetchPart(open, [...this._peers, ...servers], bytes, number, expected, onProgress, signal)
    const own = async (number, digest) => {
      const stored = await readStored(bytes, number, digest)
      if (stored !== undefined) return stored
      const fetched = await part(number, () => digest)
      await store(bytes, number, fetched)
      return fetched
    }
    const embeddings = await own(0, manifest.embeddings)
    const head = await own(count + 1, manifest.head)
    const texts = await part(count + 2, offer => offer.texts)
    return new Model(this, { ...found, versionBytes: bytes, numBlocks: count }, manifest.config, new Ends(manifest.config, embeddings, head), texts)
  }

  async close () {
    await this._node.stop()
  }
}

/** A model that is ready to generate. */
export class Model {
  constructor (client, found, config, ends, texts) {
    this._client = client
    this.name = found.name
    this.version = found.version
    this.versionBytes = found.versionBytes
    this.numBlocks = found.numBlocks
    this.config = config
    this.ends = ends
    const textOf = name => {
      const file = texts.tensors.find(tensor => tensor.name === name)
      return file && new TextDecoder().decode(file.data)
    }
    const read = name => JSON.parse(textOf(name) ?? 'null')
    const tokenizer = read('tokenizer.json')
    const about = read('tokenizer_config.json') ?? {}
    this.tokenizer = tokenizer && new Tokenizer(tokenizer, about)
    const specials = Object.entries(about).filter(([name]) => name.endsWith('_token')).map(([name, token]) => [name, token?.content ?? token])
    this._specials = Object.fromEntries(specials.filter(([, token]) => typeof token === 'string'))
    const [eos, given] = [this._specials.eos_token, read('generation_config.json')?.eos_token_id]
    const ofTokenizer = eos && this.tokenizer ? this.tokenizer.encode(eos, { add_special_tokens: false }).ids : []
    this.endIds = [...new Set([given ?? [], ofTokenizer].flat())]
    const named = [about.chat_template ?? []].flat()
    const template = textOf('chat_template.jinja') ?? named.find(({ name }) => name === 'default')?.template ?? named[0]
    this._template = typeof template === 'string' ? template : undefined
  }

  /** The ids by which the model answers messages, { role, content }. One without a chat template goes on from their texts. */
  prompt (messages) {
    if (messages.some(({ content }) => typeof content !== 'string')) throw new Error('this client hands on no pictures')
    if (this._template === undefined) return this.tokenizer.encode(messages.map(({ content }) => content).join('\n')).ids
    try {
      const text = new Template(this._template).render({ ...this._specials, messages, add_generation_prompt: true })
      return this.tokenizer.encode(text, { add_special_tokens: false }).ids
    } catch (error) {
      throw new Error(`the model's chat template does not take these messages: ${error.message}`)
    }
  }

  /**
   * The tokens that follow a text or ids, one at a time: { id, text, route, recoveries, cheated }. `text` is what is new of the answer.
   * Options: maxNewTokens, temperature, topK, topP, seed, stopIds, drafts, signal, onWaiting.
   */
  async * generate (prompt, options = {}) {
    const ids = typeof prompt === 'string' ? this.tokenizer.encode(prompt).ids : Array.from(prompt)
    const conversation = new Conversation(this._client, this, ids.length + (options.maxNewTokens ?? MOST_NEW))
    try {
      yield * conversation.generate(ids, options)
    } finally {
      await conversation.close()
    }
  }

  /** Answers that go on from each other, over one session; `close` ends it. */
  conversation () {
    return new Conversation(this._client, this)
  }
}

export { hex }
