/** A client of specdec: exact speculative decoding over gRPC. README.md explains it. */

export { Chunk, acceptanceRate, tokensPerRound, tokensPerS, type Completion } from "./chunk.js";
export { Client, DEFAULT_ADDRESS, type ClientOptions } from "./client.js";
export * from "./errors.js";
export type { Retry } from "./retry.js";
export { Stream } from "./stream.js";
export type { TlsFiles } from "./tls.js";
export type * from "./values.js";
