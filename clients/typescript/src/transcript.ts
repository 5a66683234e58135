/**
 * The tokens of one session that a client has seen, and the check that makes resuming safe: tokens that a server sends
 * again must be those that it sent before, and new ones must begin where those end.
 */

import type { Chunk } from "./chunk.js";
import { DataLossError } from "./errors.js";
import type { TokenOrigin } from "./values.js";

const NOTHING = new Uint8Array();

/** The tokens of one session that a client has seen, from `start` on. */
export class Transcript {
  readonly start: number;
  readonly tokens: number[] = [];
  readonly origins: TokenOrigin[] = [];
  sessionId: string;
  /** That the service sent the tokens up to `end`. */
  proof = NOTHING as Uint8Array;
  isFinished = false;
  /** At the end of each chunk. */
  readonly #digests = new Map<number, Uint8Array>();

  constructor(sessionId = "", start = 0, digest: Uint8Array = NOTHING) {
    this.sessionId = sessionId;
    this.start = start;
    if (digest.length) this.#digests.set(start, digest);
  }

  /** Completion tokens that the client has. */
  get end(): number {
    return this.start + this.tokens.length;
  }

  /** The digest at `end`; empty if it is not known. */
  get digest(): Uint8Array {
    return this.#digests.get(this.end) ?? NOTHING;
  }

  /** Returns the new part of a chunk, or undefined. Throws DataLossError if it contradicts what was seen. */
  admit(chunk: Chunk): Chunk | undefined {
    this.#check(chunk);
    const news = chunk.after(Math.min(Math.max(this.end, chunk.offset), chunk.end));
    this.sessionId = chunk.sessionId;
    this.#digests.set(chunk.end, chunk.digest);
    for (const token of news.tokens) this.tokens.push(token);
    for (const origin of news.origins) this.origins.push(origin);
    if (chunk.end === this.end) this.proof = chunk.proof;
    this.isFinished = chunk.finish !== undefined;
    return news.tokens.length || news.finish ? news : undefined;
  }

  #check(chunk: Chunk): void {
    if (this.sessionId && chunk.sessionId !== this.sessionId) {
      throw new DataLossError(`asked for session ${this.sessionId}, the server sent ${chunk.sessionId}`);
    }
    const where = `session ${chunk.sessionId}: the server sent the tokens from ${chunk.offset} to ${chunk.end}`;
    if (chunk.offset > this.end) {
      throw new DataLossError(`${where}, but the client has only ${this.end}; tokens are missing`);
    }
    const digest = this.#digests.get(chunk.end);
    if (digest && !areEqual(digest, chunk.digest)) {
      throw new DataLossError(`${where} again with another digest; the store holds other text than was shown`);
    }
    if (chunk.tokens.some((token, number) => this.#differs(chunk.offset + number, token))) {
      throw new DataLossError(`${where} again with other tokens; the store holds other text than was shown`);
    }
  }

  #differs(place: number, token: number): boolean {
    const known = place < this.start ? undefined : this.tokens[place - this.start];
    return known !== undefined && known !== token;
  }
}

function areEqual(one: Uint8Array, other: Uint8Array): boolean {
  return Buffer.compare(one, other) === 0;
}
