// Links into a swarm (docs/protocol.md#links).
import { multiaddr } from '@multiformats/multiaddr'
import { base32 } from 'multiformats/bases/base32'
import { hex, isSigned } from './canonical.js'
import { INVITE, decode } from './wire.js'

/** What a link says: { peers, model, modelVersion (hexadecimal), swarmKey }. Throws where it is cut, altered or has ended. */
export function readLink (text, now = Date.now()) {
  const plain = text.replace(/\s/g, '').toLowerCase()
  if (text.length > 4096 || !plain.startsWith('petalnode:')) throw new Error('this is no link: they begin with petalnode:')
  let data
  try {
    data = base32.baseDecode(plain.slice('petalnode:'.length))
  } catch {
    throw new Error('this link has signs that no link has')
  }
  const size = data[1] << 8 | data[2]
  if (data[0] > 1) throw new Error('this link is of a newer petalnode')
  if (data[0] !== 1 || data.length !== 3 + size + 64) throw new Error('this link is cut, or something was added to it')
  const body = data.subarray(3, 3 + size)
  const invite = decode(INVITE, body)
  if (!isSigned(invite.maker, 'petalnode/invite/1', body, data.subarray(3 + size))) throw new Error('this link was altered')
  if (invite.expires * 1000 <= now) throw new Error('this link has ended')
  if (invite.addrs.length < 1 || invite.addrs.length > 4) throw new Error('this link names no peers')
  return {
    peers: invite.addrs.map(addr => multiaddr(addr).toString()),
    model: invite.model,
    modelVersion: hex(invite.modelVersion),
    swarmKey: invite.swarmKey.length === 32 ? hex(invite.swarmKey) : undefined
  }
}
