// One unambiguous byte string for a list of values, and what is hashed and signed of it: docs/protocol.md#signed-bytes.
import { ed25519 } from '@noble/curves/ed25519.js'
import { sha256 } from '@noble/hashes/sha2.js'
import { base58btc } from 'multiformats/bases/base58'

const text = new TextEncoder()
const MAGIC = text.encode('petalnode/canonical/1\0')
const ED25519_HEAD = [0x00, 0x24, 0x08, 0x01, 0x12, 0x20]

export { sha256 }

function length (size) {
  const bytes = new Uint8Array(8)
  new DataView(bytes.buffer).setBigUint64(0, BigInt(size))
  return bytes
}

function put (chunks, value) {
  if (value instanceof Uint8Array) {
    chunks.push(Uint8Array.of(0x62), length(value.length), value)
  } else if (typeof value === 'string') {
    const data = text.encode(value)
    chunks.push(Uint8Array.of(0x73), length(data.length), data)
  } else if (Array.isArray(value)) {
    chunks.push(Uint8Array.of(0x6c), length(value.length))
    for (const item of value) put(chunks, item)
  } else {
    const bytes = new Uint8Array(17)
    bytes[0] = 0x69
    const view = new DataView(bytes.buffer)
    view.setBigInt64(1, BigInt(value) < 0n ? -1n : 0n)
    view.setBigInt64(9, BigInt(value))
    chunks.push(bytes)
  }
}

export function concat (chunks) {
  const out = new Uint8Array(chunks.reduce((size, chunk) => size + chunk.length, 0))
  let at = 0
  for (const chunk of chunks) {
    out.set(chunk, at)
    at += chunk.length
  }
  return out
}

/** Values are bytes, texts, integers and lists of these. */
export function canonical (domain, ...fields) {
  const chunks = [MAGIC]
  put(chunks, domain)
  put(chunks, fields)
  return concat(chunks)
}

export function digest (domain, ...fields) {
  return sha256(canonical(domain, ...fields))
}

function isShaped (peerId, signature) {
  return peerId.length === 38 && ED25519_HEAD.every((byte, at) => peerId[at] === byte) && signature.length === 64
}

/** Whether `peerId` (38 bytes) signed `message` for `domain`. */
export function isSigned (peerId, domain, message, signature) {
  if (!isShaped(peerId, signature)) return false
  try {
    return ed25519.verify(signature, canonical(domain, message), peerId.subarray(6))
  } catch {
    return false
  }
}

/** A function (message, signature) that tells as `isSigned`, by the platform's own code where that knows such keys: it is ten times quicker. */
export async function verifierOf (peerId, domain) {
  const key = await crypto.subtle.importKey('raw', peerId.slice(6), 'Ed25519', false, ['verify']).catch(() => undefined)
  if (key === undefined) return (message, signature) => isSigned(peerId, domain, message, signature)
  return async (message, signature) => (
    isShaped(peerId, signature) && await crypto.subtle.verify('Ed25519', key, signature, canonical(domain, message))
  )
}

export function peerText (bytes) {
  return base58btc.baseEncode(bytes)
}

export function isEqual (one, other) {
  return one.length === other.length && one.every((byte, at) => byte === other[at])
}

export function hex (bytes) {
  return Array.from(bytes, byte => byte.toString(16).padStart(2, '0')).join('')
}
