// A node of js-libp2p that does what it is told. Its argument is JSON: `listen`, `announce`, `relay` (it reserves there), `peers` (dialed at
// the start), `key` (a kind), `services` (names of `SERVICES`). On standard input it takes {"number", "do", "with"} for `COMMANDS`, and answers
// {"number", "result"} or {"number", "error"}. Prints {"event": "ready", "peer_id", "addrs"} first, and ends with its standard input.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { autoNAT } from '@libp2p/autonat'
import { autoNATv2 } from '@libp2p/autonat-v2'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { generateKeyPair } from '@libp2p/crypto/keys'
import { dcutr } from '@libp2p/dcutr'
import { gossipsub } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { peerIdFromString } from '@libp2p/peer-id'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const AUTONAT = '/libp2p/autonat/1.0.0'
const ECHO = '/js-echo/1'
const table = clientMode => kadDHT({
  protocol: '/ipfs/kad/1.0.0',
  clientMode,
  peerInfoMapper: passthroughMapper,
  allowQueryWithZeroPeers: true,
  validators: { petalnode: async () => {} },
  selectors: { petalnode: () => 0 }
})
const SERVICES = {
  autonat: () => autoNAT(),
  autonat2: () => autoNATv2(),
  dcutr: () => dcutr(),
  gossip: () => gossipsub(),
  relay: () => circuitRelayServer({ reservations: { applyDefaultLimit: false } }),
  table: () => table(false),
  tableClient: () => table(true)
}

const { listen = [], announce = [], relay, peers = [], key = 'Ed25519', services = [] } = JSON.parse(process.argv[2])
const node = await createLibp2p({
  privateKey: await generateKeyPair(key),
  addresses: { listen: [...listen, ...relay ? [`${relay}/p2p-circuit`] : []], announce },
  transports: [tcp(), webSockets(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  // Loopback: none of these is not to be dialed for its private address.
  connectionGater: { denyDialMultiaddr: () => false },
  services: { identify: identify(), ping: ping(), ...Object.fromEntries(services.map(name => [name, SERVICES[name]()])) }
})
const say = object => console.log(JSON.stringify(object))
const bytes = hex => Uint8Array.from(hex.match(/../g), pair => parseInt(pair, 16))
let closed = 0
node.addEventListener('connection:close', () => { closed++ })

// How often it was asked for AutoNAT, whatever its own service makes of that.
let asked = 0
const registrar = node.components.registrar
if (services.includes('autonat')) {
  const { handler, options } = registrar.getHandler(AUTONAT)
  await registrar.unhandle(AUTONAT)
  await registrar.handle(AUTONAT, (stream, connection) => {
    asked++
    return handler(stream, connection)
  }, options)
}
await node.handle(ECHO, stream => { stream.addEventListener('message', event => { stream.send(event.data) }) })

async function open (peer, protocol) {
  const target = peer.startsWith('/') ? multiaddr(peer) : peerIdFromString(peer)
  return await node.dialProtocol(target, protocol, { signal: AbortSignal.timeout(60_000) })
}

const COMMANDS = {
  addrs: () => node.getMultiaddrs().map(addr => addr.toString()),
  // What identify said of a peer.
  about: async ({ peer }) => {
    const { protocols, metadata } = await node.peerStore.get(peerIdFromString(peer))
    return { agent: new TextDecoder().decode(metadata.get('AgentVersion')), protocols }
  },
  // Milliseconds there and back.
  ping: async ({ peer }) => await node.services.ping.ping(multiaddr(peer)),
  connect: async ({ peer }) => (await node.dial(multiaddr(peer))).remotePeer.toString(),
  // What comes on a stream before it ends, as text, without a question.
  listen: async ({ peer, protocol }) => {
    const stream = await open(peer, protocol)
    let text = ''
    stream.addEventListener('message', event => { text += new TextDecoder().decode(event.data.subarray()) })
    await new Promise(resolve => ['close', 'remoteCloseWrite'].forEach(name => stream.addEventListener(name, resolve)))
    return text
  },
  // Sends bytes to another of these nodes; how many come back, and how js-libp2p calls the connection. No limited one is permitted.
  echo: async ({ peer, size }) => {
    const stream = await open(peer, ECHO)
    let back = 0
    const done = new Promise((resolve, reject) => {
      stream.addEventListener('message', event => { if ((back += event.data.byteLength) >= size) resolve() })
      stream.addEventListener('close', event => { event.error === undefined ? resolve() : reject(event.error) })
    })
    for (let at = 0; at < size; at += 16384) if (!stream.send(new Uint8Array(Math.min(16384, size - at)))) await stream.onDrain()
    await done
    const id = multiaddr(peer).getComponents().at(-1).value
    return { back, limits: node.getConnections(peerIdFromString(id)).map(({ limits }) => limits ?? null) }
  },
  paths: ({ peer }) => node.getConnections(peerIdFromString(peer)).map(({ remoteAddr, direction }) => ({ addr: remoteAddr.toString(), direction })),
  // Puts a value into the table of the peers that it knows; what each of them said.
  put: async ({ key, value }) => {
    const said = []
    for await (const event of node.services.table.put(new TextEncoder().encode(key), bytes(value), { signal: AbortSignal.timeout(60_000) })) {
      if (event.name === 'QUERY_ERROR') said.push(event.error.message)
      if (event.name === 'PEER_RESPONSE' && event.messageName === 'PUT_VALUE') said.push('stored')
    }
    return said
  },
  // Whom the peers that it knows name as near to this peer's id.
  near: async ({ peer }) => {
    const found = new Set()
    const key = peerIdFromString(peer).toMultihash().bytes
    for await (const event of node.services.table.getClosestPeers(key, { signal: AbortSignal.timeout(60_000) })) {
      if (event.name === 'PEER_RESPONSE') for (const { id } of event.closer) found.add(id.toString())
    }
    return [...found]
  },
  // Its own addresses at which others have reached it.
  verified: () => node.components.addressManager.getAddressesWithMetadata().filter(({ verified }) => verified).map(({ multiaddr }) => multiaddr.toString()),
  // From now on, the messages of a topic of gossipsub are printed: {"event": "message", "data"}.
  subscribe: ({ topic }) => {
    node.services.gossip.addEventListener('message', ({ detail }) => say({ event: 'message', data: Buffer.from(detail.data).toString('hex') }))
    node.services.gossip.subscribe(topic)
  },
  counts: () => ({ asked, closed })
}

for (const peer of peers) await node.dial(multiaddr(peer))
say({ event: 'ready', peer_id: node.peerId.toString(), addrs: node.getMultiaddrs().map(addr => addr.toString()) })
for await (const line of createInterface({ input: process.stdin })) {
  const { number, do: name, with: given } = JSON.parse(line)
  Promise.resolve().then(() => COMMANDS[name](given)).then(
    result => say({ number, result: result ?? null }),
    error => say({ number, error: `${error.name}: ${error.message}` })
  )
}
process.exit(0)
