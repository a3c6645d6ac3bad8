// The whole of a page that generates by a link: `npx esbuild page.js --bundle --minify --outfile=dist/page.js`, beside page.html.
import { Client } from '../src/index.js'

const of = id => document.getElementById(id)
let model

function say (text) {
  of('state').textContent = text
}

async function load () {
  const given = of('link').value.trim()
  say('joining ...')
  const client = await Client.join(given.startsWith('petalnode:') ? { link: given } : { peers: [given] })
  say('fetching ...')
  return await client.load({ onProgress: ({ bytes, of: all }) => say(`fetching, ${Math.round(100 * bytes / all)} %`) })
}

of('link').value = decodeURIComponent(location.hash.slice(1))
of('go').onclick = async () => {
  const stopping = new AbortController()
  of('stop').onclick = () => stopping.abort()
  of('go').disabled = true
  of('stop').disabled = false
  of('answer').textContent = ''
  try {
    model ??= await load()
    for await (const { text, route, recoveries } of model.generate(of('prompt').value, { maxNewTokens: 128, signal: stopping.signal })) {
      of('answer').textContent += text
      say(`through ${route.map(hop => `…${hop.peer.slice(-8)} (${hop.blocks.join(':')})`).join(', ')}${recoveries ? `; ${recoveries} replaced` : ''}`)
    }
    of('answer').dataset.done = 'yes'
  } catch (error) {
    say(stopping.signal.aborted ? 'stopped' : error.message)
    of('answer').dataset.failed = error.message
  }
  of('go').disabled = false
  of('stop').disabled = true
}
