/** A caller's arguments to requests. Wrong ones throw InvalidArgumentError with the field, its value and the remedy. */

import { randomUUID } from "node:crypto";

import { create, toBinary, type MessageInitShape } from "@bufbuild/protobuf";

import { addressProblem, isLoopback } from "./address.js";
import { originNumber } from "./convert.js";
import { InvalidArgumentError } from "./errors.js";
import * as pb from "./generated/specdec/v1/generation_pb.js";
import * as types from "./generated/specdec/v1/types_pb.js";
import {
  SAMPLING_NAMES,
  oneOf,
  refuseUnknown,
  samplingProblems,
  shown,
  speculationProblems,
  tokenIdsProblem,
  wholeNumber,
} from "./parameters.js";
import { Transcript } from "./transcript.js";
import type {
  ChatMessage,
  GenerateOptions,
  Prompt,
  ResumeOptions,
  SamplingOptions,
  SpeculationOptions,
} from "./values.js";

const MAX_TIMEOUT_S = 365 * 86_400; // more than a year is a mistake in the unit
const DIGEST_BYTES = 16;
const MAX_REQUEST_BYTES = (8 << 20) + (64 << 10); // that a coordinator can be told to take
const MAX_HANDED_BACK = 16_384; // tokens
const CALL_NAMES = ["timeoutS", "signal"];
const GENERATE_NAMES = [...SAMPLING_NAMES, ...CALL_NAMES, "speculation", "whenDetached", "requestId"];
const DETACHED = { park: pb.DetachedPolicy.PARK, finish: pb.DetachedPolicy.FINISH, cancel: pb.DetachedPolicy.CANCEL };
const RULES = { token: types.AcceptanceRule.TOKEN, block: types.AcceptanceRule.BLOCK };

/** Sent where another sampling option is given: a coordinator tells a repeated request by its bytes, in any language. */
const NEUTRAL = {
  temperature: 1,
  topK: 0,
  topP: 1,
  minP: 0,
  repetitionPenalty: 1,
  presencePenalty: 0,
  frequencyPenalty: 0,
};

type PromptInit = NonNullable<MessageInitShape<typeof pb.GenerateRequestSchema>["prompt"]>;

/** A request, and its size on the wire. */
export interface SizedRequest {
  readonly message: pb.GenerateRequest;
  readonly numBytes: number;
}

/** Returns the prompt of a request. */
export function promptOf(prompt: Prompt): PromptInit {
  if (typeof prompt === "string") {
    if (!prompt) throw wrong("prompt", "is empty; give at least one character to continue");
    return { case: "text", value: encodable("prompt", prompt) };
  }
  const ids: unknown = typeof prompt === "object" && prompt !== null ? prompt.tokenIds : undefined;
  if (ids === undefined)
    throw wrong("prompt", `is ${shown(prompt)}; give text, { tokenIds: [...] }, messages to chat()`);
  const problem = Array.isArray(ids) && !ids.length ? "is empty; give at least one token" : tokenIdsProblem(ids);
  if (problem !== undefined) throw wrong("prompt.tokenIds", problem);
  return { case: "tokens", value: { ids: ids as number[] } };
}

/** Returns the prompt of a chat. */
export function chatOf(messages: readonly ChatMessage[]): PromptInit {
  if (!Array.isArray(messages)) throw wrong("messages", `is ${shown(messages)}; give a list of { role, content }`);
  if (!messages.length) throw wrong("messages", "is empty; give at least one message");
  return {
    case: "chat",
    value: { messages: messages.map((entry, number) => chatMessage(`messages[${number}]`, entry)) },
  };
}

/** Returns a request; an id is made where none is given, so that a repeated call finds the same session. */
export function generateRequest(prompt: PromptInit, options: GenerateOptions): SizedRequest {
  refuseUnknown(options, GENERATE_NAMES, "option");
  refuseProblems({
    ...samplingProblems(options),
    ...speculationProblems(options.speculation),
    ...otherProblems(options),
  });
  const message = create(pb.GenerateRequestSchema, {
    requestId: options.requestId ?? randomUUID(),
    prompt,
    whenDetached: options.whenDetached ? DETACHED[options.whenDetached] : pb.DetachedPolicy.UNSPECIFIED,
  });
  const sampling = samplingOf(options);
  if (sampling) message.sampling = sampling;
  if (options.speculation) message.speculation = speculationOf(options.speculation);
  const numBytes = toBinary(pb.GenerateRequestSchema, message).length;
  if (numBytes > MAX_REQUEST_BYTES) {
    const limit = `the maximum is ${MAX_REQUEST_BYTES} bytes; shorten the prompt`;
    throw wrong("prompt", `makes a request of ${numBytes} bytes; ${limit}`);
  }
  return { message, numBytes };
}

/** Returns what a caller who resumes a session has of it. */
export function transcriptOf(sessionId: string, options: ResumeOptions): Transcript {
  refuseUnknown(options, [...CALL_NAMES, "offset", "digest"], "option");
  const { offset = 0, digest = new Uint8Array() } = options;
  const problem = wholeNumber(0)(offset);
  if (problem !== undefined) throw wrong("offset", problem);
  if (!(digest instanceof Uint8Array) || ![0, DIGEST_BYTES].includes(digest.length)) {
    throw wrong("digest", `is ${shown(digest)}; give the ${DIGEST_BYTES} bytes of a chunk's digest, or leave it out`);
  }
  return new Transcript(checkedSessionId(sessionId), offset, digest);
}

/** Returns the request for what follows; a store that went back in time takes what was seen from it. */
export function resumption(seen: Transcript): pb.ResumeRequest {
  const place = { sessionId: seen.sessionId, offset: seen.end, digest: seen.digest };
  if (!seen.proof.length) return create(pb.ResumeRequestSchema, place);
  return create(pb.ResumeRequestSchema, {
    ...place,
    proof: seen.proof,
    tokens: seen.tokens.slice(-MAX_HANDED_BACK),
    origins: seen.origins.slice(-MAX_HANDED_BACK).map(originNumber),
  });
}

/** Returns the id. Throws InvalidArgumentError for what names no session. */
export function checkedSessionId(sessionId: string): string {
  if (typeof sessionId !== "string" || !sessionId) {
    const problem = sessionId === "" ? "is empty" : `is ${shown(sessionId)}`;
    throw wrong("sessionId", `${problem}; take it from a chunk of the session`);
  }
  return encodable("sessionId", sessionId);
}

/** Returns the address. Throws InvalidArgumentError for one that grpc would try in vain. */
export function checkedAddress(address: string): string {
  const problem = addressProblem(address);
  if (problem !== undefined) throw wrong("address", problem);
  return address;
}

/** Throws InvalidArgumentError for an address where others can read and change plain text. */
export function refusePlainText(address: string): void {
  if (isLoopback(address)) return;
  const problem = `is "${address}", where others can read and change plain text`;
  throw wrong("address", `${problem}; connect with TLS (tls: { ca: file }), or say insecure: true`);
}

/** Returns the time-out. Throws InvalidArgumentError unless it is above 0 and at most a year. */
export function checkedTimeoutS(timeoutS: number, name = "timeoutS"): number {
  if (typeof timeoutS === "number" && timeoutS > 0 && timeoutS <= MAX_TIMEOUT_S) return timeoutS;
  throw wrong(name, `is ${shown(timeoutS)}; give seconds in (0, ${MAX_TIMEOUT_S}]`);
}

/** Returns the error of one field. */
export function wrong(field: string, problem: string): InvalidArgumentError {
  return InvalidArgumentError.of({ [field]: problem });
}

function refuseProblems(problems: Readonly<Record<string, string>>): void {
  if (Object.keys(problems).length) throw InvalidArgumentError.of(problems);
}

function otherProblems({ requestId, whenDetached }: GenerateOptions): Record<string, string> {
  const problems: Record<string, string> = {};
  if (requestId !== undefined && (typeof requestId !== "string" || !requestId.isWellFormed())) {
    problems["requestId"] = `is ${shown(requestId)}; give text`;
  }
  const detached = whenDetached === undefined ? undefined : oneOf(...Object.keys(DETACHED))(whenDetached);
  if (detached !== undefined) problems["whenDetached"] = detached;
  return problems;
}

function samplingOf(options: SamplingOptions): types.SamplingParams | undefined {
  const given = SAMPLING_NAMES.filter((name) => options[name] !== undefined);
  if (!given.length) return undefined;
  const fields = Object.fromEntries(given.map((name) => [name, options[name]])) as SamplingOptions;
  const { seed, stop, stopTokenIds, logitBias, jsonSchema, regex, lark, ...scalars } = fields;
  return create(types.SamplingParamsSchema, {
    ...NEUTRAL,
    ...scalars,
    ...(seed === undefined ? {} : { seed: BigInt(seed) }),
    stop: typeof stop === "string" ? [stop] : [...(stop ?? [])],
    stopTokenIds: [...(stopTokenIds ?? [])],
    logitBias: { ...logitBias },
    grammar: grammarOf({ jsonSchema, regex, lark }),
  } as MessageInitShape<typeof types.SamplingParamsSchema>);
}

function grammarOf({ jsonSchema, regex, lark }: SamplingOptions): types.SamplingParams["grammar"] {
  if (regex !== undefined) return { case: "regex", value: regex };
  if (lark !== undefined) return { case: "lark", value: lark };
  if (jsonSchema === undefined) return { case: undefined };
  return { case: "jsonSchema", value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema) };
}

function speculationOf({ numDraftTokens, drafter, acceptanceRule }: SpeculationOptions): types.SpeculationParams {
  return create(types.SpeculationParamsSchema, {
    ...(numDraftTokens === undefined ? {} : { numDraftTokens }),
    ...(drafter === undefined ? {} : { drafter }),
    acceptanceRule: acceptanceRule ? RULES[acceptanceRule] : types.AcceptanceRule.UNSPECIFIED,
  });
}

function chatMessage(field: string, entry: unknown): ChatMessage {
  const keys = typeof entry === "object" && entry !== null ? Object.keys(entry).sort() : [];
  if (keys.join() !== "content,role")
    throw wrong(field, `is ${shown(entry)} with the keys [${keys.join()}]; give { role, content }`);
  const { role, content } = entry as Readonly<Record<string, unknown>>;
  return { role: textOf(`${field}.role`, role), content: textOf(`${field}.content`, content) };
}

function textOf(field: string, value: unknown): string {
  if (typeof value !== "string") throw wrong(field, `is ${shown(value)}; give text`);
  return encodable(field, value);
}

function encodable(field: string, text: string): string {
  if (!text.isWellFormed()) throw wrong(field, "has no UTF-8 encoding; mend it first");
  return text;
}
