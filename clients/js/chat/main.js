// The chat page of `petalnode api` over this client in the place of the API. `npm run chat` makes it, for any static host; a link may
// stand behind its `#`.
import '../../../node/web/static/page.js'
import { saveKey } from '../../../node/web/static/storage.js'
import { SwarmSource } from './source.js'

const link = location.hash.slice(1)
if (link.startsWith('petalnode:') || link.startsWith('/')) {
  saveKey(link, false)
  history.replaceState(null, '', '#chat') // it may have the key of a swarm
}
const page = document.createElement('pn-page')
page.client = new SwarmSource(() => page.key, text => page.tell(text))
document.body.append(page)
