// One session over a chain of servers: steps, receipts, and another server in the place of one that fails (docs/protocol.md#sessions).
import { canonical, digest, isEqual, isSigned, peerText, sha256 } from './canonical.js'
import { chooseChain } from './directory.js'
import { Messages, Refused, deadline } from './framing.js'
import { INFERENCE } from './wire.js'

const STEP_TOKENS = 256
const OPENING = 30 // seconds
const AGAIN = 20 // seconds after which a server that failed is asked again
const STEP = 60 // seconds
const SEARCH = 180 // seconds until nobody was found for some blocks
const CLOCKS = 10_000 // milliseconds
const NOTHING = new Uint8Array(0)
/** Refusals that another server may not repeat; after the others the request itself is wrong. */
const FINAL = new Set([1, 5])

/** A server signed something else than what it was asked and answered: it is not used again. */
export class Cheated extends Error {}

function statement (domain, message, fields) {
  const bytes = canonical(domain, ...fields)
  return { bytes, hash: () => digest(domain, bytes, message.signature) }
}

export function receiptOf (receipt) {
  const { span } = receipt
  return statement('petalnode/receipt/1', receipt, [
    receipt.protocolVersion, receipt.modelVersion, [span?.start ?? 0, span?.end ?? 0], receipt.dtype, receipt.quantisation,
    peerText(receipt.client), receipt.nonce, receipt.sessionEpoch, receipt.sequence, receipt.requestHash, receipt.replyHash,
    receipt.previousReceipt, receipt.upstreamReceipt, receipt.timeMs, receipt.adapter
  ])
}

export function pledgeOf (pledge) {
  return statement('petalnode/pledge/1', pledge, [
    peerText(pledge.server), pledge.modelVersion, [pledge.span.start, pledge.span.end], pledge.dtype, pledge.quantisation, pledge.deposit,
    pledge.fromMs, pledge.untilMs, pledge.holder.length > 0 ? peerText(pledge.holder) : '', pledge.voucher
  ])
}

/** The session's part at one server, for blocks start .. end. */
class Hop {
  constructor (server, start, end) {
    this.server = server
    this.start = start
    this.end = end
    this.inputs = [] // hidden states that it was given, step by step, to fill the cache of another one
    this.position = 0
    this._sequence = 0
  }

  async open (client, terms, signal) {
    const stream = await client.open(this.server, '/petalnode/inference/1', signal)
    this._messages = new Messages(stream, INFERENCE, this.server.peer)
    this._client = client
    this.relayed = client.isRelayed(this.server.peer)
    this._terms = terms
    this._nonce = crypto.getRandomValues(new Uint8Array(16))
    const open = {
      protocolVersion: 1, modelVersion: terms.modelVersion, span: { start: this.start, end: this.end }, maxLength: terms.maxLength, batch: 1,
      codec: 'none', nonce: this._nonce, routeEpoch: terms.routeEpoch, waitMs: 5000, activationDtype: 'float32'
    }
    await this._messages.send({ open }, [], deadline(OPENING, signal))
    const { granted } = await this._messages.receive(deadline(OPENING, signal))
    if (granted === undefined) throw new Error(`${this.server.peer} answered something else`)
    this._granted = granted
    for (const name of ['dtype', 'quantisation']) {
      if (this.server[name] && granted[name] !== this.server[name]) throw new Cheated(`${this.server.peer} announced another ${name}`)
    }
    this._previous = digest(
      'petalnode/session/1', client.peerId, this._nonce, granted.sessionEpoch, terms.modelVersion, [this.start, this.end], 1, [], 'none',
      'float32', NOTHING, this._checkPledge(granted.pledge)
    )
  }

  _checkPledge (pledge) {
    if (pledge === undefined) return NOTHING
    const said = pledgeOf(pledge)
    const isOwn = isEqual(pledge.server, this.server.peerId) && isSigned(pledge.server, 'petalnode/pledge/1', said.bytes, pledge.signature)
    if (!isOwn) throw new Cheated(`the pledge of ${this.server.peer} is not signed by its key`)
    return said.hash()
  }

  /** Runs hidden states, [tokens, hidden], through its blocks, in steps of a size that it takes. */
  async run (input, hidden, signal) {
    const most = Math.min(STEP_TOKENS, this._granted.maxStepTokens || STEP_TOKENS) * hidden
    const output = new Float32Array(input.length)
    for (let at = 0; at < input.length; at += most) {
      output.set(await this._step(input.subarray(at, at + most), hidden, signal), at)
    }
    this.inputs.push(input)
    return output
  }

  async _step (input, hidden, signal) {
    const tokens = input.length / hidden
    const payload = new Uint8Array(input.buffer, input.byteOffset, input.byteLength)
    const shape = [1, tokens, hidden]
    const sequence = ++this._sequence
    const asked = digest(
      'petalnode/request/1', sequence, this.position, [], this._terms.routeEpoch, shape, 'float32', 'none', sha256(payload), NOTHING, []
    )
    const since = Date.now()
    const step = { sequence, position: this.position, routeEpoch: this._terms.routeEpoch }
    const tensors = [{ shape, dtype: 'float32', codec: 'none', nbytes: payload.length }]
    await this._messages.send({ step, tensors }, [payload], deadline(STEP, signal))
    const frame = await this._messages.receive(deadline(STEP, signal), payload.length)
    const [data] = frame.payloads
    const [said] = frame.tensors
    const fits = frame.reply !== undefined && frame.tensors.length === 1 && data.length === payload.length && said.dtype === 'float32' &&
      said.codec === 'none' && String(said.shape) === String(shape) && frame.reply.position === this.position + tokens
    if (!fits) throw new Error(`${this.server.peer} answered something else`)
    this._check(frame.reply, sequence, asked, data, since)
    const output = new Float32Array(data.slice().buffer)
    if (!output.every(Number.isFinite)) throw new Error(`${this.server.peer} answered values that are no numbers`)
    this.position += tokens
    return output
  }

  _check (reply, sequence, asked, data, since) {
    const { receipt } = reply
    const cheats = what => { throw new Cheated(`the receipt of ${this.server.peer} ${what}`) }
    if (receipt?.span === undefined) cheats('is missing')
    const said = receiptOf(receipt)
    if (!isSigned(this.server.peerId, 'petalnode/receipt/1', said.bytes, receipt.signature)) cheats('is not signed by its key')
    if (!isEqual(receipt.replyHash, sha256(data))) cheats('is for another answer than it sent')
    if (!isEqual(receipt.requestHash, asked) || reply.sequence !== sequence || receipt.sequence !== sequence) cheats('is for another request')
    if (!isEqual(receipt.previousReceipt, this._previous)) cheats('does not follow from the one before')
    const isOurs = peerText(receipt.client) === this._client.peerId && isEqual(receipt.nonce, this._nonce) &&
      isEqual(receipt.sessionEpoch, this._granted.sessionEpoch) && isEqual(receipt.modelVersion, this._terms.modelVersion) &&
      receipt.span.start === this.start && receipt.span.end === this.end && receipt.protocolVersion === 1
    if (!isOurs) cheats('is of another session')
    if (receipt.dtype !== this._granted.dtype || receipt.quantisation !== this._granted.quantisation) cheats('says other numerics than it granted')
    if (receipt.upstreamReceipt.length > 0 || receipt.adapter.length > 0) cheats('says what was not asked')
    if (receipt.timeMs < since - CLOCKS || receipt.timeMs > Date.now() + CLOCKS) cheats('is of another time')
    this._previous = said.hash()
  }

  async close () {
    try {
      await this._messages?.send({ close: {} }, [], deadline(2))
    } catch {}
    await this._messages?.close()
  }

  abandon (error) {
    this._messages?.abort(error)
  }
}

export class Session {
  /** `client` opens streams and knows the servers; `maxLength` is in tokens. */
  constructor (client, model, maxLength) {
    this._client = client
    this._model = model
    this._terms = { modelVersion: model.versionBytes, maxLength, routeEpoch: 1 }
    this._hops = []
    this._failed = new Map() // peer -> { why, until: when it may be asked again }
    this.recoveries = 0
    /** Servers that signed what is not so. */
    this.cheated = []
  }

  get route () {
    return this._hops.map(({ server, start, end, relayed }) => ({ peer: server.peer, blocks: [start, end], relayed }))
  }

  /** Hidden states of new tokens through all blocks. */
  async forward (hidden, signal) {
    const size = this._model.ends.hidden
    if (this._hops.length === 0) this._hops = await this._bring(0, this._model.numBlocks, [], signal)
    let input = hidden
    for (let at = 0; at < this._hops.length;) {
      const hop = this._hops[at]
      try {
        input = await hop.run(input, size, signal)
        at++
      } catch (error) {
        this._fail(hop, error, signal)
        const replaced = await this._bring(hop.start, hop.end, hop.inputs, signal)
        this._hops.splice(at, 1, ...replaced)
        this.recoveries++
      }
    }
    return input
  }

  _fail (hop, error, signal) {
    signal?.throwIfAborted()
    hop.abandon(error)
    const until = error instanceof Cheated ? Infinity : Date.now() + AGAIN * 1000
    const why = error.message.includes(hop.server.peer) ? error.message : `${hop.server.peer}: ${error.message}`
    this._failed.set(hop.server.peer, { why, until })
    if (error instanceof Cheated) this.cheated.push(hop.server.peer)
    if (error instanceof Refused && FINAL.has(error.code)) throw error
  }

  /** Servers for these blocks, with caches that hold `inputs`. */
  async _bring (start, end, inputs, signal) {
    const until = Date.now() + SEARCH * 1000
    for (let turn = 0; ; turn++) {
      const servers = await this._client.servers(this._model.version, turn > 0, signal)
      const excluded = new Set([...this._failed].filter(([, { until }]) => until > Date.now()).map(([peer]) => peer))
      const chain = chooseChain(servers, start, end, excluded)
      if (chain === undefined) {
        if (Date.now() > until) throw this._nobody(start, end)
        await new Promise(resolve => setTimeout(resolve, 1000))
        signal?.throwIfAborted()
        continue
      }
      this._terms.routeEpoch++
      const hops = chain.map(found => new Hop(found.server, found.start, found.end))
      let failing
      try {
        let past = inputs
        for (const hop of hops) {
          failing = hop
          await hop.open(this._client, { ...this._terms }, signal)
          const outputs = []
          for (const input of past) outputs.push(await hop.run(input, this._model.ends.hidden, signal))
          past = outputs
        }
        return hops
      } catch (error) {
        for (const hop of hops) if (hop !== failing) hop.abandon(error)
        this._fail(failing, error, signal)
        if (Date.now() > until) throw this._nobody(start, end)
      }
    }
  }

  _nobody (start, end) {
    const tried = [...this._failed.values()].map(({ why }) => why).join('; ')
    return new Error(`no server is to be had for blocks ${start} .. ${end}. Tried: ${tried || 'nobody'}`)
  }

  async close () {
    await Promise.all(this._hops.map(hop => hop.close()))
  }
}
