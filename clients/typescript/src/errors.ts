/**
 * The errors of specdec, and the one table between them and gRPC's status codes.
 *
 *     SpecdecError                 sent as (reason)                          also: codes of others that mean it
 *     ├── InvalidArgumentError     INVALID_ARGUMENT                          OUT_OF_RANGE
 *     ├── NotFoundError            NOT_FOUND (SESSION_NOT_FOUND)
 *     ├── AlreadyExistsError       ALREADY_EXISTS (REQUEST_ID_REUSED)
 *     ├── FencedError              ABORTED (SESSION_FENCED)
 *     ├── ModelMismatchError       FAILED_PRECONDITION (MODEL_MISMATCH)      UNIMPLEMENTED
 *     ├── ContextTooShortError     FAILED_PRECONDITION (CONTEXT_TOO_SHORT)
 *     ├── NonFiniteLogitsError     FAILED_PRECONDITION (NON_FINITE_LOGITS)
 *     ├── UnauthenticatedError     UNAUTHENTICATED
 *     ├── PermissionDeniedError    PERMISSION_DENIED
 *     ├── OverloadedError          RESOURCE_EXHAUSTED (OVERLOADED)
 *     ├── UnavailableError         UNAVAILABLE                               CANCELLED, UNKNOWN, INTERNAL
 *     │   └── DeadlineExceededError  DEADLINE_EXCEEDED
 *     ├── DataLossError            DATA_LOSS (STORE_ROLLED_BACK)
 *     └── InternalError            INTERNAL
 *
 * A status that a specdec server sends carries an ErrorInfo, and its reason decides which class it becomes. A status
 * without one was made by grpc itself or by a proxy, and its code decides.
 */

import { status as Code } from "@grpc/grpc-js";

/** What an error may carry besides its sentence. */
export interface ErrorFacts {
  readonly violations?: Readonly<Record<string, string>>;
  readonly retryAfterS?: number | undefined;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly cause?: unknown;
}

/** Base of all errors that a caller of specdec may see. `metadata` are facts about it as texts. */
export class SpecdecError extends Error {
  static readonly code: Code = Code.INTERNAL;
  static readonly reason: string = "INTERNAL";
  /** What grpc and proxies send for it, besides `code`. */
  static readonly foreignCodes: readonly Code[] = [];

  readonly metadata: Readonly<Record<string, string>>;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.metadata = facts.metadata ?? {};
  }

  /** The status code of gRPC. */
  get code(): Code {
    return (this.constructor as typeof SpecdecError).code;
  }

  /** Why, as the protocol names it. */
  get reason(): string {
    return (this.constructor as typeof SpecdecError).reason;
  }

  /** Whether the same call can succeed later. */
  get isRetryable(): boolean {
    return false;
  }
}

/** A field is wrong. `violations` says what is wrong with each; it is empty if the status names no field. */
export class InvalidArgumentError extends SpecdecError {
  static override readonly code = Code.INVALID_ARGUMENT;
  static override readonly reason = "INVALID_ARGUMENT";
  static override readonly foreignCodes: readonly Code[] = [Code.OUT_OF_RANGE];

  readonly violations: Readonly<Record<string, string>>;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts);
    this.violations = facts.violations ?? {};
  }

  /** Returns the error whose sentence is made of these violations. */
  static of(violations: Readonly<Record<string, string>>): InvalidArgumentError {
    const sentences = Object.entries(violations).map(([field, problem]) => `${field} ${problem}`);
    return new InvalidArgumentError(sentences.join("; "), { violations });
  }
}

/** There is no such session, or it is not the caller's (indistinguishable). */
export class NotFoundError extends SpecdecError {
  static override readonly code = Code.NOT_FOUND;
  static override readonly reason = "SESSION_NOT_FOUND";
}

/** The request id belongs to a session with other parameters. */
export class AlreadyExistsError extends SpecdecError {
  static override readonly code = Code.ALREADY_EXISTS;
  static override readonly reason = "REQUEST_ID_REUSED";
}

/** A higher epoch owns the session: another coordinator, which Resume finds. */
export class FencedError extends SpecdecError {
  static override readonly code = Code.ABORTED;
  static override readonly reason = "SESSION_FENCED";

  override get isRetryable(): boolean {
    return true;
  }
}

/** Two parts do not fit together: draft and target, model and request, client and server. */
export class ModelMismatchError extends SpecdecError {
  static override readonly code = Code.FAILED_PRECONDITION;
  static override readonly reason = "MODEL_MISMATCH";
  static override readonly foreignCodes: readonly Code[] = [Code.UNIMPLEMENTED];
}

/** The session's text is too long for this worker; another worker of the same model may have more room. */
export class ContextTooShortError extends SpecdecError {
  static override readonly code = Code.FAILED_PRECONDITION;
  static override readonly reason = "CONTEXT_TOO_SHORT";
}

/** The model gave NaN or infinity for this session. */
export class NonFiniteLogitsError extends SpecdecError {
  static override readonly code = Code.FAILED_PRECONDITION;
  static override readonly reason = "NON_FINITE_LOGITS";
}

/** The call carries no credentials, or invalid ones. */
export class UnauthenticatedError extends SpecdecError {
  static override readonly code = Code.UNAUTHENTICATED;
  static override readonly reason = "UNAUTHENTICATED";
}

/** The caller is known and not allowed to do this. */
export class PermissionDeniedError extends SpecdecError {
  static override readonly code = Code.PERMISSION_DENIED;
  static override readonly reason = "PERMISSION_DENIED";
}

/** An error that passes. `retryAfterS` is the pause that the server asks for, undefined where it named none. */
abstract class LaterError extends SpecdecError {
  readonly retryAfterS: number | undefined;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts);
    this.retryAfterS = facts.retryAfterS;
  }

  override get isRetryable(): boolean {
    return true;
  }
}

/** There is no room for this now. */
export class OverloadedError extends LaterError {
  static override readonly code = Code.RESOURCE_EXHAUSTED;
  static override readonly reason = "OVERLOADED";

  /** Whether the server named a pause: grpc's own RESOURCE_EXHAUSTED (a message too large) does not pass. */
  override get isRetryable(): boolean {
    return this.retryAfterS !== undefined;
  }
}

/** A part is loading, draining or gone, or the connection broke. */
export class UnavailableError extends LaterError {
  static override readonly code: Code = Code.UNAVAILABLE;
  static override readonly reason: string = "UNAVAILABLE";
  static override readonly foreignCodes: readonly Code[] = [Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL];
}

/** The call did not end in time. */
export class DeadlineExceededError extends UnavailableError {
  static override readonly code = Code.DEADLINE_EXCEEDED;
  static override readonly reason = "DEADLINE_EXCEEDED";
  static override readonly foreignCodes: readonly Code[] = [];
}

/** The store holds less than, or other than, what a client was shown. */
export class DataLossError extends SpecdecError {
  static override readonly code = Code.DATA_LOSS;
  static override readonly reason = "STORE_ROLLED_BACK";
}

/** A bug of the service; its log has the cause. */
export class InternalError extends SpecdecError {
  static override readonly code = Code.INTERNAL;
  static override readonly reason = "INTERNAL";
}

/** All classes; of two with one code the first is meant. */
export const ERRORS = [
  InvalidArgumentError,
  NotFoundError,
  AlreadyExistsError,
  FencedError,
  ModelMismatchError,
  ContextTooShortError,
  NonFiniteLogitsError,
  UnauthenticatedError,
  PermissionDeniedError,
  OverloadedError,
  UnavailableError,
  DeadlineExceededError,
  DataLossError,
  InternalError,
] as const;
