// What the client computes: token embeddings, and final norm and head, in float32 (docs/protocol.md#a-client-step-by-step).
import { toFloats } from './floats.js'
import { Products, Rows } from './rows.js'

const TIED = { tie_word_embeddings: true }
// What a configuration of these types leaves out, as transformers has it.
const DEFAULTS = { mixtral: { rms_norm_eps: 1e-5 }, smollm3: TIED, gemma: TIED, gemma2: { ...TIED, final_logit_softcapping: 30 } }
const LLAMA_LIKE = new Set(['llama', 'mistral', 'mixtral', 'qwen2', 'qwen2_moe', 'qwen3', 'qwen3_moe', 'smollm3', 'granite', 'granitemoe', 'gemma', 'gemma2'])

/** Embeddings, final norm and head of models like Llama. */
export class Ends {
  constructor (config, embeddings, head) {
    const given = config.text_config ?? config
    if (!LLAMA_LIKE.has(given.model_type)) throw new Error(`models of the type ${given.model_type} are not computed by this client`)
    const text = { rms_norm_eps: 1e-6, ...DEFAULTS[given.model_type], ...given }
    const gguf = embeddings.form.startsWith('gguf')
    const named = (part, ...names) => part.tensors.find(tensor => names.includes(tensor.name))
    const rowsOf = tensor => tensor && new Rows(tensor, text.hidden_size)
    this.hidden = text.hidden_size
    this._embeddings = rowsOf(named(embeddings, 'embed_tokens.weight', 'token_embd.weight'))
    const norm = named(head, 'norm.weight', 'output_norm.weight')
    this._norm = norm && toFloats(norm.dtype, norm.data)
    const own = rowsOf(named(head, 'lm_head.weight', 'output.weight'))
    if (this._embeddings === undefined || this._norm?.length !== this.hidden) throw new Error('embeddings or norm are missing')
    // Tied heads have no tensor of their own, or one that counts for nothing.
    const isTied = own === undefined || (text.tie_word_embeddings && !gguf)
    this._head = new Products(isTied ? this._embeddings : own)
    this._epsilon = text.rms_norm_eps
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
      if (!(id >= 0 && id < this._embeddings.count)) throw new RangeError(`there is no token ${id}`)
      out.set(this._embeddings.at(id), row * this.hidden)
    })
    return this._scale === 1 ? out : out.map(value => value * this._scale)
  }

  /** The logits that follow the last token of the last block's output, until the next call: see `Products`. */
  logits (output) {
    const n = this.hidden
    const last = output.subarray(output.length - n)
    let squares = 0
    for (let at = 0; at < n; at++) squares += last[at] * last[at]
    const factor = 1 / Math.sqrt(squares / n + this._epsilon)
    const normed = new Float32Array(n)
    for (let at = 0; at < n; at++) normed[at] = Math.fround(last[at] * factor) * this._norm[at]
    const products = this._head.with(normed)
    if (this._divisor === 1 && this._cap === undefined) return products
    return products.map(product => {
      const value = product / this._divisor
      return this._cap === undefined ? value : this._cap * Math.tanh(value / this._cap)
    })
  }
}
