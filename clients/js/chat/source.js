// What the chat page asks for (node/web/static/client.js), from the swarm itself. Its key is a link, or a peer's address.
import { Refused } from '../../../node/web/static/client.js'
import { Client } from '../src/index.js'
import { webRTC } from '../src/webrtc.js'

const STATES = ['', 'joining', 'online', 'draining']

export class SwarmSource {
  #key
  #tell
  #joined = {} // key -> a Client that will be there
  #loading = {} // version -> a Model that will be there
  #shown // the version that was asked for last
  #talk // { model, conversation } of the last answer: the next one may go on from it

  keyed = {
    name: 'Link',
    a: 'a link',
    missing: 'This page joins a swarm by a link, or by the address of one of its peers that has /ws or /webrtc-direct.',
    wrong: 'This link does not lead into a swarm.',
    made: 'Made with: petalnode invite',
    note: 'Of the swarm that this page chats with.'
  }

  others = 'Also served'

  /** `key()` is the link or ""; `tell(text)` shows what is fetched. */
  constructor (key, tell) {
    this.#key = key
    this.#tell = tell
  }

  async models () {
    const found = await this.#models()
    if (found.length === 0) throw new Refused('nobody serves the model of this link')
    this.#shown ??= found[0].version
    this.#load(this.#shown).catch(() => {}) // whoever asks for an answer is told
    return found.map(model => ({ id: idOf(model, found) }))
  }

  async swarm () {
    const client = await this.#client()
    const models = await this.#models()
    const model = models.find(({ version }) => version === this.#shown) ?? models[0]
    if (model === undefined) throw new Refused('nobody serves the model of this link')
    const coverage = Array.from({ length: model.numBlocks }, (_, block) => (
      model.servers.filter(({ blocks, online }) => online && blocks[0] <= block && block < blocks[1]).length
    ))
    const said = await client.servers(model.version)
    return {
      self: client.peerId,
      model: model.name,
      model_version: model.version,
      num_blocks: model.numBlocks,
      coverage,
      missing_blocks: model.missing.map(block => [block, block + 1]),
      help: null,
      servers: said.filter(({ state }) => STATES[state]).map(server => reported(server, client)),
      round_trips: []
    }
  }

  /** Streams an answer, in the chunks of the API. Ends early, without an error, when `signal` is aborted. */
  async chat ({ model, messages, temperature, top_p: topP, max_tokens: maxNewTokens, seed }, { signal, onChunk }) {
    const progress = { tokens: 0, recoveries: 0, hops: [], waiting: null }
    const say = (content, reason = null) => onChunk({
      choices: [{ delta: { content }, finish_reason: reason }],
      x_petalnode: { progress: { ...progress } }
    })
    const onWaiting = ({ peer, blocks, reason }) => {
      progress.waiting = { peer_id: peer, blocks, reason, lost: true }
      say('')
    }
    try {
      const found = await this.#models()
      const { version } = found.find(one => idOf(one, found) === model) ?? found[0]
      this.#shown = version
      const loaded = await this.#load(version)
      signal?.throwIfAborted()
      const options = { maxNewTokens, temperature, topP, seed, signal, onWaiting }
      for await (const { text, route, recoveries } of this.#answer(loaded, loaded.prompt(messages), options)) {
        const hops = route.map(({ peer, blocks, relayed, ms, sent, received }) => (
          { peer_id: peer, blocks, relayed, last_step_ms: ms, bytes_sent: sent, bytes_received: received }
        ))
        Object.assign(progress, { tokens: progress.tokens + 1, recoveries, hops, waiting: null })
        say(text)
      }
      say('', progress.tokens < maxNewTokens ? 'stop' : 'length')
    } catch (error) {
      if (!signal?.aborted) throw refusal(error)
    }
  }

  async * #answer (model, prompt, options) {
    const talk = this.#talk?.model === model ? this.#talk : { model, conversation: model.conversation() }
    if (talk === this.#talk) this.#talk = undefined // until it ends; another answer at the same time has one of its own
    try {
      yield * talk.conversation.generate(prompt, options)
    } finally {
      const other = this.#talk
      this.#talk = talk
      await other?.conversation.close()
    }
  }

  /** Those that the link means. */
  async #models () {
    const client = await this.#client()
    try {
      return await client.models(client.wanted)
    } catch (error) {
      throw refusal(error)
    }
  }

  #client () {
    const key = this.#key().trim()
    if (key === '') throw new Refused(this.keyed.missing, 401)
    this.#joined[key] ??= Client.join({ ...key.startsWith('/') ? { peers: [key] } : { link: key }, transports: [webRTC()] }).catch(error => {
      delete this.#joined[key]
      throw refusal(error, key.startsWith('/') || key.startsWith('petalnode:') ? 0 : 401)
    })
    return this.#joined[key]
  }

  #load (version) {
    this.#loading[version] ??= this.#fetch(version).catch(error => {
      delete this.#loading[version]
      throw refusal(error)
    }).finally(() => this.#tell(''))
    return this.#loading[version]
  }

  async #fetch (version) {
    const client = await this.#client()
    const onProgress = ({ bytes, of }) => this.#tell(`Fetching the model's outer layers from the swarm: ${Math.floor(100 * bytes / of)} %.`)
    return await client.load({ version, onProgress })
  }
}

const idOf = ({ name, version }, all) => all.filter(one => one.name === name).length === 1 ? name : `${name}@${version.slice(0, 12)}`

const refusal = (error, status) => error instanceof Refused ? error : new Refused(error.message, status)

function reported (server, client) {
  const path = client.pathTo(server.peer)
  return {
    peer_id: server.peer,
    name: server.publicName,
    blocks: [server.span.start, server.span.end],
    state: STATES[server.state],
    answers: null,
    next_blocks: null,
    throughput: server.stepUs > 0 ? 1e6 / server.stepUs : 0,
    cache_tokens_free: server.cacheTokensFree,
    cache_tokens: server.cacheTokens,
    path,
    round_trip_ms: null,
    reputation: 0,
    verdict: null,
    banned_until: null
  }
}
