/** What one round committed, and the completion that chunks add up to. */

import type { Finish, FinishReason, RoundDraft, Statistics, TokenLogprobs, TokenOrigin, Usage } from "./values.js";

/** The fields of a chunk. */
export interface ChunkFields {
  readonly sessionId: string;
  /** Completion tokens before this chunk. */
  readonly offset: number;
  readonly tokens: readonly number[];
  readonly text: string;
  /** One a token. */
  readonly origins: readonly TokenOrigin[];
  /** Hash chain over prompt and completion up to this chunk's end; 16 bytes. */
  readonly digest: Uint8Array;
  /** One a token if the request set numLogprobs, else empty. */
  readonly logprobs: readonly TokenLogprobs[];
  /** One a token: where its certain text ends within `text`, as `text.slice` counts. */
  readonly textEnds: readonly number[];
  /** Only in the last chunk. */
  readonly finish: Finish | undefined;
  /** That the service sent the text up to this chunk's end. */
  readonly proof: Uint8Array;
  /** The rounds that end in this chunk; none for tokens that were read from the store. */
  readonly rounds: readonly RoundDraft[];
}

export interface Chunk extends ChunkFields {}

/** What one round committed. */
export class Chunk {
  constructor(fields: ChunkFields) {
    Object.assign(this, fields);
  }

  /** Completion tokens up to the end of this chunk. */
  get end(): number {
    return this.offset + this.tokens.length;
  }

  /** Each token's part of `text`, then what became certain only with the end. */
  get pieces(): string[] {
    const ends = [...this.textEnds, this.text.length];
    return ends.map((end, number) => this.text.slice(ends[number - 1] ?? 0, end));
  }

  /** Returns the part from `offset` on, which lies within the chunk. */
  after(offset: number): Chunk {
    const count = offset - this.offset;
    const cut = this.textEnds[count - 1] ?? 0;
    return new Chunk({
      ...this,
      offset,
      tokens: this.tokens.slice(count),
      text: this.text.slice(cut),
      origins: this.origins.slice(count),
      logprobs: this.logprobs.slice(count),
      textEnds: this.textEnds.slice(count).map((end) => end - cut),
      rounds: this.rounds.filter((round) => round.end > offset),
    });
  }
}

/** The chunks of a finished session together, from the first one that the stream yielded. */
export interface Completion {
  readonly sessionId: string;
  readonly tokens: readonly number[];
  readonly text: string;
  readonly origins: readonly TokenOrigin[];
  /** One a token if the request set numLogprobs, else empty. */
  readonly logprobs: readonly TokenLogprobs[];
  readonly digest: Uint8Array;
  readonly finishReason: FinishReason;
  readonly usage: Usage;
  readonly statistics: Statistics;
  /** As far as the chunks told of them. */
  readonly rounds: readonly RoundDraft[];
}

/** Joins the chunks of a finished session. Throws Error if the last one has no `finish`. */
export function completionOf(chunks: readonly Chunk[]): Completion {
  const last = chunks.at(-1);
  if (!last?.finish) throw new Error(`the session has not finished: none of ${chunks.length} chunks has finish`);
  return {
    sessionId: last.sessionId,
    tokens: chunks.flatMap((chunk) => chunk.tokens),
    text: chunks.map((chunk) => chunk.text).join(""),
    origins: chunks.flatMap((chunk) => chunk.origins),
    logprobs: chunks.flatMap((chunk) => chunk.logprobs),
    digest: last.digest,
    finishReason: last.finish.reason,
    usage: last.finish.usage,
    statistics: last.finish.statistics,
    rounds: chunks.flatMap((chunk) => chunk.rounds),
  };
}

/** Returns accepted / drafted; 0 if nothing was drafted. */
export function acceptanceRate(statistics: Statistics): number {
  return ratio(statistics.numAcceptedTokens, statistics.numDraftTokens);
}

/** Returns committed / rounds, the closing token included. */
export function tokensPerRound(statistics: Statistics): number {
  return ratio(statistics.numTokens, statistics.numRounds);
}

/** Returns committed tokens a second. */
export function tokensPerS(statistics: Statistics): number {
  return ratio(statistics.numTokens, statistics.totalS);
}

function ratio(part: number, whole: number): number {
  return whole ? part / whole : 0;
}
