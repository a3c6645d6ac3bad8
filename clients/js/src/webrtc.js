// WebRTC-direct, by which a page that came by https reaches a server that has no domain. It needs @libp2p/webrtc beside this package.
import { webRTCDirect } from '@libp2p/webrtc'

const FIRST = 'libp2p+webrtc+v1/'
const SECOND = 'libp2p+webrtc+v2/'

/**
 * js-libp2p 3.3 speaks the first version, which changes the credentials in a browser's offer. Browsers are about to forbid that. Where one does,
 * its offer stays as it is, and the answer carries its password, which is the second version.
 */
const withSecondVersion = Peer => class extends Peer {
  #offer
  #password

  async createOffer (...options) {
    this.#offer = await super.createOffer(...options)
    return { type: this.#offer.type, sdp: this.#offer.sdp }
  }

  async setLocalDescription (description) {
    try {
      await super.setLocalDescription(description)
    } catch (error) {
      if (!description?.sdp?.includes(FIRST)) throw error
      await super.setLocalDescription(this.#offer)
      this.#password = /^a=ice-pwd:(\S+)/m.exec(this.#offer.sdp)[1]
    }
  }

  async setRemoteDescription ({ type, sdp }) {
    if (this.#password !== undefined) sdp = sdp.replace(/^(a=ice-(ufrag|pwd)):.*$/gm, `$1:${SECOND}${this.#password}`)
    await super.setRemoteDescription({ type, sdp })
  }
}

let wrapped

/** A transport for `Client.join`. */
export function webRTC () {
  const { RTCPeerConnection } = globalThis // Node has none: the package brings its own
  if (RTCPeerConnection !== undefined && RTCPeerConnection !== wrapped) globalThis.RTCPeerConnection = wrapped = withSecondVersion(RTCPeerConnection)
  return webRTCDirect()
}
