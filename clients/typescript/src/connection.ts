/**
 * Calls that survive broken connections.
 *
 * A gRPC retry cannot save a stream once it has begun, so this does: before the first chunk it repeats the request under
 * the same request id, after it it resumes the session by offset. Either way the server finds the session that it has.
 */

import { setTimeout as sleep } from "node:timers/promises";

import { create, isMessage, type DescMessage, type DescMethodUnary, type MessageShape } from "@bufbuild/protobuf";
import { status as Code, Metadata, type Client } from "@grpc/grpc-js";

import { Channels, MAX_QUICK_BYTES, PATIENT_PINGS, QUICK_PINGS, hasConnected, type Pings } from "./channels.js";
import type { Chunk } from "./chunk.js";
import { chunkOf } from "./convert.js";
import { Ending } from "./ending.js";
import { UnavailableError, type SpecdecError } from "./errors.js";
import { endedEarly, failureOf, notConnected, type Circumstances } from "./failures.js";
import {
  GenerateResponseSchema,
  GenerationService,
  GetModelRequestSchema,
  ResumeResponseSchema,
  type GenerateResponse,
  type ResumeResponse,
} from "./generated/specdec/v1/generation_pb.js";
import { resumption, type SizedRequest } from "./request.js";
import { Attempts, type Retry } from "./retry.js";
import { callStream, callUnary } from "./rpc.js";
import { isFromServer, isServiceError } from "./status.js";
import type { Transcript } from "./transcript.js";

const CONNECT_S = 5; // the time limit of one attempt to connect: a busy server is slow to answer
const MAX_TIMER_MS = 2 ** 31 - 1; // of Node

/** A bearer token, or what returns it; undefined: no token. */
export type Token = () => string | undefined | Promise<string | undefined>;

/** What every call of a client shares. */
export interface ConnectionOptions {
  readonly address: string;
  readonly channels: Channels;
  readonly metadata: Readonly<Record<string, string>>;
  readonly token: Token;
  readonly connectTimeoutS: number;
  readonly maxRetries: number | undefined;
  readonly onRetry: ((retry: Retry) => void) | undefined;
}

/** A call in progress. */
interface Calling {
  readonly attempts: Attempts;
  readonly ending: Ending;
  readonly circumstances: Circumstances;
}

/** How an attempt ended; no failure: it was let in, but its token expired and there is another one by now. */
type Outcome = SpecdecError | undefined;

/** The calls of one client. */
export class Connection {
  readonly #options: ConnectionOptions;
  readonly #running = new Set<Ending>();
  #hasAnswered = false; // a specdec server has
  #isClosed = false;

  constructor(options: ConnectionOptions) {
    this.#options = options;
  }

  /** Ends running calls and closes the channels. */
  close(): void {
    this.#isClosed = true;
    for (const ending of this.#running) ending.end(new Error("the client was closed during the call"));
    this.#options.channels.close();
  }

  /** Connects now. Throws UnavailableError at once if no server answers. */
  async connect(ending: Ending): Promise<void> {
    const { connectTimeoutS } = this.#options;
    await this.#tracked(ending, async () => {
      const calling = this.#calling(connectTimeoutS, ending, undefined);
      const isConnected = await this.#leased(QUICK_PINGS, (client) =>
        hasConnected(client, connectTimeoutS, ending.signal),
      );
      ending.signal.throwIfAborted();
      if (isConnected === undefined) throw notConnected(calling.circumstances, connectTimeoutS);
      // a call on a channel that has failed has the reason, which the channel's state has not
      if (!isConnected) await this.#getModel(calling);
    });
  }

  /** Makes a call that answers once; all of them can be repeated. Throws SpecdecError. */
  async ask<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    timeoutS: number,
    ending: Ending,
  ): Promise<MessageShape<O>> {
    return this.#tracked(ending, async () => {
      const calling = this.#calling(timeoutS, ending, undefined);
      for (;;) {
        try {
          return await this.#askOnce(method, request, calling);
        } catch (error) {
          await this.#pause(calling, this.#outcome(error, calling));
        }
      }
    });
  }

  /** Yields chunks to the session's end, resuming from where a stream breaks. Throws SpecdecError. */
  async *follow(
    request: SizedRequest | undefined,
    seen: Transcript,
    timeoutS: number,
    ending: Ending,
  ): AsyncGenerator<Chunk, void, undefined> {
    this.#begin(ending);
    try {
      const calling = this.#calling(timeoutS, ending, seen);
      while (!seen.isFinished) {
        const failure = yield* this.#attempt(request, seen, calling);
        if (!seen.isFinished && failure) await this.#pause(calling, failure);
      }
    } finally {
      this.#running.delete(ending);
    }
  }

  /** Yields the new chunks of one call; returns how it ended. */
  async *#attempt(
    request: SizedRequest | undefined,
    seen: Transcript,
    calling: Calling,
  ): AsyncGenerator<Chunk, Outcome, undefined> {
    const pings = request && !seen.sessionId && request.numBytes > MAX_QUICK_BYTES ? PATIENT_PINGS : QUICK_PINGS;
    const lease = this.#options.channels.lease(pings);
    let cancel = (): void => undefined;
    let admitted: string | undefined;
    try {
      const metadata = await this.#ready(lease.client, calling);
      const call = this.#open(lease.client, request, seen, metadata, calling.attempts);
      cancel = () => call.cancel();
      calling.ending.signal.addEventListener("abort", cancel);
      for await (const message of call) {
        this.#hasAnswered = true;
        admitted = tokenIn(metadata);
        const chunk = seen.admit(chunkOf(chunkMessage(message)));
        if (chunk) calling.attempts.progress();
        if (chunk) yield chunk;
      }
      return endedEarly(calling.circumstances);
    } catch (error) {
      const outcome = this.#outcome(error, calling);
      return (await this.#hasNewToken(outcome, admitted)) ? undefined : outcome;
    } finally {
      calling.ending.signal.removeEventListener("abort", cancel);
      cancel();
      lease.release();
    }
  }

  /** Repeats the request until the session is known, then resumes it. */
  #open(client: Client, request: SizedRequest | undefined, seen: Transcript, metadata: Metadata, attempts: Attempts) {
    const options = { deadline: deadline(attempts.leftS()) };
    const { generate, resume } = GenerationService.method;
    return request && !seen.sessionId
      ? callStream(client, generate, request.message, metadata, options)
      : callStream(client, resume, resumption(seen), metadata, options);
  }

  async #getModel(calling: Calling): Promise<void> {
    try {
      await this.#askOnce(GenerationService.method.getModel, create(GetModelRequestSchema), calling);
    } catch (error) {
      throw this.#outcome(error, calling);
    }
  }

  async #askOnce<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    calling: Calling,
  ): Promise<MessageShape<O>> {
    return this.#leased(QUICK_PINGS, async (client) => {
      const metadata = await this.#ready(client, calling);
      const options = { deadline: deadline(calling.attempts.leftS()) };
      const answer = await callUnary(client, method, request, metadata, options, calling.ending.signal);
      this.#hasAnswered = true;
      return answer;
    });
  }

  /** Waits for the channel, and returns the metadata of an attempt; the token may have been replaced. */
  async #ready(client: Client, { attempts, ending, circumstances }: Calling): Promise<Metadata> {
    const limitS = Math.min(CONNECT_S, attempts.leftS());
    const isConnected = await hasConnected(client, limitS, ending.signal);
    ending.signal.throwIfAborted();
    if (isConnected === undefined && attempts.leftS() > 0) throw notConnected(circumstances, limitS);
    const metadata = metadataOf(this.#options.metadata, await this.#options.token());
    ending.signal.throwIfAborted();
    return metadata;
  }

  /** Returns what a failed attempt means. Throws what is no failure of the service. */
  #outcome(error: unknown, { ending, circumstances }: Calling): SpecdecError {
    ending.signal.throwIfAborted();
    if (error instanceof UnavailableError) return error;
    if (!isServiceError(error)) throw error;
    this.#hasAnswered ||= isFromServer(error);
    return failureOf(error, circumstances);
  }

  /** Returns whether a stream that was let in ended as its token did, and there is another one by now. */
  async #hasNewToken(failure: SpecdecError, admitted: string | undefined): Promise<boolean> {
    if (failure.code !== Code.UNAUTHENTICATED || admitted === undefined) return false;
    return tokenIn(metadataOf(this.#options.metadata, await this.#options.token())) !== admitted;
  }

  /** Sleeps until the next attempt is due. Throws what the caller should see if there is none. */
  async #pause({ attempts, ending, circumstances }: Calling, failure: SpecdecError): Promise<void> {
    const pauseS = attempts.pauseS(failure, this.#hasAnswered);
    if (pauseS === undefined) throw failure;
    const sessionId = circumstances.seen?.sessionId || undefined;
    this.#options.onRetry?.({ failure, sessionId, pauseS, leftS: attempts.leftS(this.#hasAnswered) });
    await sleep(Math.min(pauseS * 1000, MAX_TIMER_MS), undefined, { signal: ending.signal }).catch(() => undefined);
    ending.signal.throwIfAborted();
  }

  #calling(timeoutS: number, ending: Ending, seen: Transcript | undefined): Calling {
    const { address, connectTimeoutS, maxRetries } = this.#options;
    const attempts = new Attempts({ timeoutS, connectTimeoutS, maxRetries });
    return { attempts, ending, circumstances: { address, timeoutS, seen } };
  }

  async #leased<T>(pings: Pings, work: (client: Client) => Promise<T>): Promise<T> {
    const lease = this.#options.channels.lease(pings);
    try {
      return await work(lease.client);
    } finally {
      lease.release();
    }
  }

  async #tracked<T>(ending: Ending, work: () => Promise<T>): Promise<T> {
    this.#begin(ending);
    try {
      return await work();
    } catch (error) {
      ending.signal.throwIfAborted();
      throw error;
    } finally {
      this.#running.delete(ending);
    }
  }

  #begin(ending: Ending): void {
    if (this.#isClosed) throw new Error("the client is closed; make a new one");
    ending.signal.throwIfAborted();
    this.#running.add(ending);
  }
}

function chunkMessage(message: GenerateResponse | ResumeResponse): GenerateResponse {
  return isMessage(message, ResumeResponseSchema) ? (message.chunk ?? create(GenerateResponseSchema)) : message;
}

function metadataOf(given: Readonly<Record<string, string>>, token: string | undefined): Metadata {
  const metadata = new Metadata();
  for (const [key, value] of Object.entries(given)) metadata.add(key, value);
  if (token !== undefined) metadata.add("authorization", `Bearer ${token}`);
  return metadata;
}

function tokenIn(metadata: Metadata): string {
  return String(metadata.get("authorization").at(-1) ?? "");
}

function deadline(leftS: number): number {
  return Date.now() + leftS * 1000;
}
