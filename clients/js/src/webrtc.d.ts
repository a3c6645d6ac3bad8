/** A transport for `Client.join({ transports: [webRTC()] })`; the package @libp2p/webrtc has to be installed beside. */
export function webRTC (): unknown
