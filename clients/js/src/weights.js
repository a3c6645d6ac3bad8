// The manifest of a model version, and parts of it, from whoever in the swarm holds them (docs/protocol.md#weights-from-peers).
import { digest, hex, isEqual, sha256 } from './canonical.js'
import { Messages, deadline } from './framing.js'
import { MANIFEST, WEIGHTS } from './wire.js'

const PIECE = 1 << 20
const AHEAD = 4 // questions under way
const MAX_TEXTS = 64 << 20

/** The first of the peers that `ask` succeeds with; throws with what each of them said. */
async function first (peers, what, ask) {
  const reasons = []
  for (const peer of peers) {
    try {
      return await ask(peer)
    } catch (error) {
      reasons.push(error.message)
    }
  }
  throw new Error(`no peer gave ${what}: ${reasons.join('; ') || 'none is known'}`)
}

/** Servers hold it; a node without a model answers NOT_FOUND. */
export async function fetchManifest (open, peers, version, signal) {
  return await first(peers, 'the manifest', async peer => {
    const messages = new Messages(await open(peer, '/petalnode/manifest/1'), MANIFEST, peer, 1 << 20)
    try {
      await messages.send({ query: { modelVersion: version } }, [], deadline(10, signal))
      const { manifest } = await messages.receive(deadline(10, signal))
      const found = digest('petalnode/model/1', manifest.config, manifest.embeddings, manifest.blocks, manifest.head)
      if (!isEqual(found, version)) throw new Error(`the manifest of ${peer} is that of ${hex(found).slice(0, 12)}`)
      return { ...manifest, config: JSON.parse(new TextDecoder().decode(manifest.config)) }
    } finally {
      await messages.close()
    }
  })
}

export function treeDigest ({ form, tensors, pieces }) {
  return digest('petalnode/model/part/2', form, tensors.map(one => [one.name, one.dtype, one.shape, one.nbytes]), pieces)
}

/** The tensors of a part, whose bytes stand one behind the other. */
export function tensorsOf (tree, data) {
  let at = 0
  return tree.tensors.map(tensor => ({ ...tensor, data: data.subarray(at, at += tensor.nbytes) }))
}

/** The names and bytes of a part, whose digest is `expected(offer)`: of embeddings 0, of norm and head n + 1, of texts n + 2. */
export async function fetchPart (open, peers, version, part, expected, onProgress, signal) {
  return await first(peers, `part ${part}`, async peer => {
    const messages = new Messages(await open(peer, '/petalnode/weights/1'), WEIGHTS, peer, 4 << 20)
    try {
      await messages.send({ query: { modelVersion: version } }, [], deadline(10, signal))
      const { offer } = await messages.receive(deadline(10, signal))
      if (!((offer.parts[part >> 3] ?? 0) >> (part & 7) & 1)) throw new Error(`${peer} does not hold it`)
      await messages.send({ treeQuery: { modelVersion: version, part } }, [], deadline(10, signal))
      const { tree } = await messages.receive(deadline(30, signal))
      if (!isEqual(treeDigest(tree), expected(offer))) throw new Error(`${peer} has another tree of it`)
      const size = tree.tensors.reduce((sum, tensor) => sum + tensor.nbytes, 0)
      if (tree.form === 'text' && size > MAX_TEXTS) throw new Error('texts that are too large')
      const data = new Uint8Array(size)
      const count = Math.ceil(size / PIECE)
      let asked = 0
      for (let piece = 0; piece < count; piece++) {
        while (asked < Math.min(count, piece + AHEAD)) {
          await messages.send({ pieceQuery: { modelVersion: version, part, piece: asked++ } }, [], deadline(30, signal))
        }
        const [bytes] = (await messages.receive(deadline(30, signal), PIECE)).payloads
        if (bytes === undefined || !isEqual(sha256(bytes), tree.pieces.subarray(32 * piece, 32 * piece + 32))) {
          throw new Error(`${peer} sent a false piece`)
        }
        data.set(bytes, piece * PIECE)
        onProgress?.({ part, bytes: piece * PIECE + bytes.length, of: size })
      }
      return { form: tree.form, tensors: tensorsOf(tree, data), tree, data }
    } finally {
      await messages.close()
    }
  })
}
