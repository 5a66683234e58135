/** When a call is repeated: jittered exponential pauses before a deadline. Clock and chance are handed in. */

import { OverloadedError, UnavailableError, type SpecdecError } from "./errors.js";

const FIRST_S = 0.1;
const MAXIMUM_S = 5;
const LEAST_S = 0.001; // long enough for the clock to move
const JITTER = 0.5; // the part of a pause that is random: callers that failed together do not return together
const MAX_EXPONENT = 64; // past it any pause has reached its maximum

/** A failure after which the client tries again: what the callback `onRetry` of a client gets. */
export interface Retry {
  readonly failure: SpecdecError;
  /** Undefined: of a call that is no stream, or before a stream's first chunk. */
  readonly sessionId: string | undefined;
  /** Seconds until the next attempt. */
  readonly pauseS: number;
  /** Seconds until the client gives up, if nothing arrives. */
  readonly leftS: number;
}

/** How long a call may take and how often it may fail; what it reads of the world. */
export interface Limits {
  readonly timeoutS: number;
  /** How long an address is tried on which no specdec server has ever answered. */
  readonly connectTimeoutS: number;
  /** Consecutive failures after which another attempt is made; undefined: as many as fit before the deadline. */
  readonly maxRetries?: number | undefined;
  /** A clock in seconds that never goes back. */
  readonly now?: () => number;
  /** A number in [0, 1). */
  readonly uniform?: () => number;
}

/** The attempts of one call under one deadline; a new chunk resets the pauses to the shortest. */
export class Attempts {
  readonly #limits: Limits;
  readonly #now: () => number;
  readonly #begin: number;
  #numFailures = 0;

  constructor(limits: Limits) {
    this.#limits = limits;
    this.#now = limits.now ?? (() => performance.now() / 1000);
    this.#begin = this.#now();
  }

  get timeoutS(): number {
    return this.#limits.timeoutS;
  }

  /** Seconds within which another attempt may begin; `isConnected`: a specdec server has answered on this address. */
  leftS(isConnected = true): number {
    return Math.max(0, this.#budgetS(isConnected) - this.#elapsedS());
  }

  /** Records that an attempt yielded a new chunk. */
  progress(): void {
    this.#numFailures = 0;
  }

  /** Returns the pause before the next attempt, or undefined to give up. */
  pauseS(failure: SpecdecError, isConnected: boolean): number | undefined {
    if (!failure.isRetryable || this.#numFailures >= (this.#limits.maxRetries ?? Infinity)) return undefined;
    const pauseS = Math.max(LEAST_S, retryAfterS(failure) + this.#backoffS());
    if (pauseS >= this.leftS(isConnected)) return undefined;
    this.#numFailures += 1;
    return pauseS;
  }

  /** The pause comes after the one that the server asked for, so that callers do not return all at once. */
  #backoffS(): number {
    const wholeS = Math.min(FIRST_S * 2 ** Math.min(this.#numFailures, MAX_EXPONENT), MAXIMUM_S);
    return wholeS * (1 - JITTER * (this.#limits.uniform ?? Math.random)());
  }

  #elapsedS(): number {
    return this.#now() - this.#begin;
  }

  #budgetS(isConnected: boolean): number {
    const { timeoutS, connectTimeoutS } = this.#limits;
    return isConnected ? timeoutS : Math.min(timeoutS, connectTimeoutS);
  }
}

function retryAfterS(failure: SpecdecError): number {
  const isLater = failure instanceof OverloadedError || failure instanceof UnavailableError;
  return (isLater ? failure.retryAfterS : undefined) ?? 0;
}
