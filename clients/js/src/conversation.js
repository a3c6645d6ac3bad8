// Answers over one session: what servers hold already of a prompt is not sent again, and tokens that stand in the text are tried as drafts.
import { choose, numbers } from './sampling.js'
import { Session } from './session.js'

export const MOST_NEW = 256 // tokens of an answer, if nothing else is asked for
const LENGTH = 2048 // tokens that a conversation reserves at first
const FIRST_DRAFT = 3 // tokens
const LONGEST_DRAFT = 8
const MATCH = [3, 2] // tokens that have to be the same for a look-up, the longer the better
const WINDOW = 32 // tokens of an answer that are decoded at once, at most

/** What followed the last time that the newest tokens stood in the text, `most` tokens at most; prompt look-up decoding. */
export function lookUp (ids, most) {
  for (const size of MATCH) {
    for (let at = ids.length - size - 1; at >= 0; at--) {
      let same = 0
      while (same < size && ids[at + same] === ids[ids.length - size + same]) same++
      if (same === size) return ids.slice(at + size, at + size + most)
    }
  }
  return []
}

/** The text of tokens that come one at a time. What it costs does not grow with the answer. */
export class Text {
  constructor (tokenizer) {
    this._tokenizer = tokenizer
    this._ids = []
    this._told = this._half = 0 // of these, how many have had their text; and a number of them that is whole letters
  }

  /** What is new; empty where a letter is not complete, since its bytes may come in several tokens. */
  next (id) {
    this._ids.push(id)
    const whole = this._decoded(this._ids)
    if (whole.endsWith('\ufffd')) return ''
    const text = whole.slice(this._decoded(this._ids.slice(0, this._told)).length)
    this._told = this._ids.length
    if (this._told < WINDOW / 2 || this._half === 0) this._half = this._told
    if (this._told >= WINDOW) {
      this._ids.splice(0, this._half)
      this._told -= this._half
      this._half = 0
    }
    return text
  }

  _decoded (ids) {
    if (ids.length === 0) return ''
    return this._tokenizer?.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false }) ?? ''
  }
}

/** Not for two answers at the same time. */
export class Conversation {
  constructor (client, model, maxLength = LENGTH) {
    this._client = client
    this._model = model
    this._maxLength = maxLength
    this._held = [] // ids whose hidden states the servers of the session have
  }

  /** A session that holds a beginning of `ids`, with room for `length` tokens. */
  async _opened (ids, length) {
    if (this._session === undefined || length > this._maxLength) {
      await this.close()
      const servers = await this._client.servers(this._model.version)
      const most = Math.min(...servers.map(({ maxSessionLength }) => maxSessionLength || Infinity))
      const wanted = length > this._maxLength ? 2 * length : this._maxLength
      this._maxLength = Math.max(length, Math.min(wanted, most))
      this._session = new Session(this._client, this._model, this._maxLength)
    }
    let same = 0
    while (same < this._held.length && same < ids.length - 1 && this._held[same] === ids[same]) same++
    this._goBack(same)
    return this._session
  }

  _goBack (tokens) {
    if (tokens === this._held.length) return
    this._held.length = tokens
    this._session.goBack(tokens)
  }

  /** As `Model.generate`; the prompt is the whole text so far. */
  async * generate (prompt, { maxNewTokens = MOST_NEW, seed, stopIds = this._model.endIds, drafts = true, signal, onWaiting, ...sampling } = {}) {
    const { ends, tokenizer } = this._model
    const ids = typeof prompt === 'string' ? tokenizer.encode(prompt).ids : Array.from(prompt)
    if (ids.length === 0) throw new Error('there is nothing to go on from')
    const random = seed === undefined || seed === null ? Math.random : numbers(seed)
    const before = ids.length
    const session = await this._opened(ids, before + maxNewTokens)
    session.onWaiting = onWaiting
    const [recovered, cheated] = [session.recoveries, session.cheated.length] // of answers before
    let longest = FIRST_DRAFT
    const answer = new Text(tokenizer)
    try {
      for (let id; maxNewTokens > 0;) {
        const left = before + maxNewTokens - ids.length - 1
        const draft = drafts && id !== undefined ? lookUp(ids, Math.min(longest, left)) : []
        const sent = [...ids.slice(this._held.length), ...draft]
        const output = await session.forward(ends.embed(sent), signal)
        this._held.push(...sent)
        for (let right = 0; right <= draft.length; right++) {
          const end = output.length - (draft.length - right) * ends.hidden
          id = choose(ends.logits(output.subarray(0, end)), sampling, random)
          if (stopIds.includes(id)) return
          ids.push(id)
          yield { id, text: answer.next(id), route: session.route, recoveries: session.recoveries - recovered, cheated: session.cheated.slice(cheated) }
          if (ids.length - before === maxNewTokens) return
          if (id !== draft[right]) {
            if (draft.length > 0) longest = right === draft.length ? Math.min(longest + 1, LONGEST_DRAFT) : Math.max(right, 1)
            break
          }
        }
        this._goBack(Math.min(this._held.length, ids.length - 1))
      }
    } catch (error) {
      await this.close() // what the servers hold is not known
      throw error
    }
  }

  async close () {
    const session = this._session
    this._session = undefined
    this._held = []
    await session?.close()
  }
}
