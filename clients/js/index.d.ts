/** What a link says; see docs/protocol.md#links. */
export interface Link {
  peers: string[]
  model: string
  /** Hexadecimal, the first bytes or all. */
  modelVersion: string
  /** Of a private swarm, 64 hexadecimal digits. */
  swarmKey?: string
}

/** Throws where the link is cut, altered or has ended. */
export function readLink (text: string, now?: number): Link

export interface JoinOptions {
  /** Multiaddrs with /p2p; browsers dial only those with /ws, and from a page that came by https only /tls/ws. */
  peers?: string[]
  link?: string
  swarmKey?: string
  /** More of libp2p's transports than TCP, WebSocket and relays: `webRTC()` of petalnode-client/webrtc. Private swarms have none. */
  transports?: unknown[]
  signal?: AbortSignal
}

export interface FoundModel {
  name: string
  version: string
  numBlocks: number
  servers: Array<{ peer: string, blocks: [number, number], online: boolean }>
  /** Blocks that no server holds. */
  missing: number[]
}

export interface Progress { part: number, bytes: number, of: number }

export class Client {
  static join (options: JoinOptions): Promise<Client>
  readonly peerId: string
  /** What the link means. */
  readonly wanted: { model?: string, version?: string }
  /** Those of a name, and a version that begins so; or all. */
  models (of?: { model?: string, version?: string }): Promise<FoundModel[]>
  /** How bytes to a peer travel; null where it is not connected. */
  pathTo (peer: string): 'direct' | 'relay' | null
  /** By name or the first digits of the version; else the link's, or the only one. Everything is checked against the version. */
  load (options?: { model?: string, version?: string, onProgress?: (progress: Progress) => void, signal?: AbortSignal }): Promise<Model>
  close (): Promise<void>
}

export interface GenerateOptions {
  maxNewTokens?: number
  /** 0, the default, is greedy. */
  temperature?: number
  topK?: number
  topP?: number
  seed?: number
  /** Tokens that end the answer; the model's by default. */
  stopIds?: number[]
  /** Tokens that stand in the text already are tried in one step (prompt look-up); the answer is the same. On by default. */
  drafts?: boolean
  signal?: AbortSignal
  /** Which server is missed in the middle of an answer, while others for its blocks are looked for. */
  onWaiting?: (missed: { peer: string, blocks: [number, number], reason: string }) => void
}

export interface Token {
  id: number
  /** What is new of the answer's text; empty where a letter is not complete. */
  text: string
  /** `relayed`: not directly, as servers behind NAT are reached. `ms` of the last step; bytes of tensors each way. */
  route: Array<{ peer: string, blocks: [number, number], relayed: boolean, ms: number, sent: number, received: number }>
  /** Servers that were replaced so far. */
  recoveries: number
  /** Servers that signed something else than what they were asked and answered. */
  cheated: string[]
}

export class Model {
  readonly name: string
  readonly version: string
  readonly numBlocks: number
  readonly config: Record<string, unknown>
  readonly endIds: number[]
  /** By the model's chat template; throws where it does not take these messages. */
  prompt (messages: Array<{ role: string, content: string }>): number[]
  generate (prompt: string | Iterable<number>, options?: GenerateOptions): AsyncGenerator<Token, void, void>
  /** Answers that go on from each other. */
  conversation (): Conversation
}

/** What servers hold already of a prompt is not sent again. One answer at a time. */
export class Conversation {
  /** The prompt is the whole text so far. */
  generate (prompt: string | Iterable<number>, options?: GenerateOptions): AsyncGenerator<Token, void, void>
  close (): Promise<void>
}

/** A server signed something else than what it was asked and answered. */
export class Cheated extends Error {}

/** A peer answered with an error of the protocol. */
export class Refused extends Error {
  readonly code: number
}
