// A matrix times a vector in float32, by WebAssembly's SIMD where there is one. The module is put together here: it has one function.

const LANES = 16 // values of a turn of the inner loop
const PAGE = 65536

const [I32, V128, VOID] = [0x7f, 0x7b, 0x40]
const get = local => [0x20, local]
const set = local => [0x21, local]
const tee = local => [0x22, local]
const add = size => [0x41, ...size === 64 ? [0xc0, 0x00] : [size], 0x6a] // i32.const, i32.add
const loop = body => [0x03, VOID, ...body, 0x0b]
const again = [0x49, 0x0d, 0x00] // i32.lt_u, br_if 0
const load = offset => [0xfd, 0x00, 0x04, offset] // v128.load
const [MUL, SUM] = [[0xfd, 0xe6, 0x01], [0xfd, 0xe4, 0x01]] // f32x4.mul, f32x4.add
const lane = number => [0xfd, 0x1f, number]
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
    ...sums.flatMap((sum, number) => [...get(sum), ...get(row), ...load(16 * number), ...get(at), ...load(16 * number), ...MUL, ...SUM, ...set(sum)]),
    ...get(row), ...add(64), ...set(row), ...get(at), ...add(64), ...tee(at), ...get(xEnd), ...again
  ])
  const [a, b, c, d] = sums
  const outer = loop([
    ...sums.flatMap(sum => [...get(zero), ...set(sum)]), ...get(x), ...set(at), ...inner,
    ...get(out), ...get(a), ...get(b), ...SUM, ...get(c), ...get(d), ...SUM, ...SUM, ...set(a),
    ...get(a), ...lane(0), ...[1, 2, 3].flatMap(number => [...get(a), ...lane(number), 0x92]), 0x38, 0x02, 0x00, // f32.add, f32.store
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

/** Rows of `width` values each, one behind the other in `values`. */
export class Rows {
  constructor (values, width) {
    this.width = width
    this.count = values.length / width
    this.values = values
    if (width % LANES !== 0) return
    try {
      const size = 4 * (values.length + width + this.count)
      const memory = new WebAssembly.Memory({ initial: Math.ceil(size / PAGE) })
      this._run = new WebAssembly.Instance(new WebAssembly.Module(code()), { e: { m: memory } }).exports.f
      this.values = new Float32Array(memory.buffer, 0, values.length)
      this.values.set(values)
      this._x = new Float32Array(memory.buffer, 4 * values.length, width)
      this._out = new Float32Array(memory.buffer, 4 * (values.length + width), this.count)
    } catch {
      this._run = undefined // no SIMD here, or no memory of this size: plain JavaScript
    }
  }

  /** The product of each row with `x`; the array is used again by the next call. */
  times (x) {
    if (this._run === undefined) return this._plainly(x)
    this._x.set(x)
    const [from, out] = [this._x.byteOffset, this._out.byteOffset]
    this._run(0, from, out, out + this._out.byteLength, from + this._x.byteLength)
    return this._out
  }

  _plainly (x) {
    const out = new Float32Array(this.count)
    for (let row = 0, from = 0; row < this.count; row++, from += this.width) {
      let sum = 0
      for (let at = 0; at < this.width; at++) sum += this.values[from + at] * x[at]
      out[row] = sum
    }
    return out
  }
}
