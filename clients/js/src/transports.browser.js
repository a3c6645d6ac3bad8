import { webSockets } from '@libp2p/websockets'

export const transports = () => [webSockets()]
