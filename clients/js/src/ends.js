// What the client computes: token embeddings, and final norm and head, in float32 (docs/protocol.md#a-client-step-by-step).
import { Rows } from './rows.js'

const LLAMA_LIKE = new Set(['llama', 'mistral', 'mixtral', 'qwen2', 'qwen2_moe', 'qwen3', 'qwen3_moe', 'smollm3', 'granite', 'granitemoe', 'gemma', 'gemma2'])

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

/** The values of a tensor of safetensors' or GGUF's kinds, as float32. */
export function toFloats (dtype, data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  const half = halfTable()
  if (dtype === 'F32') return new Float32Array(data.slice().buffer)
  if (dtype === 'F16') return Float32Array.from({ length: data.length / 2 }, (_, at) => half[view.getUint16(2 * at, true)])
  if (dtype === 'BF16') {
    const bits = new Uint32Array(data.length / 2)
    for (let at = 0; at < bits.length; at++) bits[at] = view.getUint16(2 * at, true) << 16
    return new Float32Array(bits.buffer)
  }
  const block = { Q8_0: 34, Q4_0: 18, Q4_1: 20 }[dtype]
  if (block === undefined) throw new Error(`weights of the kind ${dtype} are not read by this client`)
  const out = new Float32Array(data.length / block * 32)
  for (let number = 0; number * block < data.length; number++) {
    const from = number * block
    const scale = half[view.getUint16(from, true)]
    for (let at = 0; at < 32; at++) {
      let value
      if (dtype === 'Q8_0') value = scale * view.getInt8(from + 2 + at)
      else {
        const byte = data[from + (dtype === 'Q4_0' ? 2 : 4) + at % 16]
        const nibble = at < 16 ? byte & 15 : byte >> 4
        value = dtype === 'Q4_0' ? scale * (nibble - 8) : Math.fround(scale * nibble) + half[view.getUint16(from + 2, true)]
      }
      out[number * 32 + at] = value
    }
  }
  return out
}

/** Embeddings, final norm and head of models like Llama. */
export class Ends {
  constructor (config, embeddings, head) {
    const text = config.text_config ?? config
    if (!LLAMA_LIKE.has(text.model_type)) throw new Error(`models of the type ${text.model_type} are not computed by this client`)
    const gguf = embeddings.form.startsWith('gguf')
    const named = (part, ...names) => part.tensors.find(tensor => names.includes(tensor.name))
    const floats = tensor => tensor && toFloats(tensor.dtype, tensor.data)
    this.hidden = text.hidden_size
    this._embed = floats(named(embeddings, 'embed_tokens.weight', 'token_embd.weight'))
    this._norm = floats(named(head, 'norm.weight', 'output_norm.weight'))
    const own = named(head, 'lm_head.weight', 'output.weight')
    if (this._embed === undefined || this._norm?.length !== this.hidden) throw new Error('embeddings or norm are missing')
    // Tied heads have no tensor of their own, or one that counts for nothing.
    const isTied = own === undefined || (text.tie_word_embeddings && !gguf)
    this._head = new Rows(isTied ? this._embed : floats(own), this.hidden)
    if (isTied) this._embed = this._head.values
    this.vocabulary = this._head.count
    this._epsilon = text.rms_norm_eps ?? 1e-6
    const isGemma = text.model_type.startsWith('gemma')
    if (isGemma && !gguf) this._norm = this._norm.map(weight => 1 + weight)
    this._scale = isGemma ? Math.fround(Math.sqrt(this.hidden)) : text.embedding_multiplier ?? 1
    this._divisor = text.logits_scaling ?? 1
    this._cap = text.final_logit_softcapping ?? undefined
  }

  /** [tokens, hidden], row by row. */
  embed (ids) {
    const out = new Float32Array(ids.length * this.hidden)
    ids.forEach((id, row) => {
      if (!(id >= 0 && (id + 1) * this.hidden <= this._embed.length)) throw new RangeError(`there is no token ${id}`)
      out.set(this._embed.subarray(id * this.hidden, (id + 1) * this.hidden), row * this.hidden)
    })
    return this._scale === 1 ? out : out.map(value => value * this._scale)
  }

  /** The logits that follow the last token of the last block's output, until the next call. */
  logits (output) {
    const n = this.hidden
    const last = output.subarray(output.length - n)
    let squares = 0
    for (let at = 0; at < n; at++) squares += last[at] * last[at]
    const factor = 1 / Math.sqrt(squares / n + this._epsilon)
    const normed = new Float32Array(n)
    for (let at = 0; at < n; at++) normed[at] = Math.fround(last[at] * factor) * this._norm[at]
    const products = this._head.times(normed)
    if (this._divisor === 1 && this._cap === undefined) return products
    return products.map(product => {
      const value = product / this._divisor
      return this._cap === undefined ? value : this._cap * Math.tanh(value / this._cap)
    })
  }
}
