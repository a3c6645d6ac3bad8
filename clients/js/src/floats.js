// Values of safetensors' and GGUF's kinds, as float32.

const BYTES = { F32: 4, F16: 2, BF16: 2, Q8_0: 34 / 32, Q4_0: 18 / 32, Q4_1: 20 / 32 }

/** Bytes of a value; those of GGUF's kinds come in blocks of 32. Throws on kinds that are not read here. */
export function bytesOf (dtype) {
  if (BYTES[dtype] === undefined) throw new Error(`weights of the kind ${dtype} are not read by this client`)
  return BYTES[dtype]
}

/** IEEE half precision. */
export function halfToFloat (bits) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, bits >> 10 & 31, bits & 1023]
  if (exponent === 0) return sign * fraction * 2 ** -24
  return exponent === 31 ? (fraction ? NaN : sign * Infinity) : sign * (1 + fraction / 1024) * 2 ** (exponent - 15)
}

let halves
function halfTable () {
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => halfToFloat(bits))
  return halves
}

/** The values that the bytes are. */
export function toFloats (dtype, data) {
  if (dtype === 'F32') return new Float32Array(data.slice().buffer)
  const out = new Float32Array(data.length / bytesOf(dtype))
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  const half = halfTable()
  if (dtype === 'F16') {
    for (let at = 0; at < out.length; at++) out[at] = half[view.getUint16(2 * at, true)]
    return out
  }
  if (dtype === 'BF16') {
    const bits = new Uint32Array(out.buffer)
    for (let at = 0; at < bits.length; at++) bits[at] = view.getUint16(2 * at, true) << 16
    return out
  }
  const block = 32 * bytesOf(dtype)
  for (let from = 0, to = 0; from < data.length; from += block, to += 32) {
    const scale = half[view.getUint16(from, true)]
    if (dtype === 'Q8_0') {
      for (let at = 0; at < 32; at++) out[to + at] = scale * view.getInt8(from + 2 + at)
      continue
    }
    const [middle, least, first] = dtype === 'Q4_0' ? [8, 0, from + 2] : [0, half[view.getUint16(from + 2, true)], from + 4]
    for (let at = 0; at < 16; at++) {
      const byte = data[first + at]
      out[to + at] = Math.fround(scale * ((byte & 15) - middle)) + least
      out[to + 16 + at] = Math.fround(scale * ((byte >> 4) - middle)) + least
    }
  }
  return out
}
