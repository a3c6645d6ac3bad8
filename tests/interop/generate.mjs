// Generates with clients/js. Its argument is JSON: `peers` or `link`, `prompt` (ids or text), `options` of generate, `webrtc`: it dials by that too, `wait`: a line
// on standard input before each token from that number on; or `times`: so many answers, each once a line says how many tokens it shall
// have; `jump`: milliseconds by which the clock is put forward after the first token. Prints a JSON object for each token, and `done` at the end
// of an answer; `at` is when each token came, in milliseconds.
import { createInterface } from 'node:readline'
import { Client } from './src/index.js'

const { peers, link, swarmKey, webrtc, prompt, options, wait, times = 1, jump } = JSON.parse(process.argv[2])
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const say = object => console.log(JSON.stringify(object))
const transports = webrtc ? [(await import('./src/webrtc.js')).webRTC()] : []
const client = await Client.join({ peers, link, swarmKey, transports })
const model = await client.load()
say({ event: 'loaded', name: model.name, version: model.version, blocks: model.numBlocks, peer: client.peerId })
for (let time = 0; time < times; time++) {
  const maxNewTokens = times === 1 ? options.maxNewTokens : Number((await lines.next()).value ?? process.exit(0))
  const [ids, at, begun] = [[], [], performance.now()]
  let last = {}
  for await (const token of model.generate(prompt, { ...options, maxNewTokens })) {
    ids.push(token.id)
    at.push(performance.now() - begun)
    last = token
    say({ event: 'token', ...token })
    if (ids.length === wait) await lines.next()
    if (ids.length === 1 && jump) Date.now = (now => () => now() + jump)(Date.now)
  }
  say({ event: 'done', ids, at, route: last.route, recoveries: last.recoveries, cheated: last.cheated })
}
await client.close()
process.exit(0)
