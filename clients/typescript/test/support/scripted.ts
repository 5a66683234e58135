/** A GenerationService with one scripted handler for each call: it can break, repeat, contradict or hang. */

import {
  create,
  fromBinary,
  toBinary,
  type DescMethod,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";

import { Client, type ClientOptions } from "specdec";

import * as details from "../../src/generated/google/rpc/error_details_pb.js";
import * as pb from "../../src/generated/specdec/v1/generation_pb.js";
import { StatusService } from "../../src/generated/specdec/v1/status_pb.js";

export const SESSION = "s-1";
export const TEXT = "Once upon a 😀 there was.";
export const TOKENS = [1, 2, 3, 4, 5, 6, 7];
const ROUNDS: readonly (readonly [number[], string[]])[] = [
  [
    [1, 2],
    ["Once", " upon"],
  ],
  [[3], [" a"]],
  [
    [4, 5, 6],
    [" 😀", " there", ""],
  ],
  [[7], [" was."]],
];

export type ChunkInit = MessageInitShape<typeof pb.GenerateResponseSchema>;
export type Request = MessageShape<DescMethod["input"]>;

/** What a handler may do with its call. */
export interface Call {
  readonly request: Request;
  readonly metadata: grpc.Metadata;
  /** Resolves when the call was cancelled. */
  readonly cancelled: Promise<void>;
  send(chunk: ChunkInit): void;
  end(status?: Partial<grpc.StatusObject>): void;
}

export type Handler = (call: Call) => void | Promise<void>;

export function digestAt(end: number): Uint8Array {
  return new Uint8Array(16).fill(end);
}

/** Returns one chunk with the rounds from `begin` to `last`. */
export function chunk(begin: number, last = begin, changes: ChunkInit = {}): ChunkInit {
  const rounds = ROUNDS.slice(begin, last + 1);
  const tokens = rounds.flatMap(([ids]) => ids);
  const pieces = rounds.flatMap(([, texts]) => texts);
  const offset = ROUNDS.slice(0, begin).flatMap(([ids]) => ids).length;
  return {
    sessionId: SESSION,
    offset,
    tokens,
    text: pieces.join(""),
    origins: tokens.map((_, number) => (number < tokens.length - 1 ? pb.TokenOrigin.ACCEPTED : pb.TokenOrigin.BONUS)),
    digest: digestAt(offset + tokens.length),
    textEnds: pieces.map((_, number) => [...pieces.slice(0, number + 1).join("")].length),
    proof: new Uint8Array(16).fill(100 + begin),
    rounds: [{ drafter: "model", numDraftTokens: tokens.length, depth: tokens.length, end: offset + tokens.length }],
    ...(last === ROUNDS.length - 1 ? { finish: FINISH } : {}),
    ...changes,
  };
}

const FINISH = create(pb.FinishSchema, {
  reason: pb.FinishReason.STOP,
  usage: { numPromptTokens: 3, numCompletionTokens: 7 },
  statistics: { numRounds: 4n, numDraftTokens: 6n, numAcceptedTokens: 3n, numTokens: 7n, totalS: 2 },
});

export const WHOLE = ROUNDS.map((_, number) => chunk(number));

/** Returns a handler that sends these chunks, then ends the call. */
export function sends(chunks: readonly ChunkInit[], then?: Partial<grpc.StatusObject>): Handler {
  return (call) => {
    for (const each of chunks) call.send(each);
    call.end(then);
  };
}

/** Returns a handler that sends the first chunks and then nothing. */
export function hangs(chunks: readonly ChunkInit[], onCancelled: () => void = () => undefined): Handler {
  return async (call) => {
    for (const each of chunks) call.send(each);
    await call.cancelled;
    onCancelled();
  };
}

export const GONE = { code: grpc.status.UNAVAILABLE, details: "gone" };

/** Returns a status as a specdec server sends it. */
export function refusal(
  code: grpc.status,
  reason: string,
  message: string,
  more: { retryAfterS?: number; violations?: Record<string, string> } = {},
): Partial<grpc.StatusObject> {
  const parts = [anyPack(details.ErrorInfoSchema, create(details.ErrorInfoSchema, { reason, domain: "specdec" }))];
  if (more.retryAfterS !== undefined) {
    const retryDelay = durationFromMs(more.retryAfterS * 1000);
    parts.push(anyPack(details.RetryInfoSchema, create(details.RetryInfoSchema, { retryDelay })));
  }
  if (more.violations) {
    const fieldViolations = Object.entries(more.violations).map(([field, description]) => ({ field, description }));
    parts.push(anyPack(details.BadRequestSchema, create(details.BadRequestSchema, { fieldViolations })));
  }
  const metadata = new grpc.Metadata();
  const status = create(details.StatusSchema, { code, message, details: parts });
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(details.StatusSchema, status)));
  return { code, details: message, metadata };
}

/** Answers each call with the next handler and records the requests and their metadata. */
export class ScriptedService {
  handlers: Handler[] = [];
  /** Answers of calls that answer once, in turn: a message, or a status. */
  answers: (object | grpc.StatusObject)[] = [];
  readonly requests: Request[] = [];
  readonly metadata: grpc.Metadata[] = [];
  readonly server = new grpc.Server();

  constructor() {
    const { generate, resume, getSession, cancelSession, getModel } = pb.GenerationService.method;
    this.server.addService(definitionOf([generate, resume, getSession, cancelSession, getModel]), {
      Generate: (call: grpc.ServerWritableStream<Request, object>) => this.#stream(call, (sent) => sent),
      Resume: (call: grpc.ServerWritableStream<Request, object>) =>
        this.#stream(call, (sent) => create(pb.ResumeResponseSchema, { chunk: sent })),
      GetSession: this.#answer,
      CancelSession: this.#answer,
      GetModel: this.#answer,
    });
    this.server.addService(definitionOf([StatusService.method.getStatus]), { GetStatus: this.#answer });
  }

  async listen(credentials = grpc.ServerCredentials.createInsecure(), port = 0): Promise<number> {
    return new Promise((resolve, reject) => {
      this.server.bindAsync(`127.0.0.1:${port}`, credentials, (error, bound) =>
        error ? reject(error) : resolve(bound),
      );
    });
  }

  #stream(call: grpc.ServerWritableStream<Request, object>, wrap: (sent: pb.GenerateResponse) => object): void {
    this.#record(call);
    const cancelled = new Promise<void>((resolve) => call.on("cancelled", resolve));
    const handler = this.handlers.shift() ?? sends([], GONE);
    void handler({
      request: call.request,
      metadata: call.metadata,
      cancelled,
      send: (each) => void call.write(wrap(create(pb.GenerateResponseSchema, each))),
      end: (status) => void (status ? call.emit("error", status) : call.end()),
    });
  }

  readonly #answer = (call: grpc.ServerUnaryCall<Request, object>, reply: grpc.sendUnaryData<object>): void => {
    this.#record(call);
    const answer = this.answers.shift() ?? GONE;
    if ("code" in answer) reply(Object.assign(new Error(), answer) as grpc.ServiceError);
    else reply(null, answer);
  };

  #record(call: { request: Request; metadata: grpc.Metadata }): void {
    this.requests.push(call.request);
    this.metadata.push(call.metadata);
  }
}

/** Runs a test with a service, its address and a client of it. */
export async function withService(
  test: (service: ScriptedService, client: Client, address: string) => Promise<void>,
  options: ClientOptions = {},
): Promise<void> {
  const service = new ScriptedService();
  const address = `127.0.0.1:${await service.listen()}`;
  const client = new Client(address, options);
  try {
    await test(service, client, address);
  } finally {
    client.close();
    service.server.forceShutdown();
  }
}

function definitionOf(methods: readonly DescMethod[]): grpc.ServiceDefinition {
  return Object.fromEntries(methods.map((method) => [method.name, definition(method)]));
}

function definition(method: DescMethod): grpc.MethodDefinition<Request, Request> {
  return {
    path: `/${method.parent.typeName}/${method.name}`,
    requestStream: false,
    responseStream: method.methodKind === "server_streaming",
    requestSerialize: (message) => Buffer.from(toBinary(method.input, message)),
    requestDeserialize: (bytes) => fromBinary(method.input, bytes),
    responseSerialize: (message) => Buffer.from(toBinary(method.output, message)),
    responseDeserialize: (bytes) => fromBinary(method.output, bytes),
  };
}
