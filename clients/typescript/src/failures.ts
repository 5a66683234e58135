/** What a caller is told of a failed attempt: a server's own error as it is, the address or deadline of others. */

import { status as Code, type ServiceError } from "@grpc/grpc-js";

import {
  DeadlineExceededError,
  InvalidArgumentError,
  ModelMismatchError,
  UnavailableError,
  type SpecdecError,
} from "./errors.js";
import { fromServiceError, isFromServer } from "./status.js";
import type { Transcript } from "./transcript.js";

const TOO_LARGE = /message larger than max \((\d+) vs\. (\d+)\)/; // grpc's words, before any server of ours reads it
const LAST_CAUSE = /Last error: (?:Error: )?(.*?)\.?(?: Resolution note:.*)?$/s; // of grpc-js

/** Words of a failed handshake, and what they mean with the remedy. */
const HANDSHAKE_PROBLEMS: readonly (readonly [RegExp, string])[] = [
  [/certificate has expired/, "its certificate has expired; the service's operator can give it a new one"],
  [
    /self.signed certificate|unable to (verify|get)/,
    "its certificate is of an authority that is not trusted here; give the authority's certificate (tls: { ca: file })",
  ],
  [/does not match certificate/, "its certificate is for another name; give the address with a name that it has"],
  [
    /wrong version number|packet length too long/i,
    "it speaks plain text, and TLS was asked for; leave tls out, or give the port that has it",
  ],
  [
    /alert (number|certificate|unknown)|certificate required/i,
    "it asks for a certificate of ours; give tls: { certificate, key }",
  ],
  [
    /^Failed to connect|socket disconnected before secure TLS|Last error: (Error: )?(Failed to connect|Client network socket)/,
    "it closed the connection at once, as a server does that wants TLS or another certificate of ours; give tls: { ca }, and where it asks for one certificate and key",
  ],
];

/** What is known of the call that failed. */
export interface Circumstances {
  readonly address: string;
  readonly timeoutS: number;
  readonly seen: Transcript | undefined;
}

/** Returns the error of a stream that ended without an error and too early: its server is being replaced. */
export function endedEarly(circumstances: Circumstances): SpecdecError {
  return new UnavailableError(`${circumstances.address} ended the stream early${resumable(circumstances)}`);
}

/** Returns the error of an address to which no connection is made in time. */
export function notConnected(circumstances: Circumstances, limitS: number): SpecdecError {
  const { address } = circumstances;
  return new UnavailableError(
    `no specdec answers on ${address} (no connection within ${limitS} s)${resumable(circumstances)}`,
  );
}

/** Returns what a status means to the caller. */
export function failureOf(error: ServiceError, circumstances: Circumstances): SpecdecError {
  const failure = fromServiceError(error);
  if (isFromServer(error)) return failure;
  const { address, timeoutS } = circumstances;
  const facts = { cause: error };
  if (failure instanceof DeadlineExceededError) {
    return new DeadlineExceededError(`deadline of ${timeoutS} s exceeded${resumable(circumstances)}`, facts);
  }
  if (failure instanceof UnavailableError) {
    const sentence = `no specdec answers on ${address}${reasonOf(error.details)}${resumable(circumstances)}`;
    return new UnavailableError(sentence, facts);
  }
  return tooLarge(error) ?? (error.code === Code.UNIMPLEMENTED ? noCoordinator(address, error) : failure);
}

function tooLarge(error: ServiceError): SpecdecError | undefined {
  const [, size, maximum] = TOO_LARGE.exec(error.details) ?? [];
  if (size === undefined) return undefined;
  const limit = `the maximum is ${maximum} (--max-request-bytes of the coordinator)`;
  return InvalidArgumentError.of({ request: `has ${size} bytes; ${limit}; send a shorter prompt` });
}

function noCoordinator(address: string, cause: ServiceError): SpecdecError {
  const problem = `the server on ${address} is not a specdec coordinator; give the coordinator's port`;
  return new ModelMismatchError(problem, { cause });
}

function resumable({ seen }: Circumstances): string {
  return seen?.sessionId ? `; session ${seen.sessionId} can be resumed from token ${seen.end}` : "";
}

/** Returns the last cause in grpc's chain of them, as " (connect ECONNREFUSED 127.0.0.1:1)". */
function reasonOf(details: string): string {
  const [, meaning] = HANDSHAKE_PROBLEMS.find(([words]) => words.test(details)) ?? [];
  const cause = meaning ?? LAST_CAUSE.exec(details)?.[1] ?? details;
  return cause ? ` (${cause})` : "";
}
