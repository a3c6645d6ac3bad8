// The rows of a matrix, as they are stored, and which of them has the largest product with a vector: most of the work is done in 8 bits, by
// WebAssembly's SIMD where there is one. The module is put together here: it has one function.
import { bytesOf, toFloats } from './floats.js'

const LANES = 32 // values of a turn of the inner loop
const PAGE = 65536
const ROUNDING = 2 ** -20 // of a norm, at the most what rounding does to sums of float64

const [I32, V128, VOID] = [0x7f, 0x7b, 0x40]
const get = local => [0x20, local]
const set = local => [0x21, local]
const tee = local => [0x22, local]
const add = size => [0x41, ...size === 64 ? [0xc0, 0x00] : [size], 0x6a] // i32.const, i32.add
const loop = body => [0x03, VOID, ...body, 0x0b]
const again = [0x49, 0x0d, 0x00] // i32.lt_u, br_if 0
const load = offset => [0xfd, 0x00, 0x04, offset] // v128.load
const widened = offset => [0xfd, 0x01, 0x03, offset] // v128.load8x8_s: 8 values of 8 bits, of 16 then
const [DOT, SUM] = [[0xfd, 0xba, 0x01], [0xfd, 0xae, 0x01]] // i32x4.dot_i16x8_s, i32x4.add
const lane = number => [0xfd, 0x1b, number] // i32x4.extract_lane
const sized = bytes => [...length(bytes.length), ...bytes]
const section = (id, ...bytes) => [id, ...sized(bytes)]

function length (size) {
  return size < 128 ? [size] : [size & 127 | 128, size >> 7]
}

/** f(row, x, out, end of out, end of x): places in memory. Four sums of four values each, so that additions do not wait for each other. */
function code () {
  const [row, x, out, outEnd, xEnd, zero, at] = [0, 1, 2, 3, 4, 9, 10]
  const sums = [5, 6, 7, 8]
  const inner = loop([
    ...sums.flatMap((sum, number) => [...get(sum), ...get(row), ...widened(8 * number), ...get(at), ...load(16 * number), ...DOT, ...SUM, ...set(sum)]),
    ...get(row), ...add(32), ...set(row), ...get(at), ...add(64), ...tee(at), ...get(xEnd), ...again
  ])
  const [a, b, c, d] = sums
  const outer = loop([
    ...sums.flatMap(sum => [...get(zero), ...set(sum)]), ...get(x), ...set(at), ...inner,
    ...get(out), ...get(a), ...get(b), ...SUM, ...get(c), ...get(d), ...SUM, ...SUM, ...set(a),
    ...get(a), ...lane(0), ...[1, 2, 3].flatMap(number => [...get(a), ...lane(number), 0x6a]), 0x36, 0x02, 0x00, // i32.add, i32.store
    ...get(out), ...add(4), ...tee(out), ...get(outEnd), ...again
  ])
  const body = [2, 5, V128, 1, I32, ...outer, 0x0b]
  return Uint8Array.from([
    0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00,
    ...section(1, 1, 0x60, 5, I32, I32, I32, I32, I32, 0),
    ...section(2, 1, 1, 0x65, 1, 0x6d, 0x02, 0x00, 0x01), // e.m: the memory
    ...section(3, 1, 0),
    ...section(7, 1, 1, 0x66, 0x00, 0), // f
    ...section(10, 1, ...sized(body))
  ])
}

/** Rows of `width` values each, one behind the other in `data`, in a form that `toFloats` reads. */
export class Rows {
  constructor ({ dtype, data }, width) {
    this.width = width
    this._dtype = dtype
    this._data = data
    this._size = bytesOf(dtype) * width
    this.count = data.length / this._size
  }

  /** The values of one, float32. */
  at (number) {
    return toFloats(this._dtype, this._data.subarray(number * this._size, (number + 1) * this._size))
  }
}

/** Products of all rows with a vector. The largest is exact; each other is at most the error of 8 bits away from what it is. */
export class Products {
  constructor (rows) {
    const { count, width } = this._rows = rows
    const [xAt, sumsAt] = [4 * Math.ceil(count * width / 4), 4 * Math.ceil(count * width / 4) + 4 * Math.ceil(width / 2)]
    const size = sumsAt + 4 * count
    let memory
    try {
      memory = new WebAssembly.Memory({ initial: Math.ceil(size / PAGE) })
      if (width % LANES === 0) this._run = new WebAssembly.Instance(new WebAssembly.Module(code()), { e: { m: memory } }).exports.f
    } catch {} // no SIMD here: plain JavaScript
    const buffer = memory?.buffer ?? new ArrayBuffer(size)
    this._values = new Int8Array(buffer, 0, count * width)
    this._x = new Int16Array(buffer, xAt, width)
    this._sums = new Int32Array(buffer, sumsAt, count)
    this._out = new Float64Array(count)
    // Of each row: what a step of its 8 bits is, the norm of what they leave out, and that of what they say.
    this._steps = new Float64Array(count)
    this._lost = new Float64Array(count)
    this._norms = new Float64Array(count)
    this._most = Math.min(32767, Math.floor((2 ** 31 - 1) / (127 * width))) // of a value of 16 bits: sums stay within 32
    for (let row = 0; row < count; row++) this._put(row)
    this._sum() // engines compile it well once they have seen it run
  }

  _put (row) {
    const values = this._rows.at(row)
    let largest = 0
    for (let at = 0; at < values.length; at++) largest = Math.max(largest, Math.abs(values[at]))
    const step = largest / 127 || 1
    const from = row * values.length
    let [lost, norm] = [0, 0]
    for (let at = 0; at < values.length; at++) {
      const said = Math.round(values[at] / step)
      this._values[from + at] = said
      lost += (values[at] - said * step) ** 2
      norm += (said * step) ** 2
    }
    this._steps[row] = step
    this._norms[row] = Math.sqrt(norm)
    this._lost[row] = Math.sqrt(lost) + ROUNDING * this._norms[row]
  }

  /** The array is used again by the next call. */
  with (x) {
    const { _sums: sums, _steps: steps, _lost: lost, _norms: norms, _out: out } = this
    const [step, norm, left] = this._take(x)
    this._sum()
    // No product is further from its approximation than this: Cauchy-Schwarz, of what either of the two leaves out.
    const bound = row => lost[row] * norm + norms[row] * left
    let least = -Infinity // that the largest product may be
    for (let row = 0; row < out.length; row++) {
      out[row] = sums[row] * steps[row] * step
      least = Math.max(least, out[row] - bound(row))
    }
    for (let row = 0; row < out.length; row++) if (!(out[row] + bound(row) < least)) out[row] = this._exactly(row, x)
    return out
  }

  /** Takes the vector in 16 bits: what a step of them is, its norm, and that of what they leave out. */
  _take (x) {
    let [largest, squares, left] = [0, 0, 0]
    for (let at = 0; at < x.length; at++) largest = Math.max(largest, Math.abs(x[at]))
    const step = largest / this._most || 1
    for (let at = 0; at < x.length; at++) {
      const said = this._x[at] = Math.round(x[at] / step)
      squares += x[at] ** 2
      left += (x[at] - said * step) ** 2
    }
    return [step, Math.sqrt(squares), Math.sqrt(left)]
  }

  _sum () {
    const { _sums: sums, _values: values, _x: x } = this
    if (this._run !== undefined) {
      const [from, out] = [x.byteOffset, sums.byteOffset]
      this._run(0, from, out, out + sums.byteLength, from + x.byteLength)
      return
    }
    for (let row = 0, from = 0; row < sums.length; row++, from += x.length) {
      let sum = 0
      for (let at = 0; at < x.length; at++) sum += values[from + at] * x[at]
      sums[row] = sum
    }
  }

  _exactly (row, x) {
    const values = this._rows.at(row)
    let sum = 0
    for (let at = 0; at < x.length; at++) sum += values[at] * x[at]
    return sum
  }
}
