/** The stream of one session's chunks, as the client returns it. */

import { completionOf, type Chunk, type Completion } from "./chunk.js";
import { LEFT, type Ending } from "./ending.js";
import type { Transcript } from "./transcript.js";

/**
 * The chunks of one session as they are committed; the last one has `finish`.
 *
 * The call begins with the first iteration. Leaving a `for await` loop, however it is left, ends the call at once; the
 * session stays in the store and can be resumed. Iterating throws the service's errors (`SpecdecError`), DataLossError
 * if the server contradicts what it sent before, and the reason of the caller's signal.
 */
export class Stream implements AsyncIterableIterator<Chunk, undefined> {
  readonly #generator: AsyncGenerator<Chunk, void, undefined>;
  readonly #seen: Transcript;
  readonly #ending: Ending;
  readonly #cancelSession: (sessionId: string) => Promise<unknown>;
  readonly #chunks: Chunk[] = [];

  constructor(
    generator: AsyncGenerator<Chunk, void, undefined>,
    seen: Transcript,
    ending: Ending,
    cancelSession: (sessionId: string) => Promise<unknown>,
  ) {
    this.#generator = generator;
    this.#seen = seen;
    this.#ending = ending;
    this.#cancelSession = cancelSession;
  }

  /** The session's id; undefined before the first chunk of a new session. */
  get sessionId(): string | undefined {
    return this.#seen.sessionId || undefined;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Returns the next chunk. */
  async next(): Promise<IteratorResult<Chunk, undefined>> {
    try {
      if (!this.#seen.isFinished) this.#ending.signal.throwIfAborted();
      const { value } = await this.#generator.next();
      if (!value) return { done: true, value: undefined };
      this.#chunks.push(value);
      return { done: false, value };
    } catch (error) {
      if (error === LEFT) return { done: true, value: undefined };
      throw error;
    }
  }

  /** Ends the call; `for await` calls it when the loop is left. */
  async return(): Promise<IteratorResult<Chunk, undefined>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /**
   * Reads the rest and returns the whole: all chunks of this stream, also those that were read by `next` before.
   * Throws what iterating throws; Error if the stream was left before the session finished.
   */
  async result(): Promise<Completion> {
    while (!(await this.next()).done);
    return completionOf(this.#chunks);
  }

  /**
   * Ends the session: what was committed stays readable, and the stream ends with the finish reason "cancelled".
   * Before the first chunk, while the session's id is unknown, this is `close`.
   */
  async cancel(): Promise<void> {
    if (this.sessionId === undefined) await this.close();
    else await this.#cancelSession(this.sessionId);
  }

  /** Ends the call, also while `next` waits; the session stays in the store and can be resumed. */
  async close(): Promise<void> {
    this.#ending.end(LEFT);
    await this.#generator.return();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
