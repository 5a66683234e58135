/** The client: every committed token arrives exactly once, also over connections that break. */

import { create } from "@bufbuild/protobuf";
import { credentials as grpcCredentials, type ChannelCredentials, type ChannelOptions } from "@grpc/grpc-js";

import { Channels, tlsCredentials } from "./channels.js";
import type { Completion } from "./chunk.js";
import { Connection } from "./connection.js";
import { processesOf, servedModelOf, sessionOf, statusOf } from "./convert.js";
import { Ending } from "./ending.js";
import * as pb from "./generated/specdec/v1/generation_pb.js";
import { GetStatusRequestSchema, StatusService } from "./generated/specdec/v1/status_pb.js";
import { refuseUnknown, wholeNumber } from "./parameters.js";
import {
  chatOf,
  checkedAddress,
  checkedSessionId,
  checkedTimeoutS,
  generateRequest,
  promptOf,
  refusePlainText,
  transcriptOf,
  wrong,
  type SizedRequest,
} from "./request.js";
import type { Retry } from "./retry.js";
import { Stream } from "./stream.js";
import { WatchedTls, type TlsFiles } from "./tls.js";
import { Transcript } from "./transcript.js";
import type {
  CallOptions,
  ChatMessage,
  GenerateOptions,
  ProcessStatus,
  Prompt,
  ResumeOptions,
  ServedModel,
  Session,
  SessionStatus,
} from "./values.js";

export const DEFAULT_ADDRESS = "127.0.0.1:50051";
const DEFAULT_TIMEOUT_S = 600;
const DEFAULT_CONNECT_TIMEOUT_S = 20;

/** How a client connects, and how long it tries. */
export interface ClientOptions {
  /** The files to trust and to show; files that are replaced count for the next call. */
  readonly tls?: TlsFiles | undefined;
  /** Instead of `tls`, credentials of grpc-js. */
  readonly credentials?: ChannelCredentials | undefined;
  /** Allows plain text off loopback. */
  readonly insecure?: boolean | undefined;
  /** A bearer token, or a function that returns it or a promise of it, called for each attempt. */
  readonly token?: string | (() => string | undefined | Promise<string | undefined>) | undefined;
  /** Sent with each call. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /** Takes all servers that the address names in turns, for many calls at once; else one of them is taken. */
  readonly spreadsCalls?: boolean | undefined;
  /** Options of grpc-js, which win over those of this client. */
  readonly channelOptions?: ChannelOptions | undefined;
  /** Deadline of each call, its retries included, unless the call has its own, in seconds. */
  readonly timeoutS?: number | undefined;
  /** Consecutive failed attempts that are repeated; left out: as many as fit before the deadline. */
  readonly maxRetries?: number | undefined;
  /** How long an address is tried if no specdec server has answered yet, in seconds. */
  readonly connectTimeoutS?: number | undefined;
  /** Called before each pause after which a call is tried again; what it throws ends the call. */
  readonly onRetry?: ((retry: Retry) => void) | undefined;
}

const CALL_NAMES = ["timeoutS", "signal"];
const OPTION_NAMES: readonly (keyof ClientOptions)[] = [
  "tls",
  "credentials",
  "insecure",
  "token",
  "metadata",
  "spreadsCalls",
  "channelOptions",
  "timeoutS",
  "maxRetries",
  "connectTimeoutS",
  "onRetry",
];

/**
 * A client of one specdec service. The connection opens with the first call.
 *
 * A wrong argument throws InvalidArgumentError, an unknown option TypeError, without a call to the service. Calls throw
 * the subclasses of SpecdecError, the reason of their signal, and Error once the client is closed.
 */
export class Client {
  readonly address: string;
  readonly #connection: Connection;
  readonly #timeoutS: number;

  constructor(address = DEFAULT_ADDRESS, options: ClientOptions = {}) {
    refuseUnknown(options, OPTION_NAMES, "option");
    const problem = options.maxRetries === undefined ? undefined : wholeNumber(0)(options.maxRetries);
    if (problem !== undefined) throw wrong("maxRetries", problem);
    this.address = checkedAddress(address);
    this.#timeoutS = checkedTimeoutS(options.timeoutS ?? DEFAULT_TIMEOUT_S);
    const { token, metadata = {}, maxRetries, onRetry } = options;
    this.#connection = new Connection({
      address,
      channels: channelsOf(address, options),
      metadata,
      token: typeof token === "function" ? token : () => token,
      connectTimeoutS: checkedTimeoutS(options.connectTimeoutS ?? DEFAULT_CONNECT_TIMEOUT_S, "connectTimeoutS"),
      maxRetries,
      onRetry,
    });
  }

  /** Closes the connection; running calls end with an Error. */
  close(): void {
    this.#connection.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Connects now instead of with the first call. Throws UnavailableError at once if no server answers. */
  async connect(options: Pick<CallOptions, "signal"> = {}): Promise<void> {
    await this.#connection.connect(new Ending(options.signal));
  }

  /** Returns the stream of a new session that continues a prompt. */
  generate(prompt: Prompt, options: GenerateOptions = {}): Stream {
    return this.#stream(generateRequest(promptOf(prompt), options), new Transcript(), options);
  }

  /** Returns the whole completion; otherwise as `generate`. */
  async complete(prompt: Prompt, options: GenerateOptions = {}): Promise<Completion> {
    return this.generate(prompt, options).result();
  }

  /** Returns the stream of the assistant's answer to chat messages, rendered by the model's chat template. */
  streamChat(messages: readonly ChatMessage[], options: GenerateOptions = {}): Stream {
    return this.#stream(generateRequest(chatOf(messages), options), new Transcript(), options);
  }

  /** Returns the assistant's whole answer; otherwise as `streamChat`. */
  async chat(messages: readonly ChatMessage[], options: GenerateOptions = {}): Promise<Completion> {
    return this.streamChat(messages, options).result();
  }

  /** Returns the stream of a session from token `offset` on: first what the store holds, then new chunks. */
  resume(sessionId: string, options: ResumeOptions = {}): Stream {
    return this.#stream(undefined, transcriptOf(sessionId, options), options);
  }

  /** Returns what the store holds of a session. Throws NotFoundError. */
  async getSession(sessionId: string, options: CallOptions = {}): Promise<Session> {
    const request = create(pb.GetSessionRequestSchema, { sessionId: checkedSessionId(sessionId) });
    const [timeoutS, ending] = this.#limits(options);
    return sessionOf(await this.#connection.ask(pb.GenerationService.method.getSession, request, timeoutS, ending));
  }

  /** Ends a session; what was committed stays readable. Returns "cancelled", or "finished" if it had ended before. */
  async cancel(sessionId: string, options: CallOptions = {}): Promise<SessionStatus> {
    const request = create(pb.CancelSessionRequestSchema, { sessionId: checkedSessionId(sessionId) });
    const [timeoutS, ending] = this.#limits(options);
    const answer = await this.#connection.ask(pb.GenerationService.method.cancelSession, request, timeoutS, ending);
    return statusOf(answer.status);
  }

  /** Returns the models that the service runs. */
  async getModel(options: CallOptions = {}): Promise<ServedModel> {
    const [timeoutS, ending] = this.#limits(options);
    const request = create(pb.GetModelRequestSchema);
    return servedModelOf(await this.#connection.ask(pb.GenerationService.method.getModel, request, timeoutS, ending));
  }

  /**
   * Returns the metrics of the process that answers, and of the workers that it uses. Throws PermissionDeniedError where
   * clients have tokens, and this one's tenant is no operator.
   */
  async getStatus(options: CallOptions = {}): Promise<ProcessStatus[]> {
    const [timeoutS, ending] = this.#limits(options);
    const request = create(GetStatusRequestSchema);
    return processesOf(await this.#connection.ask(StatusService.method.getStatus, request, timeoutS, ending));
  }

  #stream(request: SizedRequest | undefined, seen: Transcript, options: CallOptions): Stream {
    const ending = new Ending(options.signal);
    const chunks = this.#connection.follow(request, seen, this.#deadlineS(options), ending);
    return new Stream(chunks, seen, ending, (sessionId) => this.cancel(sessionId));
  }

  #limits(options: CallOptions): [number, Ending] {
    refuseUnknown(options, CALL_NAMES, "option");
    return [this.#deadlineS(options), new Ending(options.signal)];
  }

  #deadlineS({ timeoutS }: CallOptions): number {
    return timeoutS === undefined ? this.#timeoutS : checkedTimeoutS(timeoutS);
  }
}

function channelsOf(address: string, options: ClientOptions): Channels {
  const { spreadsCalls = false, channelOptions = {} } = options;
  return new Channels(address, credentialsOf(address, options), spreadsCalls, channelOptions);
}

function credentialsOf(address: string, { tls, credentials, insecure }: ClientOptions): () => ChannelCredentials {
  if (tls && credentials) throw wrong("tls", "is given beside credentials; give one of them");
  if (credentials) return () => credentials;
  if (tls) return tlsCredentials(watched(tls));
  if (!insecure) refusePlainText(address);
  const plain = grpcCredentials.createInsecure();
  return () => plain;
}

function watched(tls: TlsFiles): WatchedTls {
  refuseUnknown(tls, ["ca", "certificate", "key"], "TLS file");
  try {
    return new WatchedTls(tls);
  } catch (error) {
    throw wrong("tls", `is not usable: ${error instanceof Error ? error.message : String(error)}`);
  }
}
