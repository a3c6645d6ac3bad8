// A chat in a terminal: `node chat.mjs LINK [--temperature 0.7] [--tokens 256]`, or the address of a peer in place of a link.
// Ctrl-C stops an answer, Ctrl-D ends the chat.
import { createInterface } from 'node:readline'
import { parseArgs } from 'node:util'
import { Client } from '../src/index.js'

const options = { temperature: { type: 'string', default: '0.7' }, tokens: { type: 'string', default: '256' } }
const { values, positionals: [given = ''] } = parseArgs({ options, allowPositionals: true })
const client = await Client.join(given.startsWith('/') ? { peers: [given] } : { link: given })
const model = await client.load()
const talk = model.conversation()
const messages = []
const lines = createInterface({ input: process.stdin, output: process.stderr, prompt: `${model.name}> ` })
let stopping = new AbortController()
lines.on('SIGINT', () => stopping.abort())
lines.prompt()
for await (const content of lines) {
  messages.push({ role: 'user', content })
  let answer = ''
  stopping = new AbortController()
  const asked = { temperature: Number(values.temperature), maxNewTokens: Number(values.tokens), signal: stopping.signal }
  try {
    for await (const { text } of talk.generate(model.prompt(messages), asked)) {
      answer += text
      process.stdout.write(text)
    }
  } catch (error) {
    if (!stopping.signal.aborted) console.error(error.message)
  }
  process.stdout.write('\n')
  messages.push({ role: 'assistant', content: answer })
  if (!lines.closed) lines.prompt() // where all came at once, the end has come as well
}
await talk.close()
await client.close()
