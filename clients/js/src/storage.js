// Parts of models in the browser's storage (its Cache API), so that a page fetches them once. Node has none.
import { concat, hex, isEqual, sha256 } from './canonical.js'
import { treeDigest, tensorsOf } from './weights.js'
import { PART_TREE, decode, encode } from './wire.js'

const STORE = 'petalnode'
const PIECE = 1 << 20
const place = (version, part) => `https://parts.invalid/${hex(version)}/${part}`

/** The part, if it is there and what it was: all of it is checked again. */
export async function readStored (version, part, expected) {
  try {
    const found = await (await caches.open(STORE)).match(place(version, part))
    if (found === undefined) return undefined
    const bytes = new Uint8Array(await found.arrayBuffer())
    const size = new DataView(bytes.buffer).getUint32(0)
    const tree = decode(PART_TREE, bytes.subarray(4, 4 + size))
    const data = bytes.subarray(4 + size)
    if (!isEqual(treeDigest(tree), expected)) return undefined
    for (let at = 0; at < data.length; at += PIECE) {
      const hash = tree.pieces.subarray(at / PIECE * 32, at / PIECE * 32 + 32)
      if (!isEqual(sha256(data.subarray(at, at + PIECE)), hash)) return undefined
    }
    return { form: tree.form, tensors: tensorsOf(tree, data) }
  } catch {
    return undefined // no storage, or nothing in it that can be read
  }
}

/** Keeps a part that was checked; without a word where there is no room. */
export async function store (version, part, { tree, data }) {
  try {
    const head = encode(PART_TREE, tree)
    const size = new Uint8Array(4)
    new DataView(size.buffer).setUint32(0, head.length)
    await (await caches.open(STORE)).put(place(version, part), new Response(concat([size, head, data])))
  } catch {}
}
