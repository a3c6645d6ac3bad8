// The test vectors of docs/ come out of the JavaScript client's functions, and of docs/protocol.md where it has none.
// `node --test vectors.test.mjs`, beside the client's `src`; the environment's DOCS is the folder of the vectors.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { defaultLogger } from '@libp2p/logger'
import { AbstractStream } from '@libp2p/utils'
import { base58btc } from 'multiformats/bases/base58'
import { canonical, concat, digest, hex, isSigned, peerText, sha256 } from './src/canonical.js'
import { Conversation, Text, lookUp } from './src/conversation.js'
import { readAnnouncement } from './src/directory.js'
import { Ends } from './src/ends.js'
import { halfToFloat, toFloats } from './src/floats.js'
import { Lost, Messages } from './src/framing.js'
import { Products, Rows } from './src/rows.js'
import { numbers } from './src/sampling.js'
import { pledgeOf, receiptOf } from './src/session.js'
import { readStored, store } from './src/storage.js'
import { INFERENCE, MANIFEST, SIGNED_ANNOUNCEMENT, WEIGHTS, decode, encode, readVarint } from './src/wire.js'

const read = name => JSON.parse(readFileSync(`${process.env.DOCS}/${name}-vectors.json`, 'utf8'))
const old = read('receipt')
const said = read('message')
const bytes = text => Uint8Array.from(text.match(/../g) ?? [], pair => parseInt(pair, 16))
const peer = text => base58btc.baseDecode(text)
const [server, client, validator] = old.keys.map(key => key.peer_id)
const signed = (who, domain, message, signature) => assert.ok(isSigned(peer(who), domain, message, bytes(signature)))
const f32 = values => new Uint8Array(Float32Array.from(values).buffer)
const partOf = (schema, name) => schema.find(field => field[2] === name)[1]
const MANIFEST_FIELDS = partOf(MANIFEST, 'manifest')
const RECEIPT = partOf(partOf(INFERENCE, 'reply'), 'receipt')
// What servers say among each other, which a client does not read.
const PUSH = [
  [1, [[1, 'bytes', 'client'], [2, 'bytes', 'nonce'], [3, partOf(INFERENCE, 'step'), 'step'], [4, RECEIPT, 'receipt']], 'push'],
  INFERENCE.at(-1)
]
const TREE = partOf(WEIGHTS, 'tree')

/** Among servers, frames are of another schema. */
function frames (vector, schema, among) {
  return vector.map(({ from: one, to, message, bytes: text }) => {
    const data = bytes(text)
    const [size, from] = readVarint(data, 0, 4)
    const header = data.subarray(from, from + Number(size))
    const frame = decode(among === undefined || [one, to].includes('client') ? schema : among, header)
    const body = Object.keys(frame).find(name => name !== 'tensors')
    assert.equal(body.replace(/[A-Z]/, letter => `_${letter.toLowerCase()}`), message)
    const payload = data.subarray(from + Number(size))
    assert.equal(payload.length, frame.tensors.reduce((sum, tensor) => sum + tensor.nbytes, 0))
    return { body: frame[body], tensors: frame.tensors, payload, header, frame }
  })
}

test('canonical bytes', () => {
  const { domain, bytes: expected, sha256: hash } = old.canonical
  const fields = [-1, 'ä', Uint8Array.of(0), [2, []]]
  assert.equal(hex(canonical(domain, ...fields)), expected)
  assert.equal(hex(digest(domain, ...fields)), hash)
})

test('receipt and pledge', () => {
  const { receipt, pledge } = old
  const span = ([start, end]) => ({ start, end })
  const toReceipt = receiptOf({
    protocolVersion: receipt.protocol_version, modelVersion: bytes(receipt.model_version), span: span(receipt.span), dtype: receipt.dtype,
    quantisation: receipt.quantisation, client: peer(receipt.client), nonce: bytes(receipt.nonce), sessionEpoch: bytes(receipt.session_epoch),
    sequence: receipt.sequence, requestHash: bytes(receipt.request_hash), replyHash: bytes(receipt.reply_hash),
    previousReceipt: bytes(receipt.previous_receipt), upstreamReceipt: bytes(receipt.upstream_receipt), timeMs: receipt.time_ms,
    adapter: bytes(receipt.adapter), signature: bytes(receipt.signature)
  })
  const toPledge = pledgeOf({
    server: peer(pledge.server), modelVersion: bytes(pledge.model_version), span: span(pledge.span), dtype: pledge.dtype,
    quantisation: pledge.quantisation, deposit: pledge.deposit, fromMs: pledge.from_ms, untilMs: pledge.until_ms,
    holder: peer(pledge.holder), voucher: bytes(pledge.voucher), signature: bytes(pledge.signature)
  })
  for (const [domain, vector, made] of [['receipt', receipt, toReceipt], ['pledge', pledge, toPledge]]) {
    assert.equal(hex(made.bytes), vector.canonical)
    assert.equal(hex(made.hash()), vector.hash)
    signed(server, `petalnode/${domain}/1`, made.bytes, vector.signature)
  }
  signed(client, 'petalnode/countersignature/1', bytes(receipt.hash), receipt.countersignature)
  signed(validator, 'petalnode/deposit/1', canonical('petalnode/deposit/1', server, pledge.deposit, pledge.until_ms), pledge.voucher)
  assert.equal(hex(sha256(bytes(receipt.answer))), receipt.reply_hash)
})

test('session root, requests of a step and of a batch', () => {
  const { session: s, request: r, work: w } = old
  const root = digest(
    'petalnode/session/1', s.client, bytes(s.nonce), bytes(s.session_epoch), bytes(s.model_version), s.span, s.batch, s.left_padding, s.codec,
    s.dtype, bytes(s.adapter), bytes(s.pledge)
  )
  assert.equal(hex(root), s.root)
  assert.equal(hex(sha256(bytes(r.payload))), r.payload_hash)
  const targets = r.targets.map(([who, nonce, number]) => [bytes(who), bytes(nonce), number])
  const step = [r.sequence, r.position, r.reorder, r.route_epoch, r.shape, r.dtype, r.codec, bytes(r.payload_hash), bytes(r.upstream_receipt)]
  assert.equal(hex(digest('petalnode/request/1', ...step, targets)), r.hash)
  const tensor = [[2, 1, 8], 'float32', 'none']
  const all = payloads => sha256(concat(payloads.map(bytes)))
  const kept = digest('petalnode/keep/1', w.keep.names, [tensor], all(w.keep.payloads))
  assert.equal(hex(kept), w.keep.hash)
  const batch = [w.protocol, w.sequence, [tensor, tensor], bytes(w.mask), w.positions, all(w.payloads), kept]
  assert.equal(hex(digest('petalnode/work/1', ...batch)), w.hash)
})

test('announcement', () => {
  const record = decode(SIGNED_ANNOUNCEMENT, bytes(said.announcement.signed))
  assert.equal(hex(record.announcement), said.announcement.announcement)
  const read = readAnnouncement(record, 1_700_000_010_000)
  assert.deepEqual([read.peer, read.modelName, read.span, read.state], [server, 'smollm2', { start: 3, end: 9 }, 2])
  assert.equal(readAnnouncement(record, 1_700_000_060_000), undefined) // it has ended
  record.announcement[60] ^= 1
  assert.equal(readAnnouncement(record, 1_700_000_010_000), undefined)
})

test('manifest, parts and version', () => {
  const { model } = said
  const digests = model.parts.map(part => {
    const { form, tensors, pieces } = decode(TREE, bytes(part.tree))
    const found = digest('petalnode/model/part/2', form, tensors.map(one => [one.name, one.dtype, one.shape, one.nbytes]), pieces)
    assert.equal(hex(found), part.digest)
    return found
  })
  const manifest = decode(MANIFEST_FIELDS, bytes(model.manifest))
  assert.deepEqual([manifest.embeddings, ...manifest.blocks, manifest.head].map(hex), digests.map(hex))
  assert.equal(new TextDecoder().decode(manifest.config), model.config)
  assert.equal(hex(digest('petalnode/model/1', manifest.config, manifest.embeddings, manifest.blocks, manifest.head)), model.version)
})

test('weights are handed on', () => {
  const [asked, offer, , tree, question, piece] = frames(said.weights, WEIGHTS)
  assert.equal(hex(asked.body.modelVersion), said.model.version)
  assert.deepEqual([[...offer.body.parts], offer.body.blocks, offer.body.bare], [[7], 'model.layers.', ['lm_head.weight']])
  assert.equal(hex(encode(TREE, tree.body)), said.model.parts[0].tree)
  const at = 32 * question.body.piece
  assert.equal(hex(sha256(piece.payload)), hex(tree.body.pieces.subarray(at, at + 32)))
})

test('a part in the storage is used only if it is what it was', async () => {
  const kept = new Map()
  const cache = { match: async url => kept.get(url)?.clone(), put: async (url, response) => { kept.set(url, response) } }
  const version = bytes(said.model.version)
  const tree = decode(TREE, bytes(said.model.parts[0].tree))
  const expected = bytes(said.model.parts[0].digest)
  const data = Uint8Array.from({ length: said.model.embeddings.bytes }, (_, at) => at % 251)
  assert.equal(await readStored(version, 0, expected), undefined) // no storage
  globalThis.caches = { open: async () => cache }
  await store(version, 0, { tree, data })
  const { tensors: [tensor] } = await readStored(version, 0, expected)
  assert.equal(tensor.data.length, data.length)
  assert.equal(await readStored(version, 1, expected), undefined)
  assert.equal(await readStored(version, 0, bytes(said.model.parts[1].digest)), undefined)
  data[5] ^= 1
  await store(version, 0, { tree, data })
  assert.equal(await readStored(version, 0, expected), undefined)
  cache.put = () => { throw new Error('it is full') }
  await store(version, 0, { tree, data })
  delete globalThis.caches
})

/** Checks the receipt of a session's first step; its hash. */
function checked (who, open, granted, step, sent, reply) {
  const { nonce, modelVersion, span } = open
  const terms = [client, nonce, granted.sessionEpoch, modelVersion, [span.start, span.end], 1, [], open.codec, 'float32', bytes(''), bytes('')]
  const [tensor] = sent.tensors
  const targets = step.targets.map(({ peerId, nonce: there, sequence }) => [peerId, there, sequence])
  const request = digest(
    'petalnode/request/1', step.sequence, step.position, [], step.routeEpoch, tensor.shape, tensor.dtype, tensor.codec,
    sha256(sent.payload), step.previousReceipt, targets
  )
  const { receipt } = reply
  assert.deepEqual([receipt.requestHash, receipt.previousReceipt].map(hex), [request, digest('petalnode/session/1', ...terms)].map(hex))
  assert.equal(hex(receipt.upstreamReceipt), hex(step.previousReceipt))
  assert.equal(peerText(receipt.client), client)
  const said = receiptOf(receipt)
  signed(who, 'petalnode/receipt/1', said.bytes, hex(receipt.signature))
  return said.hash()
}

test('a session from Open to Close', () => {
  const all = frames(said.session, INFERENCE)
  const [open, granted, step, reply] = all
  // What the client sends is written as petalnode writes it.
  for (const { frame, header } of [open, step, all[4]]) assert.equal(hex(encode(INFERENCE, frame)), hex(header))
  checked(server, open.body, granted.body, step.body, step, reply.body)
  assert.equal(hex(reply.body.receipt.replyHash), hex(sha256(reply.payload)))
})

test('a step that one server pushes to the next one', () => {
  const [one, granted, other, alsoGranted, step, push, first, last] = frames(said['pushed step'], INFERENCE, PUSH)
  for (const { frame, header } of [one, other, step]) assert.equal(hex(encode(INFERENCE, frame)), hex(header))
  const hash = checked(server, one.body, granted.body, step.body, step, first.body)
  checked(validator, other.body, alsoGranted.body, push.body.step, push, last.body)
  const [target] = step.body.targets
  const same = [
    [push.body.step.previousReceipt, hash], [push.body.client, peer(client)], [push.body.nonce, other.body.nonce], [target.nonce, other.body.nonce],
    [one.body.downstream, peer(validator)], [target.peerId, peer(validator)], [other.body.upstream, peer(server)],
    [first.body.receipt.replyHash, sha256(push.payload)], [last.body.receipt.replyHash, sha256(last.payload)],
    [last.body.upstream.signature, first.body.receipt.signature], [push.body.receipt.signature, first.body.receipt.signature]
  ]
  for (const [found, expected] of same) assert.equal(hex(found), hex(expected))
  assert.deepEqual([push.body.step.sequence, first.body.handedOn], [target.sequence, 1])
})

test('a stream that is cut while bytes are sent is lost at once', async () => {
  class Cut extends AbstractStream {
    sendData () {
      this.abort(new Error('cut'))
      return { sentBytes: 0, canSendMore: false }
    }

    sendReset () {}
  }
  const stream = new Cut({ log: defaultLogger().forComponent('cut'), direction: 'outbound', id: '1', protocol: '/cut/1' })
  const messages = new Messages(stream, INFERENCE, 'somebody')
  await assert.rejects(messages.send({ close: {} }, [], AbortSignal.timeout(60_000)), Lost)
})

test('a look-up finds what followed the newest tokens, by the longest match and the last one', () => {
  assert.deepEqual(lookUp([1, 2, 3, 9, 8, 7, 5, 2, 3, 4, 1, 2, 3], 2), [9, 8])
  assert.deepEqual(lookUp([7, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], 8), [6, 1, 2, 3])
  assert.deepEqual(lookUp([1, 2, 3, 4], 8), [])
})

test('the text of tokens that come one at a time is that of all of them', () => {
  // A tokenizer of bytes, which as some do leaves out a space at the beginning.
  const decoded = ids => new TextDecoder().decode(Uint8Array.from(ids)).replace(/^ /, '')
  const tokenizer = { calls: 0, decode (ids) { this.calls += ids.length; return decoded(ids) } }
  for (const said of ['plain words, many of them '.repeat(20), 'grün € 🙂 '.repeat(30), '🙂'.repeat(40)]) {
    const ids = [...new TextEncoder().encode(said)]
    const text = new Text(tokenizer)
    assert.equal(ids.map(id => text.next(id)).join(''), decoded(ids))
  }
  assert.ok(tokenizer.calls < 100_000)
})

test('drafts and conversations give the tokens that single steps give, and servers hold what they are told of', async () => {
  // A model of eight tokens: each follows from all before it, and a session is the list of what it was given.
  const follows = ids => ids.length % 5 === 0 ? ids[0] : (ids.at(-1) + 1) % 4
  class Held {
    held = []
    steps = 0
    route = []
    recoveries = 0
    cheated = []
    async forward (hidden) {
      this.steps++
      return hidden.map(id => {
        this.held.push(id)
        return follows(this.held)
      })
    }

    goBack (tokens) {
      assert.ok(tokens < this.held.length)
      this.held.length = tokens
    }

    async close () {}
  }
  const ends = { hidden: 1, embed: ids => Int32Array.from(ids), logits: output => Array.from({ length: 8 }, (_, id) => Number(id === output.at(-1))) }
  const model = { ends, endIds: [], version: '' }
  const answer = async (conversation, prompt, options) => {
    const found = []
    for await (const { id } of conversation.generate(prompt, options)) found.push(id)
    return found
  }
  const expected = (prompt, count) => {
    const ids = [...prompt]
    while (ids.length < prompt.length + count) ids.push(follows(ids))
    return ids.slice(prompt.length)
  }
  const talk = drafts => {
    const conversation = new Conversation({ servers: async () => [] }, model)
    conversation._session = new Held()
    return [conversation, prompt => answer(conversation, prompt, { maxNewTokens: 30, drafts })]
  }
  for (const drafts of [true, false]) {
    const [conversation, ask] = talk(drafts)
    const session = conversation._session
    const first = await ask([1, 2, 3])
    assert.deepEqual(first, expected([1, 2, 3], 30))
    assert.ok(drafts ? session.steps < 25 : session.steps === 30)
    for (const prompt of [[1, 2, 3, ...first, 6, 1], [1, 2, 5], [1, 2, 5]]) assert.deepEqual(await ask(prompt), expected(prompt, 30))
    assert.deepEqual(await ask([7]), expected([7], 30)) // another text
    assert.equal(conversation._session, session)
  }
})

test('names of a prefix', () => {
  const { prefix: p } = said
  const domain = 'petalnode/prefix/1'
  let name = digest(domain, bytes(p.model_version), p.span, p.batch, [], p.codec, p.dtype, bytes(p.adapter), bytes(p.salt))
  assert.equal(hex(name), p.root)
  const payload = bytes(p.payload)
  const size = payload.length / 2 / p.tokens
  const token = at => sha256(concat([0, 1].map(row => payload.subarray((row * p.tokens + at) * size, (row * p.tokens + at + 1) * size))))
  const hashes = Array.from({ length: p.tokens }, (_, at) => token(at))
  p.names.forEach((expected, block) => {
    name = digest(domain, name, concat(hashes.slice(32 * block, 32 * block + 32)))
    assert.equal(hex(name), expected)
  })
  assert.equal(hex(digest(domain, 'long factors', hashes[0])), p['with long factors'])
  const places = at => Array.from({ length: 6 }, (_, axis) => at + p.tokens * axis)
  assert.equal(hex(digest(domain, 'positions', places(0), hashes[0])), p['with positions 0 to 389'])
  const groups = bytes(p.groups)
  const whole = digest(domain, 'tokens', ...hashes.slice(1, 4))
  for (let at = 0; at < 5; at++) {
    const numbers = [groups[at], groups[at + p.tokens]]
    const inGroup = positions => digest(domain, 'group', positions, numbers, whole, hashes[at])
    const isIn = at > 0 && at < 4
    assert.equal(hex(isIn ? inGroup([]) : hashes[at]), p['with groups'][at])
    assert.equal(hex(isIn ? inGroup(places(at)) : digest(domain, 'positions', places(at), hashes[at])), p['with groups and positions'][at])
  }
})

test('adapter', () => {
  const { adapter } = said
  const blocks = adapter.blocks.map(([number]) => {
    const of = adapter.tensors.filter(tensor => tensor.name.startsWith(`${number}.`)) // sorted by name as they stand
    return [number, digest('petalnode/adapter-block/1', of.map(one => [one.name, one.shape, one.dtype, bytes(one.sha256)]))]
  })
  assert.deepEqual(blocks.map(([number, hash]) => [number, hex(hash)]), adapter.blocks)
  assert.equal(hex(digest('petalnode/adapter/1', blocks)), adapter.hash)
})

const CREDITS = {
  credit: ['issuer', 'issuer, holder, points, deposit, deposit_until_ms, sequence, time_ms'],
  'credit-query': ['holder', 'issuer, holder, time_ms'],
  'credit-transfer': ['spender', 'issuer, spender, recipient, points, sequence, until_ms'],
  'credit-deposit': ['server', 'issuer, server, points, until_ms, sequence']
}

test('points', () => {
  for (const [name, [signer, names]] of Object.entries(CREDITS)) {
    const [vector, domain] = [said.credits[name], `petalnode/${name}/1`]
    const message = canonical(domain, ...names.split(', ').map(field => vector[field]))
    assert.equal(hex(message), vector.canonical)
    signed(vector[signer], domain, message, vector.signature)
    assert.equal(hex(digest(domain, message, bytes(vector.signature))), vector.hash)
  }
  const clearing = said.credits['credit-clearing']
  const domain = 'petalnode/credit-clearing/1'
  signed(validator, domain, canonical(domain, bytes(said.credits['credit-transfer'].hash), clearing.time_ms), clearing.signature)
})

test('evidence', () => {
  const { evidence } = said
  const statement = bytes(evidence.statement)
  assert.equal(hex(digest('petalnode/evidence/1', statement)), evidence.id)
  signed(evidence.accuser, 'petalnode/evidence/1', statement, evidence.signature)
})

test('codecs', () => {
  for (const { codec, shape: [count], payload: text, means } of said.codecs) {
    const payload = bytes(text)
    const view = new DataView(payload.buffer)
    const blocks = Math.ceil(count / 64)
    const value = {
      none: at => view.getFloat32(4 * at, true),
      float16: at => halfToFloat(view.getUint16(2 * at, true)),
      bfloat16: at => new DataView(Uint32Array.of(view.getUint16(2 * at, true) << 16).buffer).getFloat32(0, true),
      'int8-block64': at => view.getInt8(2 * blocks + at) * halfToFloat(view.getUint16(2 * Math.floor(at / 64), true))
    }[codec]
    assert.equal(hex(f32(Array.from({ length: count }, (_, at) => value(at)))), means, codec)
  }
})

test('the largest product with a vector is exact, by SIMD and without, however near the others are', () => {
  const random = numbers(7)
  for (const [count, width] of [[300, 96], [64, 33], [40, 2080]]) {
    const normal = () => random() + random() + random() - 1.5
    const values = Float32Array.from({ length: count * width }, () => normal() * (random() < 0.01 ? 40 : 1))
    const x = Float32Array.from({ length: width }, () => normal() * (random() < 0.02 ? 30 : 1))
    const row = number => values.subarray(number * width, (number + 1) * width)
    const exact = number => row(number).reduce((sum, value, at) => sum + value * x[at], 0)
    // Rows that differ from the best one in a last bit of one value, where 8 bits see nothing.
    const best = Array.from({ length: count }, (_, number) => number).sort((one, other) => exact(other) - exact(one))[0]
    for (const [number, at] of [[3, 5], [count - 1, 7], [11, 2]]) {
      row(number).set(row(best))
      row(number)[at] *= 1 + 2 ** -22
    }
    row(20).fill(0)
    const products = new Products(new Rows({ dtype: 'F32', data: new Uint8Array(values.buffer) }, width))
    assert.equal(products._run === undefined, width % 32 !== 0)
    for (const way of ['as it is', 'plain']) {
      const found = products.with(x)
      const all = Array.from({ length: count }, (_, number) => exact(number))
      const likeliest = all.indexOf(Math.max(...all))
      assert.equal(found.indexOf(Math.max(...found)), likeliest, way)
      assert.equal(found[likeliest], all[likeliest])
      const scale = Math.hypot(...x) * Math.max(...all.map((_, number) => Math.hypot(...row(number))))
      all.forEach((product, number) => assert.ok(Math.abs(product - found[number]) < 0.05 * scale))
      products._run = undefined
    }
  }
})

test('what a configuration leaves out is as in transformers', () => {
  const tensor = (name, values) => ({ name, dtype: 'F32', data: new Uint8Array(Float32Array.from(values).buffer) })
  const part = (...tensors) => ({ form: 'safetensors', tensors })
  const embeddings = part(tensor('embed_tokens.weight', [1, 2, 3, 4]))
  const head = part(tensor('norm.weight', [1, 1]), tensor('lm_head.weight', [50, 0, 0, 50]))
  const logits = (type, x, config = {}) => Array.from(new Ends({ model_type: type, hidden_size: 2, ...config }, embeddings, head).logits(Float32Array.from(x)))
  // The largest one is exact, the others are of 8 bits.
  const near = (found, values) => {
    const most = Math.max(...values)
    found.forEach((value, at) => assert.ok(Math.abs(value - values[at]) < (values[at] === most ? 1e-5 : 0.05) * most, `${found} ${values}`))
  }
  const norm = (x, epsilon) => x.map(value => value / Math.sqrt((x[0] ** 2 + x[1] ** 2) / 2 + epsilon))
  const small = [0.002, 0.001]
  near(logits('llama', small), norm(small, 1e-6).map(value => 50 * value))
  near(logits('mixtral', small), norm(small, 1e-5).map(value => 50 * value))
  const [a, b] = norm(small, 1e-6)
  near(logits('smollm3', small), [a + 2 * b, 3 * a + 4 * b]) // tied
  near(logits('gemma', small), [2 * a + 4 * b, 6 * a + 8 * b]) // tied, and 1 + w
  near(logits('gemma2', small), [2 * a + 4 * b, 6 * a + 8 * b].map(value => 30 * Math.tanh(value / 30)))
  near(logits('gemma2', small, { final_logit_softcapping: null, tie_word_embeddings: false }), norm(small, 1e-6).map(value => 100 * value))
})

test('weights as GGUF and safetensors have them', () => {
  const scale = [0x00, 0x38] // 0.5
  const nibbles = Array.from({ length: 16 }, (_, at) => at << 4 | 15 - at)
  const whole = Array.from({ length: 32 }, (_, at) => at - 16)
  const cases = {
    F32: [[0, 0, 0xa0, 0xc0], [-5]],
    F16: [[0x00, 0x38, 0x01, 0x80], [0.5, -(2 ** -24)]],
    BF16: [[0xa0, 0xc0], [-5]],
    Q8_0: [[...scale, ...whole.map(value => value & 255)], whole.map(value => value / 2)],
    Q4_0: [[...scale, ...nibbles], [...nibbles.map(byte => ((byte & 15) - 8) / 2), ...nibbles.map(byte => ((byte >> 4) - 8) / 2)]],
    Q4_1: [[...scale, 0x00, 0xbc, ...nibbles], [...nibbles.map(byte => (byte & 15) / 2 - 1), ...nibbles.map(byte => (byte >> 4) / 2 - 1)]]
  }
  for (const [dtype, [said, values]] of Object.entries(cases)) assert.deepEqual(Array.from(toFloats(dtype, Uint8Array.from(said))), values, dtype)
  assert.throws(() => toFloats('Q4_K', new Uint8Array(144)), /Q4_K are not read/)
})
