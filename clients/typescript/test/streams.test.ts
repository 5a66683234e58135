/** Streams: what they yield, and how they survive breaks. */

import assert from "node:assert/strict";
import test from "node:test";

import { status as Code } from "@grpc/grpc-js";
import * as specdec from "specdec";

import * as pb from "../src/generated/specdec/v1/generation_pb.js";
import {
  GONE,
  SESSION,
  TEXT,
  TOKENS,
  WHOLE,
  chunk,
  digestAt,
  hangs,
  refusal,
  sends,
  withService,
} from "./support/scripted.js";

function resumeRequest(request: unknown): pb.ResumeRequest {
  assert.equal((request as pb.ResumeRequest).$typeName, "specdec.v1.ResumeRequest");
  return request as pb.ResumeRequest;
}

test("chunks add up to the completion", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE)];
    const completion = await client.complete("x");
    assert.equal(completion.text, TEXT);
    assert.deepEqual(completion.tokens, TOKENS);
    assert.equal(completion.finishReason, "stop");
    assert.deepEqual(completion.usage, { numPromptTokens: 3, numCompletionTokens: 7 });
    assert.equal(specdec.acceptanceRate(completion.statistics), 0.5);
    assert.equal(specdec.tokensPerS(completion.statistics), 3.5);
  }));

for (const code of [Code.UNAVAILABLE, Code.INTERNAL, Code.CANCELLED, Code.UNKNOWN]) {
  for (const count of [1, 2, 3]) {
    test(`${Code[code]} after ${count} chunks: the stream resumes where it broke`, () =>
      withService(async (service, client) => {
        service.handlers = [sends(WHOLE.slice(0, count), { code, details: "gone" }), sends(WHOLE.slice(count))];
        assert.deepEqual((await client.complete("x")).tokens, TOKENS);
        const resumed = resumeRequest(service.requests[1]);
        const have = WHOLE[count]?.offset ?? -1;
        assert.deepEqual([resumed.sessionId, resumed.offset], [SESSION, have]);
        assert.deepEqual([...resumed.digest], [...digestAt(have)]);
        assert.deepEqual([...resumed.proof], new Array(16).fill(99 + count));
        assert.deepEqual(resumed.tokens, TOKENS.slice(0, have));
        assert.equal(resumed.origins.length, have);
      }));
  }
}

test("a break after every chunk loses nothing", () =>
  withService(async (service, client) => {
    service.handlers = WHOLE.map((each) => sends([each], GONE));
    const completion = await client.complete("x");
    assert.deepEqual([completion.tokens, completion.text], [TOKENS, TEXT]);
    assert.deepEqual(
      service.requests.map((request) => request.$typeName.slice("specdec.v1.".length)),
      ["GenerateRequest", "ResumeRequest", "ResumeRequest", "ResumeRequest"],
    );
  }));

test("before the first chunk the request is repeated under its id", () =>
  withService(async (service, client) => {
    service.handlers = [sends([], GONE), sends([], GONE), sends(WHOLE)];
    assert.equal((await client.complete("x", { seed: 1 })).text, TEXT);
    const [first, second, third] = service.requests as pb.GenerateRequest[];
    assert.match(first?.requestId ?? "", /^[0-9a-f-]{36}$/);
    assert.deepEqual(second, first);
    assert.deepEqual(third, first);
  }));

test("two calls have two request ids", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE), sends(WHOLE)];
    await client.complete("x");
    await client.complete("x");
    const [first, second] = service.requests as pb.GenerateRequest[];
    assert.notEqual(first?.requestId, second?.requestId);
  }));

test("a stream that ends early without an error is resumed", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(0, 2)), sends(WHOLE.slice(2))];
    assert.equal((await client.complete("x")).text, TEXT);
  }));

test("a fenced session is resumed", () =>
  withService(async (service, client) => {
    const fenced = refusal(Code.ABORTED, "SESSION_FENCED", "another coordinator owns it");
    service.handlers = [sends(WHOLE.slice(0, 1), fenced), sends(WHOLE.slice(1))];
    assert.equal((await client.complete("x")).text, TEXT);
  }));

test("an error after the last chunk is ignored", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE, GONE)];
    assert.equal((await client.complete("x")).text, TEXT);
    assert.equal(service.requests.length, 1);
  }));

test("repeated chunks are dropped", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(0, 3), GONE), sends(WHOLE)];
    const completion = await client.complete("x");
    assert.deepEqual([completion.tokens, completion.text], [TOKENS, TEXT]);
  }));

test("an overlapping chunk is cut by token, also in text with characters of two units", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(0, 2), GONE), sends([chunk(1, 3)])];
    const chunks: specdec.Chunk[] = [];
    for await (const each of client.generate("x")) chunks.push(each);
    const last = chunks.at(-1);
    assert.deepEqual([last?.offset, last?.tokens, last?.text], [3, [4, 5, 6, 7], " 😀 there was."]);
    assert.deepEqual(last?.pieces, [" 😀", " there", "", " was.", ""]);
    assert.deepEqual(last?.origins, ["accepted", "accepted", "accepted", "bonus"]);
  }));

const CONTRADICTIONS: [ReturnType<typeof chunk>, RegExp][] = [
  [chunk(2), /missing/],
  [chunk(0, 0, { digest: new Uint8Array(16) }), /another digest/],
  [chunk(0, 0, { tokens: [1, 8] }), /other tokens/],
  [chunk(0, 1, { tokens: [1, 8, 3] }), /other tokens/],
  [chunk(1, 1, { sessionId: "s-2" }), /s-2/],
];
for (const [again, what] of CONTRADICTIONS) {
  test(`a chunk that contradicts is data loss: ${what}`, () =>
    withService(async (service, client) => {
      service.handlers = [sends(WHOLE.slice(0, 1), GONE), sends([again])];
      const stream = client.generate("x");
      assert.equal((await stream.next()).value?.text, "Once upon");
      await assert.rejects(stream.next(), (error: Error) => {
        assert.ok(error instanceof specdec.DataLossError);
        assert.match(error.message, what);
        return true;
      });
    }));
}

test("the service's DATA_LOSS ends the stream", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(0, 1), refusal(Code.DATA_LOSS, "STORE_ROLLED_BACK", "the store went back"))];
    await assert.rejects(client.complete("x"), {
      name: "DataLossError",
      message: "the store went back",
      code: Code.DATA_LOSS,
    });
    assert.equal(service.requests.length, 1);
  }));

test("resume starts at its offset", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(1))];
    const stream = client.resume(SESSION, { offset: 2, digest: digestAt(2) });
    assert.equal(stream.sessionId, SESSION);
    assert.equal((await stream.result()).text, " a 😀 there was.");
    const request = resumeRequest(service.requests[0]);
    assert.deepEqual([request.offset, [...request.digest], request.proof.length], [2, [...digestAt(2)], 0]);
  }));

test("tokens before the offset are dropped", () =>
  withService(async (service, client) => {
    service.handlers = [sends([chunk(0, 3)])];
    assert.deepEqual((await client.resume(SESSION, { offset: 3 }).result()).tokens, [4, 5, 6, 7]);
  }));

test("a resumed session with another digest is data loss", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE.slice(0, 1))];
    const stream = client.resume(SESSION, { offset: 2, digest: new Uint8Array(16) });
    await assert.rejects(stream.result(), { name: "DataLossError" });
  }));

for (const changes of [{ origins: [1, 9] }, { origins: [1] }, { textEnds: [] }]) {
  test(`a chunk that cannot be read is refused: ${JSON.stringify(changes)}`, () =>
    withService(async (service, client) => {
      service.handlers = [sends([chunk(0, 0, changes)])];
      await assert.rejects(client.complete("x"), { name: "ModelMismatchError", message: /update/ });
    }));
}

test("leaving the loop ends the call", () =>
  withService(async (service, client) => {
    const cancelled = new Promise<void>((resolve) => (service.handlers = [hangs(WHOLE.slice(0, 1), resolve)]));
    const stream = client.generate("x");
    for await (const each of stream) {
      assert.equal(each.offset, 0);
      break;
    }
    await cancelled;
    await assert.rejects(stream.result(), { message: /the session has not finished/ });
  }));

test("close ends a loop that waits", () =>
  withService(async (service, client) => {
    const cancelled = new Promise<void>((resolve) => (service.handlers = [hangs(WHOLE.slice(0, 1), resolve)]));
    const stream = client.generate("x");
    await stream.next();
    const waiting = stream.next();
    await stream.close();
    assert.deepEqual(await waiting, { done: true, value: undefined });
    await cancelled;
  }));

test("a signal ends the stream with its reason", () =>
  withService(async (service, client) => {
    const cancelled = new Promise<void>((resolve) => (service.handlers = [hangs(WHOLE.slice(0, 1), resolve)]));
    const controller = new AbortController();
    const stream = client.generate("x", { signal: controller.signal });
    await stream.next();
    const waiting = stream.next();
    controller.abort();
    await assert.rejects(waiting, { name: "AbortError" });
    await cancelled;
    await assert.rejects(stream.next(), { name: "AbortError" });
  }));

test("a signal that has gone off sends nothing", () =>
  withService(async (service, client) => {
    await assert.rejects(
      client.complete("x", { signal: AbortSignal.abort("reason") }),
      (reason) => reason === "reason",
    );
    assert.equal(service.requests.length, 0);
  }));

test("a signal ends a pause", () =>
  withService(async (service, client) => {
    service.handlers = [sends([], refusal(Code.UNAVAILABLE, "UNAVAILABLE", "loading", { retryAfterS: 300 }))];
    await assert.rejects(client.complete("x", { signal: AbortSignal.timeout(200) }), { name: "TimeoutError" });
  }));

test("cancel ends the session", () =>
  withService(async (service, client) => {
    let ended = (): void => undefined;
    const finish = create(pb.FinishReason.CANCELLED);
    service.handlers = [
      (call) => {
        call.send(WHOLE[0] ?? {});
        ended = () => {
          call.send({ sessionId: SESSION, offset: 2, digest: digestAt(2), finish });
          call.end();
        };
      },
    ];
    service.answers = [{ $typeName: "specdec.v1.CancelSessionResponse", status: pb.SessionStatus.CANCELLED }];
    const stream = client.generate("x");
    await stream.next();
    await stream.cancel();
    ended();
    const completion = await stream.result();
    assert.deepEqual([completion.text, completion.finishReason], ["Once upon", "cancelled"]);
  }));

test("closing the client ends its streams", () =>
  withService(async (service, client) => {
    service.handlers = [hangs(WHOLE.slice(0, 1))];
    const stream = client.generate("x");
    await stream.next();
    const waiting = stream.next();
    client.close();
    await assert.rejects(waiting, { message: "the client was closed during the call" });
    await assert.rejects(client.getModel(), { message: /the client is closed/ });
  }));

function create(reason: pb.FinishReason): { reason: pb.FinishReason } {
  return { reason };
}
