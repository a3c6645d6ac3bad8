import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'

export const transports = () => [tcp(), webSockets()]
