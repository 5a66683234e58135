/** Statuses of gRPC to errors of specdec: by the reason where a specdec server sent it, else by the code. */

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack, type Duration } from "@bufbuild/protobuf/wkt";
import { status as Code, Metadata, type ServiceError } from "@grpc/grpc-js";

import { ERRORS, InternalError, SpecdecError } from "./errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RetryInfoSchema,
  StatusSchema,
  type Status,
} from "./generated/google/rpc/error_details_pb.js";

const DOMAIN = "specdec";
const DETAILS_KEY = "grpc-status-details-bin";

type ErrorClass = (typeof ERRORS)[number];

/** The google.rpc details of a status that are read here. */
interface Details {
  readonly isOurs: boolean;
  readonly reason: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly violations: Readonly<Record<string, string>>;
  readonly retryAfterS: number | undefined;
}

const NONE: Details = { isOurs: false, reason: "", metadata: {}, violations: {}, retryAfterS: undefined };

/** Returns whether an error is a status of gRPC. */
export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && !(error instanceof SpecdecError) && "metadata" in error && "code" in error;
}

/** Returns whether a specdec server sent this status, as against grpc itself or a proxy. */
export function isFromServer(error: ServiceError): boolean {
  return detailsOf(error).isOurs;
}

/** Returns the error that a status means. */
export function fromServiceError(error: ServiceError): SpecdecError {
  const details = detailsOf(error);
  const kind = (details.isOurs ? byReason(details.reason) : undefined) ?? byCode(error.code) ?? InternalError;
  return new kind(error.details || Code[error.code] || "unknown status", { ...details, cause: error });
}

function byReason(reason: string): ErrorClass | undefined {
  return ERRORS.find((kind) => kind.reason === reason);
}

/** Foreign codes win: INTERNAL without a reason is grpc's own. */
function byCode(code: Code): ErrorClass | undefined {
  return ERRORS.find((kind) => kind.foreignCodes.includes(code)) ?? ERRORS.find((kind) => kind.code === code);
}

/** What cannot be decoded counts as absent: proxies may send anything. */
function detailsOf(error: ServiceError): Details {
  const [packed] = error.metadata instanceof Metadata ? error.metadata.get(DETAILS_KEY) : [];
  if (packed === undefined) return NONE;
  try {
    return read(fromBinary(StatusSchema, Buffer.from(packed)));
  } catch {
    return NONE;
  }
}

function read(status: Status): Details {
  let details = NONE;
  for (const packed of status.details) {
    const info = anyUnpack(packed, ErrorInfoSchema);
    const bad = anyUnpack(packed, BadRequestSchema);
    const delay = anyUnpack(packed, RetryInfoSchema)?.retryDelay;
    if (info) details = { ...details, isOurs: info.domain === DOMAIN, reason: info.reason, metadata: info.metadata };
    if (bad) details = { ...details, violations: violationsOf(bad.fieldViolations) };
    if (delay) details = { ...details, retryAfterS: Math.max(0, seconds(delay)) };
  }
  return details;
}

function violationsOf(violations: readonly { field: string; description: string }[]): Record<string, string> {
  return Object.fromEntries(violations.map(({ field, description }) => [field, description]));
}

function seconds(duration: Duration): number {
  return Number(duration.seconds) + duration.nanos / 1e9;
}
