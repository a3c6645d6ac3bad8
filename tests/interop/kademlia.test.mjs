// What strangers can do to a look-up of the JavaScript client: check_client.py runs it beside a copy of clients/js.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { ed25519 } from '@noble/curves/ed25519.js'
import { canonical, concat, peerText, sha256 } from './src/canonical.js'
import { Lookup, keysOf, originOf, searchRecords } from './src/kademlia.js'
import { ANNOUNCEMENT, DIRECTORY, KADEMLIA, encode } from './src/wire.js'

const VERSION = '5f4e7440d715' + '00'.repeat(26)
const [{ key, fits }] = keysOf(VERSION)
const idOf = number => Uint8Array.from([0, 36, 8, 1, 18, 32, ...sha256(Uint8Array.of(number >> 8, number))])
const contact = (number, ...addrs) => ({ peer: peerText(idOf(number)), id: idOf(number), addrs })
const at = number => `/ip4/198.51.${number >> 8}.${number & 255}/tcp/4001`
const place = ({ id }) => BigInt(`0x${Buffer.from(sha256(id)).toString('hex')}`) ^ BigInt(`0x${Buffer.from(sha256(key)).toString('hex')}`)
const near = [...Array(600).keys()].map(number => contact(number + 100)).sort((one, other) => place(one) < place(other) ? -1 : 1)

/** Runs a look-up; `answers` are those of the peers that are there. The peers that were asked, in order. */
function run (lookup, answers) {
  const asked = []
  for (let next; (next = lookup.next()) !== undefined;) {
    asked.push(next.peer)
    const answer = answers.get(next.peer)
    if (answer === undefined) lookup.failed(next.peer)
    else lookup.answered(next.peer, { closer: [], providers: [], ...answer }, originOf(next.addrs[0]))
  }
  return asked
}

test('a peer that names peers which are not there keeps nobody from those that are', () => {
  const [liar, honest] = [contact(1, at(1)), contact(2, at(2))]
  const made = near.slice(0, 200).map((one, number) => ({ ...one, addrs: [at(1000 + number)] }))
  const there = near.slice(300, 305).map((one, number) => ({ ...one, addrs: [at(500 + number)] }))
  const answers = new Map([[liar.peer, { closer: made }], [honest.peer, { closer: there }], ...there.map(({ peer }) => [peer, {}])])
  const asked = run(new Lookup(key, [liar, honest]), answers)
  assert.ok(there.every(({ peer }) => asked.includes(peer)))
  assert.ok(asked.length <= 24)
})

test('many ids at one address are asked after the peers of others', () => {
  const many = near.slice(0, 30).map(one => ({ ...one, addrs: [at(1)] }))
  const others = near.slice(300, 309).map((one, number) => ({ ...one, addrs: [at(500 + number)] }))
  const start = [...many, ...others]
  const asked = run(new Lookup(key, start), new Map(start.map(({ peer }) => [peer, {}])))
  assert.deepEqual(new Set(asked), new Set([many[0], ...others].map(({ peer }) => peer)))
})

test('who names hundreds of providers is heard as often as who names one', () => {
  const [liar, honest] = [contact(1, at(1)), contact(2, at(2))]
  const lookup = new Lookup(key, [liar, honest])
  run(lookup, new Map([[liar.peer, { providers: near.slice(0, 300) }], [honest.peer, { providers: [near[400]] }]]))
  const found = lookup.providers()
  assert.equal(found.length, 33)
  assert.ok(found.slice(0, 2).some(({ peer }) => peer === near[400].peer))
})

test('a provider may be where only one of those says who name it', () => {
  const [liar, honest] = [contact(1, at(1)), contact(2, at(2))]
  const lookup = new Lookup(key, [liar, honest])
  const said = where => ({ providers: [{ ...near[0], addrs: [at(where)] }] })
  run(lookup, new Map([[liar.peer, said(7)], [honest.peer, said(8)]]))
  assert.deepEqual(lookup.providers().map(({ addrs }) => addrs.sort()), [[at(7), at(8)]])
})

test('announcements count for the ranges in which they have blocks', () => {
  const said = { version: VERSION, numBlocks: 30, span: { start: 2, end: 9 } }
  const keys = keysOf(said.version)
  assert.deepEqual(keys.map(({ fits }) => fits(said)), [true, true, true, false, false, false, false, false])
  assert.equal(fits({ ...said, version: '5f4e7440d716' + '00'.repeat(26) }), false)
  assert.ok(keysOf('5f4e').every(({ fits }) => fits(said)))
})

test('addresses of IPv6 count by their network', () => {
  assert.equal(originOf('/ip6/2001:db8::1/tcp/1'), originOf('/ip6/2001:db8:0:0:5:6:7:8/tcp/2'))
  assert.notEqual(originOf('/ip6/2001:db8:1::1/tcp/1'), originOf('/ip6/2001:db8::1/tcp/1'))
  assert.equal(originOf('/dns4/swarm.example/tcp/443/wss'), 'swarm.example')
})

const text = new TextEncoder()

/** A stream on which a peer agrees to the protocol and says this, whatever it is asked. */
class Told extends EventTarget {
  status = 'open'

  constructor (protocol, said) {
    super()
    this.protocol = protocol
    const lines = ['/multistream/1.0.0', protocol].map(name => concat([Uint8Array.of(name.length + 1), text.encode(`${name}\n`)]))
    const size = []
    for (let rest = said.length; rest > 0; rest >>= 7) size.push(rest > 127 ? rest & 127 | 128 : rest)
    this._answer = concat([...lines, Uint8Array.from(size), said])
  }

  send () {
    queueMicrotask(() => this.dispatchEvent(Object.assign(new Event('message'), { data: this._answer })))
    return true
  }

  abort () {}
  async close () {}
}

/** What a search finds where the peers say this, by their ids: { records, own }, the bytes of their answers. */
async function search (peers) {
  const open = async ({ peer }, protocol) => {
    const said = peers.get(peer)?.[protocol === '/ipfs/kad/1.0.0' ? 'records' : 'own']
    if (said === undefined) throw new Error('nobody is there')
    return new Told(protocol, said)
  }
  const contacts = [contact(1, at(1)), contact(2, at(2))]
  const found = await searchRecords({ contacts, open, canDial: async () => true, originOf: peer => peer }, VERSION)
  return found.map(({ peer }) => peer)
}

const answer = fields => encode(KADEMLIA, { type: 3, ...fields })

/** A server with a key of its own, and the records of a directory that has its announcement. */
function server (name) {
  const secret = sha256(text.encode(name))
  const id = Uint8Array.from([0, 36, 8, 1, 18, 32, ...ed25519.getPublicKey(secret)])
  const announcement = encode(ANNOUNCEMENT, {
    peerId: id, sequence: BigInt(Date.now()) * 1_000_000n, expiresMs: Date.now() + 60_000, numBlocks: 6, span: { start: 0, end: 6 }, state: 2,
    modelVersion: Uint8Array.from(VERSION.match(/../g), pair => parseInt(pair, 16)), modelName: 'made-up'
  })
  const signature = ed25519.sign(canonical('petalnode/announcement/1', announcement), secret)
  return { id, peer: peerText(id), own: encode(DIRECTORY, { records: { records: [{ announcement, signature }] } }) }
}

test('answers that are nonsense, or much too long, end a search with nothing', async () => {
  const empty = concat([Uint8Array.of(8, 3), ...Array(100_000).fill(Uint8Array.of(66, 0))])
  const strange = answer({ providerPeers: [{ id: new Uint8Array(0) }, { id: new Uint8Array(70) }, { id: idOf(9), addrs: [Uint8Array.of(255)] }] })
  for (const said of [Uint8Array.of(255), empty, strange, answer({ type: 4 })]) {
    assert.deepEqual(await search(new Map([[contact(1).peer, { records: said }], [contact(2).peer, { records: said }]])), [])
  }
})

test('a server is found by its own word alone', async () => {
  const [one, other] = [server('one'), server('other')]
  const named = answer({ providerPeers: [one, other] })
  const peers = new Map([[contact(1).peer, { records: named }], [one.peer, one], [other.peer, { own: one.own }]])
  assert.deepEqual(await search(peers), [one.peer])
})
