// A node of js-libp2p's Kademlia in server mode: TCP, Noise, Yamux. Arguments: multiaddrs of nodes to join by.
// Prints its multiaddr as JSON when it runs, and ends with its standard input.
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  // Loopback: none of these is to be left out of answers or not to be dialed for its private address.
  connectionGater: { denyDialMultiaddr: () => false },
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({ protocol: '/ipfs/kad/1.0.0', clientMode: false, peerInfoMapper: passthroughMapper })
  }
})
for (const peer of process.argv.slice(2)) {
  await node.dial(multiaddr(peer))
}
console.log(JSON.stringify({ addr: node.getMultiaddrs()[0].toString() }))
process.stdin.on('end', () => process.exit(0)).resume()
