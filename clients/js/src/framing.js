// Messages on a stream: varint length, protobuf header, then the bytes of the tensors that the header lists.
import { concat, isEqual } from './canonical.js'
import { decode, encode, readVarint } from './wire.js'

const text = new TextEncoder()

export const ERROR_WORDS = [
  'unspecified', 'bad request', 'unknown model', 'blocks not hosted', 'no room in the cache', 'too long', 'unsupported', 'busy',
  'draining', 'internal', 'not found', 'not allowed'
]
const MAX_PAYLOAD = 64 << 20
const CHUNK = 60_000

/** What a peer answered instead: `code` is the protocol's. */
export class Refused extends Error {
  constructor (error, peer) {
    super(`${peer} refused (${ERROR_WORDS[error.code] ?? error.code}): ${error.message.slice(0, 500)}`)
    this.code = error.code
  }
}

/** The stream has ended, or could not be opened any more: by the peer, or on the way to it. */
export class Lost extends Error {}

/** What asks for a protocol by multistream-select, and is the answer of who speaks it. Names are shorter than 127 bytes. */
function question (protocol) {
  return concat(['/multistream/1.0.0', protocol].map(name => concat([Uint8Array.of(name.length + 1), text.encode(`${name}\n`)])))
}

/**
 * A stream of one kind of frames, and of a protocol that nobody has agreed on yet: what asks for it goes with the first frame. All waits
 * end at their deadline; what is wrong aborts the stream.
 */
export class Messages {
  constructor (stream, schema, peer, maxHeader = 65536) {
    this.peer = peer
    this._stream = stream
    this._schema = schema
    this._maxHeader = maxHeader
    this._chunks = []
    this._size = 0
    this._ended = undefined
    this._question = question(stream.protocol)
    this._unsaid = this._question
    this._unheard = this._question.length
    this._wake = () => {}
    stream.addEventListener('message', event => {
      const said = event.data.subarray()
      const data = new Uint8Array(said.buffer, said.byteOffset, said.byteLength) // and no Buffer of Node's, whose slices are no copies
      this._chunks.push(data)
      this._size += data.length
      if (this._size > 2 * MAX_PAYLOAD) stream.abort(new Error('too much came'))
      this._wake()
    })
    const end = event => {
      this._ended ??= new Lost(event.error?.message ?? `the stream to ${peer} has ended`)
      this._wake()
    }
    stream.addEventListener('close', end)
    stream.addEventListener('remoteCloseWrite', end)
  }

  async send (frame, payloads, signal) {
    const header = encode(this._schema, frame)
    const size = []
    for (let rest = header.length; ; rest >>= 7) {
      size.push(rest > 127 ? rest & 127 | 128 : rest)
      if (rest < 128) break
    }
    const data = concat([this._unsaid, Uint8Array.from(size), header, ...payloads])
    this._unsaid = new Uint8Array(0)
    for (let at = 0; at < data.length; at += CHUNK) {
      this._checkOpen()
      if (this._stream.send(data.subarray(at, at + CHUNK))) continue
      this._checkOpen() // a stream that ends within `send` never tells `onDrain`
      await this._stream.onDrain({ signal })
    }
  }

  _checkOpen () {
    if (this._stream.status !== 'open') throw this._ended ?? new Lost(`the stream to ${this.peer} is closed`)
  }

  /** The next frame, with `payloads`; throws `Refused` where it is an error. `most` bounds the bytes of its tensors. */
  async receive (signal, most = 0) {
    try {
      await this._agree(signal)
      let head
      while ((head = readVarint(this._peek(5), 0, 4)) === undefined) await this._more(signal)
      const [length, from] = [Number(head[0]), head[1]]
      if (length > this._maxHeader) throw new Error(`${this.peer} sent a header of ${length} bytes`)
      await this._take(from, signal)
      const frame = decode(this._schema, await this._take(length, signal))
      if (frame.error !== undefined) throw new Refused(frame.error, this.peer)
      const sizes = (frame.tensors ?? []).map(tensor => tensor.nbytes)
      if (sizes.reduce((sum, size) => sum + size, 0) > Math.min(most, MAX_PAYLOAD)) throw new Error(`${this.peer} sent more than was asked for`)
      frame.payloads = []
      for (const size of sizes) frame.payloads.push(await this._take(size, signal))
      return frame
    } catch (error) {
      this._stream.abort(error)
      throw error
    }
  }

  async _agree (signal) {
    while (this._unheard > 0) {
      const [size] = await this._take(1, signal)
      const said = await this._take(size, signal)
      const expected = this._question.subarray(-this._unheard).subarray(1, 1 + size)
      if (!isEqual(said, expected)) throw new Error(`${this.peer} does not speak ${this._stream.protocol}`)
      this._unheard -= 1 + size
    }
  }

  /** Whether something comes before the signal; nothing is taken. */
  async arrives (signal) {
    try {
      while (this._size === 0) await this._more(signal)
      return true
    } catch {
      return false
    }
  }

  async close () {
    await this._stream.close({ signal: deadline(5) }).catch(() => {})
  }

  abort (error) {
    this._stream.abort(error)
  }

  _peek (count) {
    if (this._chunks.length > 1 && this._chunks[0].length < count) this._chunks = [concat(this._chunks)]
    return (this._chunks[0] ?? new Uint8Array(0)).subarray(0, count)
  }

  async _take (count, signal) {
    while (this._size < count) await this._more(signal)
    const parts = []
    for (let left = count; left > 0;) {
      const part = this._chunks[0].subarray(0, left)
      parts.push(part)
      left -= part.length
      if (part.length === this._chunks[0].length) this._chunks.shift()
      else this._chunks[0] = this._chunks[0].subarray(part.length)
    }
    this._size -= count
    return parts.length === 1 ? parts[0] : concat(parts)
  }

  async _more (signal) {
    const before = this._size
    if (this._ended !== undefined) throw this._ended
    signal?.throwIfAborted()
    await new Promise(resolve => {
      this._wake = resolve
      signal?.addEventListener('abort', resolve, { once: true })
    })
    if (this._size === before) {
      signal?.throwIfAborted()
      if (this._ended !== undefined) throw this._ended
    }
  }
}

export function deadline (seconds, signal) {
  const timeout = AbortSignal.timeout(Math.round(seconds * 1000))
  return signal === undefined ? timeout : AbortSignal.any([timeout, signal])
}
