// The messages of protocols/wire.proto that a client sends or reads, and protobuf's encoding of them.
// A field is [number, kind, name, options]: kind is a scalar, or another message; `many` repeats it.

const text = new TextEncoder()
const utf8 = new TextDecoder()

const SPAN = [[1, 'uint', 'start'], [2, 'uint', 'end']]
const TENSOR = [[1, 'uint', 'shape', 'many'], [2, 'string', 'dtype'], [3, 'string', 'codec'], [4, 'uint', 'nbytes']]
const ERROR = [[1, 'uint', 'code'], [2, 'string', 'message']]
const TENSORS = [15, TENSOR, 'tensors', 'many']
const PLEDGE = [
  [1, 'bytes', 'server'], [2, 'bytes', 'modelVersion'], [3, SPAN, 'span'], [4, 'string', 'dtype'], [5, 'string', 'quantisation'],
  [6, 'uint', 'deposit'], [7, 'uint', 'fromMs'], [8, 'uint', 'untilMs'], [9, 'bytes', 'holder'], [10, 'bytes', 'voucher'],
  [11, 'bytes', 'signature']
]
export const ANNOUNCEMENT = [
  [1, 'bytes', 'peerId'], [2, 'big', 'sequence'], [3, 'uint', 'expiresMs'], [4, 'bytes', 'modelVersion'], [5, 'string', 'modelName'],
  [6, 'uint', 'numBlocks'], [7, SPAN, 'span'], [8, 'uint', 'state'], [9, 'uint', 'stepUs'], [10, 'uint', 'forwardTokensPerSecond'],
  [11, 'string', 'dtype'], [12, 'string', 'quantisation'], [13, 'uint', 'cacheTokensFree'], [14, 'uint', 'cacheTokens'],
  [15, 'uint', 'queueDepth'], [17, 'bytes', 'addrs', 'many'], [20, 'string', 'publicName'], [21, 'uint', 'maxSessionLength']
]
export const SIGNED_ANNOUNCEMENT = [[1, 'bytes', 'announcement'], [2, 'bytes', 'signature']]
const RECEIPT = [
  [1, 'uint', 'protocolVersion'], [2, 'bytes', 'modelVersion'], [3, SPAN, 'span'], [4, 'string', 'dtype'], [5, 'string', 'quantisation'],
  [6, 'bytes', 'client'], [7, 'bytes', 'nonce'], [8, 'bytes', 'sessionEpoch'], [9, 'uint', 'sequence'], [10, 'bytes', 'requestHash'],
  [11, 'bytes', 'replyHash'], [12, 'bytes', 'previousReceipt'], [13, 'bytes', 'upstreamReceipt'], [14, 'uint', 'timeMs'],
  [15, 'bytes', 'signature'], [16, 'bytes', 'adapter']
]
export const DIRECTORY = [
  [1, [[1, 'bytes', 'modelVersion'], [2, 'uint', 'limit'], [3, 'bytes', 'after'], [4, 'uint', 'sample'], [5, 'uint', 'maxBytes']], 'query'],
  [2, [[1, SIGNED_ANNOUNCEMENT, 'records', 'many'], [2, 'uint', 'truncated']], 'records'],
  [3, ERROR, 'error'], TENSORS
]
export const MANIFEST = [
  [1, [[1, 'bytes', 'modelVersion']], 'query'],
  [2, [[1, 'bytes', 'config'], [2, 'bytes', 'embeddings'], [3, 'bytes', 'blocks', 'many'], [4, 'bytes', 'head']], 'manifest'],
  [3, ERROR, 'error'], TENSORS
]
const TREE_TENSOR = [[1, 'string', 'name'], [2, 'string', 'dtype'], [3, 'uint', 'shape', 'many'], [4, 'uint', 'nbytes']]
export const PART_TREE = [[1, 'string', 'form'], [2, TREE_TENSOR, 'tensors', 'many'], [3, 'bytes', 'pieces']]
export const WEIGHTS = [
  [1, [[1, 'bytes', 'modelVersion']], 'query'],
  [2, [[1, 'bytes', 'parts'], [2, 'string', 'blocks'], [3, 'string', 'base'], [4, 'string', 'bare', 'many'], [5, 'bytes', 'texts']], 'offer'],
  [3, [[1, 'bytes', 'modelVersion'], [2, 'uint', 'part']], 'treeQuery'],
  [4, PART_TREE, 'tree'],
  [5, [[1, 'bytes', 'modelVersion'], [2, 'uint', 'part'], [3, 'uint', 'piece']], 'pieceQuery'],
  [6, [], 'piece'], [7, ERROR, 'error'], TENSORS
]
export const INFERENCE = [
  [1, [
    [1, 'uint', 'protocolVersion'], [2, 'bytes', 'modelVersion'], [3, SPAN, 'span'], [4, 'uint', 'maxLength'], [5, 'uint', 'batch'],
    [7, 'string', 'codec'], [9, 'bytes', 'nonce'], [10, 'uint', 'routeEpoch'], [11, 'bytes', 'upstream'], [12, 'bytes', 'downstream'],
    [13, 'uint', 'waitMs'], [14, 'string', 'activationDtype'], [15, 'uint', 'keepMs']
  ], 'open'],
  [2, [
    [1, 'bytes', 'sessionEpoch'], [2, 'uint', 'cacheTokens'], [3, 'string', 'codec'], [4, 'string', 'dtype'], [5, 'string', 'quantisation'],
    [6, 'uint', 'credits'], [7, 'uint', 'maxStepTokens'], [12, PLEDGE, 'pledge']
  ], 'granted'],
  [3, [
    [1, 'uint', 'sequence'], [2, 'uint', 'position'], [4, 'uint', 'routeEpoch'], [5, 'bytes', 'previousReceipt'],
    [6, [[1, 'bytes', 'peerId'], [2, 'bytes', 'nonce'], [3, 'uint', 'sequence']], 'targets', 'many']
  ], 'step'],
  [4, [
    [1, 'uint', 'sequence'], [2, 'uint', 'position'], [3, RECEIPT, 'receipt'], [7, 'uint', 'handedOn'], [8, 'uint', 'draining'],
    [9, RECEIPT, 'upstream']
  ], 'reply'],
  [5, ERROR, 'error'], [6, [], 'close'], TENSORS
]
const KADEMLIA_PEER = [[1, 'bytes', 'id'], [2, 'bytes', 'addrs', 'many']]
/** libp2p's (https://github.com/libp2p/specs/tree/master/kad-dht), as far as it is of use. */
export const KADEMLIA = [
  [1, 'uint', 'type'], [2, 'bytes', 'key'], [8, KADEMLIA_PEER, 'closerPeers', 'many'], [9, KADEMLIA_PEER, 'providerPeers', 'many']
]
export const INVITE = [
  [1, 'bytes', 'maker'], [2, 'bytes', 'addrs', 'many'], [3, 'string', 'model'], [4, 'bytes', 'modelVersion'], [5, 'uint', 'expires'],
  [6, 'bytes', 'swarmKey'], [7, 'bytes', 'swarmKeyHash']
]

function putVarint (out, value) {
  let rest = BigInt(value)
  while (rest > 127n) {
    out.push(Number(rest & 127n) | 128)
    rest >>= 7n
  }
  out.push(Number(rest))
}

/** The bytes of a message; fields that are undefined, 0 or empty are left out, as proto3 has it. */
export function encode (schema, message) {
  const out = []
  for (const [number, kind, name, many] of schema) {
    const values = message[name] === undefined ? [] : many ? message[name] : [message[name]]
    if (kind === 'uint' && many) {
      if (values.length > 0) {
        const packed = []
        for (const value of values) putVarint(packed, value)
        putVarint(out, number << 3 | 2)
        putVarint(out, packed.length)
        out.push(...packed)
      }
      continue
    }
    for (const value of values) {
      if (kind === 'uint' || kind === 'big') {
        if (many || Number(value) !== 0) {
          putVarint(out, number << 3)
          putVarint(out, value)
        }
        continue
      }
      const data = typeof kind === 'object' ? encode(kind, value) : kind === 'string' ? text.encode(value) : value
      if (typeof kind === 'object' || many || data.length > 0) {
        putVarint(out, number << 3 | 2)
        putVarint(out, data.length)
        for (const byte of data) out.push(byte)
      }
    }
  }
  return Uint8Array.from(out)
}

/** Reads a varint; returns [value, where it ends], or undefined if it is cut off. */
export function readVarint (data, at, most = 10) {
  let value = 0n
  for (let i = 0; i < most; i++) {
    if (at + i >= data.length) return undefined
    value |= BigInt(data[at + i] & 127) << BigInt(7 * i)
    if (data[at + i] < 128) return [value, at + i + 1]
  }
  throw new Error('a number that is too long')
}

/** The message that the bytes are; unknown fields are passed over. Throws on what is no message. */
export function decode (schema, data, depth = 0) {
  if (depth > 8) throw new Error('messages nested too deeply')
  const message = {}
  for (const [, kind, name, many] of schema) {
    if (many) message[name] = []
    else if (kind === 'uint') message[name] = 0
    else if (kind === 'big') message[name] = 0n
    else if (kind === 'string') message[name] = ''
    else if (kind === 'bytes') message[name] = new Uint8Array(0)
  }
  const fields = new Map(schema.map(field => [field[0], field]))
  let at = 0
  const next = () => {
    const read = readVarint(data, at)
    if (read === undefined) throw new Error('a message that is cut off')
    at = read[1]
    return read[0]
  }
  while (at < data.length) {
    const tag = Number(next())
    const field = fields.get(tag >> 3)
    let value
    if ((tag & 7) === 0) {
      value = next()
    } else if ((tag & 7) === 2) {
      const size = Number(next())
      if (at + size > data.length) throw new Error('a message that is cut off')
      value = data.subarray(at, at + size)
      at += size
    } else if ((tag & 7) === 1 || (tag & 7) === 5) {
      at += (tag & 7) === 1 ? 8 : 4
      continue
    } else {
      throw new Error('a field of an unknown kind')
    }
    if (field === undefined) continue
    const [, kind, name, many] = field
    const isNumber = kind === 'uint' || kind === 'big'
    if (isNumber !== (typeof value === 'bigint') && !(isNumber && many)) throw new Error(`a field ${name} of another kind`)
    if (isNumber && many && typeof value !== 'bigint') {
      for (let place = 0; place < value.length;) {
        const read = readVarint(value, place)
        if (read === undefined) throw new Error('a message that is cut off')
        message[name].push(Number(read[0]))
        place = read[1]
      }
      continue
    }
    if (kind === 'uint') value = Number(value)
    else if (kind === 'string') value = utf8.decode(value)
    else if (typeof kind === 'object') value = decode(kind, value, depth + 1)
    else if (kind === 'bytes') value = value.slice()
    if (many) message[name].push(value)
    else message[name] = value
  }
  return message
}
