// Generates with clients/js. Its argument is JSON: `peers` or `link`, `prompt` (ids or text), `options` of generate, `wait`: a line
// on standard input before each token from that number on. Prints a JSON object for each token, and `done` at the end.
import { createInterface } from 'node:readline'
import { Client } from './src/index.js'

const { peers, link, swarmKey, prompt, options, wait } = JSON.parse(process.argv[2])
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const say = object => console.log(JSON.stringify(object))
const client = await Client.join({ peers, link, swarmKey })
const model = await client.load()
say({ event: 'loaded', name: model.name, version: model.version, blocks: model.numBlocks, peer: client.peerId })
const ids = []
let last = {}
for await (const token of model.generate(prompt, options)) {
  ids.push(token.id)
  last = token
  say({ event: 'token', ...token })
  if (ids.length === wait) await lines.next()
}
say({ event: 'done', ids, route: last.route, recoveries: last.recoveries, cheated: last.cheated })
await client.close()
process.exit(0)
