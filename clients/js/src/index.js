// A client of petalnode swarms, from docs/protocol.md: joins, fetches what a client needs, and generates over other people's machines.
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { Tokenizer } from '@huggingface/tokenizers'
import { circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { peerIdFromString } from '@libp2p/peer-id'
import { preSharedKey } from '@libp2p/pnet'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { hex } from './canonical.js'
import { ONLINE, askDirectory } from './directory.js'
import { Ends } from './ends.js'
import { deadline } from './framing.js'
import { readLink } from './link.js'
import { choose, numbers } from './sampling.js'
import { Session } from './session.js'
import { readStored, store } from './storage.js'
import { transports } from './transports.js'
import { fetchManifest, fetchPart } from './weights.js'

export { Cheated } from './session.js'
export { Refused } from './framing.js'
export { readLink }

const FRESH = 10_000 // milliseconds for which what was said of servers is used again
const DIALING = 15 // seconds
const JOINING = 4 // turns, where no peer answers in time
const PRIVATE = /^\/(ip4\/(10|127|169\.254|192\.168|172\.(1[6-9]|2\d|3[01])|0)\.|ip6\/(::|fe80|f[cd]))/i

export class Client {
  constructor (node, peers, wanted) {
    this._node = node
    this._peers = peers // multiaddrs by which it joined
    this._servers = new Map()
    this._known = 0
    this._wanted = wanted
    this.peerId = node.peerId.toString()
  }

  /**
   * Joins a swarm by the addresses of its peers, or a link. Browsers dial only WebSocket, and from a page that came by https
   * only with TLS.
   */
  static async join ({ peers = [], link, swarmKey, signal } = {}) {
    const said = link === undefined ? undefined : readLink(link)
    const addrs = [...peers, ...said?.peers ?? []].map(addr => multiaddr(addr))
    const key = swarmKey ?? said?.swarmKey
    const isPrivate = addrs.some(addr => PRIVATE.test(addr.toString()))
    const node = await createLibp2p({
      transports: [...transports(), circuitRelayTransport()],
      connectionEncrypters: [noise()],
      streamMuxers: [yamux()],
      connectionProtector: key === undefined
        ? undefined
        : preSharedKey({ psk: new TextEncoder().encode(`/key/swarm/psk/1.0.0/\n/base16/\n${key}`) }),
      // Addresses that strangers announce lead into this machine and its networks only if the person's own do.
      connectionGater: { denyDialMultiaddr: addr => !isPrivate && PRIVATE.test(addr.toString()) },
      services: { identify: identify() }
    })
    const client = new Client(node, addrs, said)
    for (let turn = 1; ; turn++) {
      try {
        await client.servers(undefined, true, signal)
        return client
      } catch (error) {
        // A machine that is busy may be late once; one that refuses says so at once.
        if (turn < JOINING && error.isLate && !signal?.aborted) continue
        await client.close()
        throw error
      }
    }
  }

  /** A stream of the protocol to a server, by its announcement, or to a peer, by its multiaddr. */
  async open (peer, protocol, signal) {
    const options = { signal: deadline(DIALING, signal), runOnLimitedConnection: true }
    if (typeof peer.getComponents === 'function') return await this._node.dialProtocol(peer, protocol, options)
    const id = peerIdFromString(peer.peer)
    if (this._node.getConnections(id).length === 0) {
      const addrs = peer.addrs.map(addr => multiaddr(addr)).map(addr => addr.encapsulate(`/p2p/${peer.peer}`))
      await this._node.dial(addrs, options)
    }
    return await this._node.dialProtocol(id, protocol, options)
  }

  /** Whether streams to a peer run through a relay. */
  isRelayed (peer) {
    const connections = this._node.getConnections(peerIdFromString(peer))
    return connections.every(({ remoteAddr }) => remoteAddr.toString().includes('/p2p-circuit'))
  }

  /** The servers that the swarm knows of, of one model version or of all; asked anew if `anew`, or after 10 s. */
  async servers (version, anew = false, signal) {
    if (anew || Date.now() - this._known > FRESH) {
      const reasons = []
      let answered = 0
      let isLate = false
      for (const peer of [...this._peers, ...this._servers.values()]) {
        try {
          for (const [id, said] of await askDirectory((at, protocol) => this.open(at, protocol, signal), peer, signal)) {
            if (!(this._servers.get(id)?.sequence > said.sequence)) this._servers.set(id, said)
          }
          if (++answered === 2) break
        } catch (error) {
          signal?.throwIfAborted()
          reasons.push(error.message)
          isLate ||= /time/i.test(error.name)
        }
      }
      if (answered === 0) {
        throw Object.assign(new Error(`no peer of the swarm answers: ${reasons.join('; ') || 'no address was given'}`), { isLate })
      }
      for (const [id, said] of this._servers) if (said.expiresMs < Date.now() - 10_000) this._servers.delete(id)
      this._known = Date.now()
    }
    return [...this._servers.values()].filter(said => version === undefined || said.version === version)
  }

  /** The models of the swarm: { name, version, numBlocks, servers, missing }, `missing` being blocks that nobody holds. */
  async models () {
    const found = new Map()
    for (const server of await this.servers()) {
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
  async load ({ model = this._wanted?.model, version = this._wanted?.modelVersion, onProgress, signal } = {}) {
    const models = (await this.models()).filter(found => (!model || found.name === model) && (!version || found.version.startsWith(version)))
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
    return new Model(this, { ...found, versionBytes: bytes }, manifest.config, new Ends(manifest.config, embeddings, head), texts)
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
    const read = name => {
      const file = texts.tensors.find(tensor => tensor.name === name)
      return file && JSON.parse(new TextDecoder().decode(file.data))
    }
    const tokenizer = read('tokenizer.json')
    this.tokenizer = tokenizer && new Tokenizer(tokenizer, read('tokenizer_config.json') ?? {})
    const eos = read('tokenizer_config.json')?.eos_token
    const ofTokenizer = eos && this.tokenizer ? this.tokenizer.encode(eos.content ?? eos, { add_special_tokens: false }).ids : []
    this.endIds = [read('generation_config.json')?.eos_token_id ?? ofTokenizer].flat()
  }

  /**
   * The tokens that follow a text or ids, one at a time: { id, text, route, recoveries }. `text` is what is new of the answer.
   * Options: maxNewTokens, temperature, topK, topP, seed, stopIds, signal.
   */
  async * generate (prompt, { maxNewTokens = 256, seed, stopIds = this.endIds, signal, ...sampling } = {}) {
    const ids = typeof prompt === 'string' ? this.tokenizer.encode(prompt).ids : Array.from(prompt)
    if (ids.length === 0) throw new Error('there is nothing to go on from')
    const random = seed === undefined ? Math.random : numbers(seed)
    const session = new Session(this._client, this, ids.length + maxNewTokens)
    const answer = []
    let told = ''
    try {
      let next = ids
      for (let count = 0; count < maxNewTokens; count++) {
        const output = await session.forward(this.ends.embed(next), signal)
        const id = choose(this.ends.logits(output), sampling, random)
        if (stopIds.includes(id)) return
        answer.push(id)
        const whole = this.tokenizer?.decode(answer, { skip_special_tokens: true, clean_up_tokenization_spaces: false }) ?? ''
        // The bytes of a letter may come in several tokens.
        const text = whole.endsWith('\ufffd') ? '' : whole.slice(told.length)
        told += text
        yield { id, text, route: session.route, recoveries: session.recoveries, cheated: session.cheated }
        next = [id]
      }
    } finally {
      await session.close()
    }
  }
}

export { hex }
