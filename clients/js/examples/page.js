// The whole of a page that generates by a link: `npx esbuild page.js --bundle --minify --outfile=dist/page.js`, beside page.html.
import { Client } from '../src/index.js'
import { webRTC } from '../src/webrtc.js'

const of = id => document.getElementById(id)
let model

function say (text) {
  of('state').textContent = text
}

async function load () {
  const given = of('link').value.trim()
  say('joining ...')
  const client = await Client.join({ ...given.startsWith('petalnode:') ? { link: given } : { peers: [given] }, transports: [webRTC()] })
  say('fetching ...')
  return await client.load({ onProgress: ({ bytes, of: all }) => say(`fetching, ${Math.round(100 * bytes / all)} %`) })
}

function show ({ route, recoveries, cheated }) {
  of('route').hidden = false
  of('route').tBodies[0].replaceChildren(...route.map(hop => {
    const row = document.createElement('tr')
    for (const text of [hop.blocks.join(':'), hop.peer, hop.relayed ? 'through a relay' : 'direct']) row.insertCell().textContent = text
    return row
  }))
  of('notes').textContent = [
    recoveries ? `${recoveries} servers were replaced.` : '',
    ...cheated.map(peer => `${peer} signed something else than what it was asked and answered: it is not used any more.`)
  ].join(' ')
}

of('link').value = decodeURIComponent(location.hash.slice(1))
of('go').onclick = async () => {
  const stopping = new AbortController()
  const answer = of('answer')
  of('stop').onclick = () => stopping.abort()
  of('go').disabled = true
  of('stop').disabled = false
  answer.textContent = ''
  for (const name of Object.keys(answer.dataset)) delete answer.dataset[name]
  try {
    model ??= await load()
    const begun = performance.now()
    let [count, first] = [0, 0]
    const options = { maxNewTokens: Number(of('count').value), drafts: of('drafts').checked, signal: stopping.signal }
    for await (const token of model.generate(of('prompt').value, options)) {
      if (++count === 1) first = performance.now()
      answer.textContent += token.text
      const each = count > 1 ? `, ${((performance.now() - first) / (count - 1)).toFixed(1)} ms a token` : ''
      say(`${count} tokens, the first after ${((first - begun) / 1000).toFixed(2)} s${each}`)
      show(token)
      Object.assign(answer.dataset, { count, first: first - begun, rest: performance.now() - first, cheated: token.cheated.join(' ') })
      answer.dataset.route = token.route.map(hop => hop.peer).join(' ')
    }
    answer.dataset.done = 'yes'
  } catch (error) {
    say(stopping.signal.aborted ? 'stopped' : error.message)
    answer.dataset.failed = error.message
  }
  of('go').disabled = false
  of('stop').disabled = true
}
