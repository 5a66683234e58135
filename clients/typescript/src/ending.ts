/** What ends a call before its time: the caller's signal, leaving its stream, or closing the client. */

/** The reason of a stream that its reader has left. */
export const LEFT = Symbol("left");

/** A signal that the caller's signal sets off, and `end`. */
export class Ending {
  readonly signal: AbortSignal;
  readonly #own = new AbortController();

  constructor(outer: AbortSignal | undefined) {
    this.signal = outer ? AbortSignal.any([outer, this.#own.signal]) : this.#own.signal;
  }

  /** Ends the call; of several reasons the first counts. */
  end(reason: unknown): void {
    this.#own.abort(reason);
  }
}
