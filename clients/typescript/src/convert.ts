/** Messages of the protocol to values. What this version does not know becomes ModelMismatchError. */

import { Chunk } from "./chunk.js";
import { ModelMismatchError } from "./errors.js";
import * as pb from "./generated/specdec/v1/generation_pb.js";
import * as statuses from "./generated/specdec/v1/status_pb.js";
import type * as types from "./generated/specdec/v1/types_pb.js";
import type {
  Finish,
  FinishReason,
  ModelInfo,
  ProcessStatus,
  SamplingUsed,
  ServedModel,
  Session,
  SessionStatus,
  Statistics,
  TokenOrigin,
  WorkerState,
} from "./values.js";

const ORIGINS = new Map<pb.TokenOrigin, TokenOrigin>([
  [pb.TokenOrigin.ACCEPTED, "accepted"],
  [pb.TokenOrigin.RECOVERED, "recovered"],
  [pb.TokenOrigin.BONUS, "bonus"],
]);
const REASONS = new Map<pb.FinishReason, FinishReason>([
  [pb.FinishReason.EOS, "eos"],
  [pb.FinishReason.STOP, "stop"],
  [pb.FinishReason.LENGTH, "length"],
  [pb.FinishReason.CANCELLED, "cancelled"],
]);
const SESSION_STATUSES = new Map<pb.SessionStatus, SessionStatus>([
  [pb.SessionStatus.ACTIVE, "active"],
  [pb.SessionStatus.FINISHED, "finished"],
  [pb.SessionStatus.CANCELLED, "cancelled"],
]);
const WORKER_STATES = new Map<statuses.WorkerState, WorkerState>([
  [statuses.WorkerState.IN_SERVICE, "in_service"],
  [statuses.WorkerState.ON_TRIAL, "on_trial"],
  [statuses.WorkerState.OUT, "out"],
  [statuses.WorkerState.LEAVING, "leaving"],
]);
const ORIGIN_NUMBERS = new Map([...ORIGINS].map(([number, name]) => [name, number]));

/** Converts a chunk. */
export function chunkOf(message: pb.GenerateResponse): Chunk {
  const { tokens, origins, textEnds, text } = message;
  if (tokens.length !== origins.length || tokens.length !== textEnds.length) {
    throw new ModelMismatchError("the server sent a chunk whose lists differ in length; update client or server");
  }
  return new Chunk({
    sessionId: message.sessionId,
    offset: message.offset,
    tokens,
    text,
    origins: origins.map((origin) => known(ORIGINS, origin, "token origin")),
    digest: message.digest,
    logprobs: message.logprobs.map(({ logprob, top }) => ({
      logprob,
      top: top.map((entry) => ({ token: entry.token, logprob: entry.logprob })),
    })),
    textEnds: unitOffsets(text, textEnds),
    finish: message.finish && finishOf(message.finish),
    proof: message.proof,
    rounds: message.rounds.map(({ drafter, numDraftTokens, depth, end }) => ({ drafter, numDraftTokens, depth, end })),
  });
}

/** Returns the number of a token's origin in the protocol. */
export function originNumber(origin: TokenOrigin): pb.TokenOrigin {
  return ORIGIN_NUMBERS.get(origin) ?? pb.TokenOrigin.UNSPECIFIED;
}

/** Converts what the store holds of a session. */
export function sessionOf(message: pb.GetSessionResponse): Session {
  return {
    sessionId: message.sessionId,
    status: statusOf(message.status),
    epoch: message.epoch,
    numPromptTokens: message.numPromptTokens,
    tokens: message.tokens,
    text: message.text,
    digest: message.digest,
    sampling: samplingOf(message.sampling),
    finish: message.finish && finishOf(message.finish),
  };
}

/** Converts the state of a session. */
export function statusOf(status: pb.SessionStatus): SessionStatus {
  return known(SESSION_STATUSES, status, "session status");
}

/** Converts the models of a service. */
export function servedModelOf(message: pb.GetModelResponse): ServedModel {
  const { target, drafters, contextLength, maxDraftTokens } = message;
  if (!target) throw new ModelMismatchError("the server names no target; update client or server");
  return { target: modelOf(target), drafters, contextLength, maxDraftTokens };
}

/** Converts the metrics of a service's processes. */
export function processesOf(message: statuses.GetStatusResponse): ProcessStatus[] {
  return message.processes.map(({ kind, address, state, reason, numStreams, samples }) => ({
    kind,
    address,
    state: WORKER_STATES.get(state),
    reason,
    numStreams,
    samples: samples.map(({ name, labels, value }) => ({ name, labels, value })),
  }));
}

function finishOf(message: pb.Finish): Finish {
  const { numPromptTokens = 0, numCompletionTokens = 0 } = message.usage ?? {};
  return {
    reason: known(REASONS, message.reason, "finish reason"),
    usage: { numPromptTokens, numCompletionTokens },
    statistics: statisticsOf(message.statistics),
  };
}

function statisticsOf(message: pb.Statistics | undefined): Statistics {
  return {
    numRounds: count(message?.numRounds),
    numDraftTokens: count(message?.numDraftTokens),
    numAcceptedTokens: count(message?.numAcceptedTokens),
    numTokens: count(message?.numTokens),
    draftS: message?.draftS ?? 0,
    scoreS: message?.scoreS ?? 0,
    commitS: message?.commitS ?? 0,
    totalS: message?.totalS ?? 0,
    numDraftsPerDepth: message?.numDraftsPerDepth.map(count) ?? [],
    numAcceptedTokensPerDepth: message?.numAcceptedTokensPerDepth.map(count) ?? [],
  };
}

function samplingOf(message: types.SamplingParams | undefined): SamplingUsed {
  if (!message) return { stop: [] };
  const { $typeName: _, $unknown: __, grammar, ...fields } = message;
  return grammar.case === undefined ? fields : { ...fields, [grammar.case]: grammar.value };
}

function modelOf(message: types.ModelInfo): ModelInfo {
  const { $typeName: _, $unknown: __, ...fields } = message;
  return fields;
}

/** A session has at most 2^32 tokens, so that its counts are far below 2^53. */
function count(value = 0n): number {
  if (value > BigInt(Number.MAX_SAFE_INTEGER)) {
    throw new ModelMismatchError(`the server sent a count of ${value}, which this client cannot hold; update it`);
  }
  return Number(value);
}

/** Turns offsets in code points, which the protocol counts, into offsets in UTF-16 units, which strings have. */
function unitOffsets(text: string, ends: readonly number[]): number[] {
  const offsets = [0];
  for (const point of text) offsets.push((offsets.at(-1) ?? 0) + point.length);
  return ends.map((end) => offsets[end] ?? text.length);
}

function known<Key extends number, Value>(table: ReadonlyMap<Key, Value>, key: Key, what: string): Value {
  const value = table.get(key);
  if (value === undefined) {
    throw new ModelMismatchError(
      `the server sent a value that this client does not know (${what} ${key}); update the client`,
    );
  }
  return value;
}
