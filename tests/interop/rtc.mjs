// Dials an address, its argument, by WebRTC-direct, and moves bytes. On standard input it takes {"number", "do": "move", "with": {"protocol",
// "size"}}: it sends so many random bytes on a stream (null: without an end) while it reads, and answers {"number", "result"} once both ends are
// closed, or the stream was reset: `sent` and `back` in bytes, their SHA-256, and `failed`. Prints {"event": "ready"} first.
import { createHash, randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { webRTCDirect } from '@libp2p/webrtc'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const LONG = 600_000 // milliseconds
const PIECE = 1 << 16
const say = object => console.log(JSON.stringify(object))
// The monitor would close a connection whose pings wait behind megabytes of a stream that was reset.
const connectionMonitor = { enabled: false }
const node = await createLibp2p({ transports: [webRTCDirect()], connectionMonitor, connectionGater: { denyDialMultiaddr: () => false } })
const connection = await dialed(20)

// js-libp2p gives up by deadlines of its own, whatever the signal says: a busy machine needs more than one try.
async function dialed (tries) {
  try {
    return await node.dial(multiaddr(process.argv[2]), { signal: AbortSignal.timeout(LONG) })
  } catch (error) {
    if (tries === 1) throw error
    return await dialed(tries - 1)
  }
}

say({ event: 'ready', peer_id: node.peerId.toString(), addrs: [] })

async function move ({ protocol, size }) {
  const [out, back] = [createHash('sha256'), createHash('sha256')]
  const done = { sent: 0, back: 0, failed: null }
  try {
    const stream = await connection.newStream(protocol, { signal: AbortSignal.timeout(LONG) })
    const reading = (async () => {
      for await (const chunk of stream) {
        back.update(chunk.subarray())
        done.back += chunk.byteLength
      }
    })()
    reading.catch(() => {})
    while (size === null || done.sent < size) {
      const piece = randomBytes(size === null ? PIECE : Math.min(PIECE, size - done.sent))
      out.update(piece)
      const goesOn = stream.send(piece)
      done.sent += piece.length
      // A stream that ends within `send` never tells `onDrain`; the next `send` does.
      if (!goesOn && stream.status === 'open') await stream.onDrain({ signal: AbortSignal.timeout(LONG) })
    }
    await stream.close({ signal: AbortSignal.timeout(LONG) })
    await reading
  } catch (error) {
    done.failed = String(error?.message ?? error?.type ?? error)
  }
  return { ...done, digests: [out.digest('hex'), back.digest('hex')] }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { number, with: given } = JSON.parse(line)
  move(given).then(result => say({ number, result }))
}
process.exit(0)
