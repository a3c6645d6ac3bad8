// One session over a chain of servers: steps, receipts, and another server in the place of one that fails (docs/protocol.md#sessions).
import { canonical, digest, isEqual, isSigned, peerText, sha256, verifierOf } from './canonical.js'
import { chooseChain } from './directory.js'
import { Lost, Messages, Refused, deadline } from './framing.js'
import { INFERENCE } from './wire.js'

const STEP_TOKENS = 256
const OPENING = 30 // seconds
const AGAIN = 20 // seconds after which a server that failed is asked again; one whose stream was lost at once, if no other has its blocks
const STEP = 60 // seconds
const SEARCH = 180 // seconds until nobody was found for some blocks
const PUSH = 5 // seconds for which a server is waited for that was pushed a step, before it is sent the step as well
const CLOCKS = 10_000 // milliseconds
const NOTHING = new Uint8Array(0)
/** Refusals that another server may not repeat; after the others the request itself is wrong. */
const FINAL = new Set([1, 5])

/** A server signed something else than what it was asked and answered: it is not used again. */
export class Cheated extends Error {}

/** A server was pushed something else than the one before it answered here; `shown` is the receipt that came with that. */
class PushedOther extends Error {
  constructor (message, shown) {
    super(message)
    this.shown = shown
  }
}

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
    /** Milliseconds of the last step, and bytes of tensors each way. */
    this.ms = this.sent = this.received = 0
    this._sequence = 0
    this._answered = 0 // the last sequence number whose receipt was checked
  }

  /** `before` and `after`: the servers beside it in the chain, which pushes come from and go to; undefined without. */
  async open (client, terms, before, after, signal) {
    this._opened = Date.now()
    const stream = await client.open(this.server, '/petalnode/inference/1', signal)
    this._messages = new Messages(stream, INFERENCE, this.server.peer)
    this._client = client
    this.relayed = client.pathTo(this.server.peer) === 'relay'
    this._terms = terms
    this._nonce = crypto.getRandomValues(new Uint8Array(16))
    const open = {
      protocolVersion: 1, modelVersion: terms.modelVersion, span: { start: this.start, end: this.end }, maxLength: terms.maxLength, batch: 1,
      codec: 'none', nonce: this._nonce, routeEpoch: terms.routeEpoch, upstream: before?.peerId, downstream: after?.peerId, waitMs: 5000,
      activationDtype: 'float32'
    }
    await this._messages.send({ open }, [], deadline(OPENING, signal))
    const { granted } = await this._messages.receive(deadline(OPENING, signal))
    if (granted === undefined) throw new Error(`${this.server.peer} answered something else`)
    this._granted = granted
    this._isSigned = await verifierOf(this.server.peerId, 'petalnode/receipt/1')
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

  /** The hash of its newest receipt. */
  get receipt () {
    return this._previous
  }

  /** As a target of pushes, with the number that the next step has here. */
  expect () {
    return { peerId: this.server.peerId, nonce: this._nonce, sequence: ++this._sequence }
  }

  /** Values of a step at most. */
  most (hidden) {
    return Math.min(STEP_TOKENS, this._granted.maxStepTokens || STEP_TOKENS) * hidden
  }

  /** Runs hidden states, [tokens, hidden], through its blocks, in steps of a size that it takes. `told` is of a single step, see `_step`. */
  async run (input, hidden, signal, told) {
    const most = this.most(hidden)
    const output = new Float32Array(input.length)
    for (let at = 0; at < input.length; at += most) {
      output.set(await this._step(input.subarray(at, at + most), hidden, signal, told), at)
    }
    this.inputs.push(input)
    return output
  }

  goBack (tokens, hidden) {
    this.position = tokens
    let left = tokens * hidden
    this.inputs = this.inputs.map(input => {
      const kept = input.subarray(0, Math.max(left, 0))
      left -= input.length
      return kept
    }).filter(({ length }) => length > 0)
  }

  /**
   * `upstream`: the hash of the receipt for these bytes of the server before; `targets`: servers to push the output to, one after the other;
   * `sequence` as it was promised by `expect`; `isPushed`: the server before has pushed it.
   */
  async _step (input, hidden, signal, { sequence = ++this._sequence, upstream = NOTHING, targets = [], isPushed = false } = {}) {
    const tokens = input.length / hidden
    const payload = new Uint8Array(input.buffer, input.byteOffset, input.byteLength)
    const shape = [1, tokens, hidden]
    const asked = digest(
      'petalnode/request/1', sequence, this.position, [], this._terms.routeEpoch, shape, 'float32', 'none', sha256(payload), upstream,
      targets.map(({ peerId, nonce, sequence }) => [peerId, nonce, sequence])
    )
    const begun = performance.now()
    if (!isPushed || !await this._messages.arrives(deadline(PUSH, signal))) {
      const step = { sequence, position: this.position, routeEpoch: this._terms.routeEpoch, previousReceipt: upstream, targets }
      const tensors = [{ shape, dtype: 'float32', codec: 'none', nbytes: payload.length }]
      await this._messages.send({ step, tensors }, [payload], deadline(STEP, signal))
      this.sent += payload.length
    }
    const { reply, data, said } = await this._reply(sequence, payload.length, signal)
    const fits = data !== undefined && data.length === payload.length && said.dtype === 'float32' && said.codec === 'none' &&
      String(said.shape) === String(shape) && reply.position === this.position + tokens
    if (!fits) throw new Error(`${this.server.peer} answered something else`)
    this.ms = performance.now() - begun
    this.received += data.length
    await this._check(reply, sequence, asked, upstream, data)
    const output = new Float32Array(data.slice().buffer)
    if (!output.every(Number.isFinite)) throw new Error(`${this.server.peer} answered values that are no numbers`)
    this.position += tokens
    this.handedOn = reply.handedOn === 1
    return output
  }

  /** The reply to a step; those to earlier ones, which are not wanted any more, stay a part of the chain of receipts. */
  async _reply (sequence, nbytes, signal) {
    const most = this._largest = Math.max(this._largest ?? 0, nbytes)
    for (const until = deadline(STEP, signal); ;) {
      const { reply, payloads: [data], tensors: [said] } = await this._messages.receive(until, most)
      if (reply?.receipt === undefined || reply.sequence >= sequence) return { reply: reply ?? {}, data, said }
      if (reply.sequence <= this._answered) continue // sent once more
      await this._follow(reply.receipt)
      this._answered = reply.sequence
    }
  }

  /** Checks that a receipt is signed, and follows from the one before. */
  async _follow (receipt) {
    const said = receiptOf(receipt)
    const cheats = what => { throw new Cheated(`the receipt of ${this.server.peer} ${what}`) }
    if (!await this._isSigned(said.bytes, receipt.signature)) cheats('is not signed by its key')
    if (!isEqual(receipt.previousReceipt, this._previous)) cheats('does not follow from the one before')
    this._previous = said.hash()
  }

  async _check (reply, sequence, asked, upstream, data) {
    const { receipt } = reply
    const cheats = what => { throw new Cheated(`the receipt of ${this.server.peer} ${what}`) }
    if (receipt?.span === undefined) cheats('is missing')
    await this._follow(receipt)
    this._answered = sequence
    if (!isEqual(receipt.replyHash, sha256(data))) cheats('is for another answer than it sent')
    if (reply.sequence !== sequence || receipt.sequence !== sequence) cheats('is for another request')
    const isOurs = peerText(receipt.client) === this._client.peerId && isEqual(receipt.nonce, this._nonce) &&
      isEqual(receipt.sessionEpoch, this._granted.sessionEpoch) && isEqual(receipt.modelVersion, this._terms.modelVersion) &&
      receipt.span.start === this.start && receipt.span.end === this.end && receipt.protocolVersion === 1
    if (!isOurs) cheats('is of another session')
    if (receipt.dtype !== this._granted.dtype || receipt.quantisation !== this._granted.quantisation) cheats('says other numerics than it granted')
    if (receipt.adapter.length > 0) cheats('says what was not asked')
    if (!isEqual(receipt.upstreamReceipt, upstream)) {
      if (upstream.length === 0 || receipt.upstreamReceipt.length === 0) cheats('says what was not asked')
      throw new PushedOther(`${this.server.peer} was pushed another step`, reply.upstream)
    }
    if (!isEqual(receipt.requestHash, asked)) cheats('is for another request')
    if (receipt.timeMs < this._opened - CLOCKS || receipt.timeMs > Date.now() + CLOCKS) { // no lie: one of the two clocks is wrong
      throw new Error(`the receipt of ${this.server.peer} is of another time by this machine's clock`)
    }
  }

  /** Whether it has signed this receipt, too, in the place of the one that came here. */
  async contradicts (shown) {
    return shown?.span !== undefined && shown.sequence === this._answered && isEqual(shown.sessionEpoch, this._granted.sessionEpoch) &&
      isEqual(shown.nonce, this._nonce) && !isEqual(receiptOf(shown).hash(), this._previous) &&
      await this._isSigned(receiptOf(shown).bytes, shown.signature)
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
    /** Hears which server is missed, and why: { peer, blocks, reason }. */
    this.onWaiting = undefined
    this._terms = { modelVersion: model.versionBytes, maxLength, routeEpoch: 1 }
    this._hops = []
    this._failed = new Map() // peer -> { why, until: when it may be asked again, soon: when, if no other has its blocks }
    this.recoveries = 0
    /** Servers that signed what is not so. */
    this.cheated = []
  }

  get route () {
    return this._hops.map(({ server, start, end, relayed, ms, sent, received }) => (
      { peer: server.peer, blocks: [start, end], relayed, ms, sent, received }
    ))
  }

  /** Hidden states of new tokens through all blocks. */
  async forward (hidden, signal) {
    const size = this._model.ends.hidden
    if (this._hops.length === 0) this._hops = await this._bring(0, this._model.numBlocks, [], signal)
    const inputs = [hidden] // of each server of the chain
    let expected = this._expected(hidden.length)
    for (let at = 0; at < this._hops.length;) {
      let hop = this._hops[at]
      const before = this._hops[at - 1]
      try {
        const isSingle = inputs[at].length <= Math.min(hop.most(size), before?.most(size) ?? Infinity)
        inputs[at + 1] = await hop.run(inputs[at], size, signal, {
          sequence: expected[at]?.sequence,
          upstream: isSingle ? before?.receipt : undefined,
          targets: expected.slice(at + 1),
          isPushed: expected.length > 0 && before?.handedOn
        })
        at++
      } catch (caught) {
        let error = caught
        expected = [] // from here on, each is sent its step
        if (error instanceof PushedOther && await before.contradicts(error.shown)) {
          error = new Cheated(`${before.server.peer} signed two answers`)
          hop = before
          at--
          hop.goBack(hop.position - hidden.length / size, size)
        }
        this._fail(hop, error, signal)
        this.onWaiting?.({ peer: hop.server.peer, blocks: [hop.start, hop.end], reason: error.message })
        const replaced = await this._bring(hop.start, hop.end, hop.inputs, signal)
        this._hops.splice(at, 1, ...replaced)
        this.recoveries++
      }
    }
    return inputs.at(-1)
  }

  /** What each server of the chain is told to expect, if each hands its output on to the next one; else nothing. */
  _expected (length) {
    const isSingle = this._hops.every(hop => length <= hop.most(this._model.ends.hidden))
    return this._hops.length > 1 && isSingle ? this._hops.map(hop => hop.expect()) : []
  }

  /** Forgets all behind the first `tokens`. Servers do with the next step, which names its position. */
  goBack (tokens) {
    for (const hop of this._hops) hop.goBack(tokens, this._model.ends.hidden)
  }

  _fail (hop, error, signal) {
    signal?.throwIfAborted()
    hop.abandon(error)
    const until = error instanceof Cheated ? Infinity : Date.now() + AGAIN * 1000
    const why = error.message.includes(hop.server.peer) ? error.message : `${hop.server.peer}: ${error.message}`
    // Lines are cut, by proxies and by tabs that sleep, and the server is well.
    const isFirst = !(this._failed.get(hop.server.peer)?.until > Date.now())
    this._failed.set(hop.server.peer, { why, until, soon: error instanceof Lost && isFirst ? 0 : until })
    if (error instanceof Cheated) {
      this.cheated.push(hop.server.peer)
      this._client.distrusted.add(hop.server.peer)
    }
    if (error instanceof Refused && FINAL.has(error.code)) throw error
  }

  /** Servers for these blocks, with caches that hold `inputs`. */
  async _bring (start, end, inputs, signal) {
    const until = Date.now() + SEARCH * 1000
    for (let turn = 0; ; turn++) {
      const servers = await this._client.servers(this._model.version, turn > 0, signal, this._excluded('soon')).catch(error => {
        if (signal?.aborted || this._hops.length === 0) throw error
        return [] // in the middle of an answer: the network may come back, as behind a laptop's lid
      })
      const chain = chooseChain(servers, start, end, this._excluded('until')) ?? chooseChain(servers, start, end, this._excluded('soon'))
      if (chain === undefined) {
        if (Date.now() > until) throw this._nobody(start, end)
        await new Promise(resolve => setTimeout(resolve, 1000))
        signal?.throwIfAborted()
        continue
      }
      this._terms.routeEpoch++
      const hops = chain.map(found => new Hop(found.server, found.start, found.end))
      const [before, after] = [this._hops.find(hop => hop.end === start), this._hops.find(hop => hop.start === end)]
      let failing
      try {
        const opened = await Promise.allSettled(hops.map((hop, at) => (
          hop.open(this._client, this._terms, (hops[at - 1] ?? before)?.server, (hops[at + 1] ?? after)?.server, signal)
        )))
        for (const [at, { status, reason }] of opened.entries()) {
          failing = hops[at]
          if (status === 'rejected') throw reason
        }
        let past = inputs
        for (const hop of hops) {
          failing = hop
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

  _excluded (when) {
    const failed = [...this._failed].filter(([, each]) => each[when] > Date.now()).map(([peer]) => peer)
    return new Set([...failed, ...this._client.distrusted])
  }

  _nobody (start, end) {
    const tried = [...this._failed.values()].map(({ why }) => why).join('; ')
    return new Error(`no server is to be had for blocks ${start} .. ${end}. Tried: ${tried || 'nobody'}`)
  }

  async close () {
    await Promise.all(this._hops.map(hop => hop.close()))
  }
}
