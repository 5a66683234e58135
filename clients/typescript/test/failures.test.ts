/** Errors that the client throws, and those that it tries again after. */

import assert from "node:assert/strict";
import http2 from "node:http2";
import net from "node:net";
import test from "node:test";

import { create, toBinary } from "@bufbuild/protobuf";
import { Server, ServerCredentials, status as Code } from "@grpc/grpc-js";
import * as specdec from "specdec";

import * as pb from "../src/generated/specdec/v1/generation_pb.js";
import { Attempts } from "../src/retry.js";
import { GONE, TEXT, TOKENS, WHOLE, hangs, refusal, sends, withService } from "./support/scripted.js";

const FINAL: [Code, string, string][] = [
  [Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "InvalidArgumentError"],
  [Code.NOT_FOUND, "SESSION_NOT_FOUND", "NotFoundError"],
  [Code.ALREADY_EXISTS, "REQUEST_ID_REUSED", "AlreadyExistsError"],
  [Code.FAILED_PRECONDITION, "MODEL_MISMATCH", "ModelMismatchError"],
  [Code.FAILED_PRECONDITION, "CONTEXT_TOO_SHORT", "ContextTooShortError"],
  [Code.FAILED_PRECONDITION, "NON_FINITE_LOGITS", "NonFiniteLogitsError"],
  [Code.UNAUTHENTICATED, "UNAUTHENTICATED", "UnauthenticatedError"],
  [Code.PERMISSION_DENIED, "PERMISSION_DENIED", "PermissionDeniedError"],
  [Code.DATA_LOSS, "STORE_ROLLED_BACK", "DataLossError"],
  [Code.INTERNAL, "INTERNAL", "InternalError"],
];
for (const [code, reason, name] of FINAL) {
  test(`${reason} throws ${name} at once`, () =>
    withService(async (service, client) => {
      service.handlers = [sends([], refusal(code, reason, "a sentence"))];
      await assert.rejects(client.complete("x"), (error) => {
        assert.ok(error instanceof specdec.SpecdecError);
        assert.deepEqual([error.name, error.code, error.reason, error.message], [name, code, reason, "a sentence"]);
        return true;
      });
      assert.equal(service.requests.length, 1);
    }));
}

test("an invalid argument names its fields", () =>
  withService(async (service, client) => {
    const violations = { "sampling.top_p": "is 7; give a number in (0, 1]" };
    service.handlers = [sends([], refusal(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "wrong", { violations }))];
    await assert.rejects(client.complete("x"), { violations });
  }));

for (const [code, reason] of [
  [Code.RESOURCE_EXHAUSTED, "OVERLOADED"],
  [Code.UNAVAILABLE, "UNAVAILABLE"],
] as const) {
  test(`${reason}: the pause that the server asks for is kept`, async () => {
    const seen: specdec.Retry[] = [];
    await withService(
      async (service, client) => {
        service.handlers = [sends([], refusal(code, reason, "later", { retryAfterS: 0.3 })), sends(WHOLE)];
        const began = performance.now();
        assert.equal((await client.complete("x")).text, TEXT);
        assert.ok(performance.now() - began >= 300);
      },
      { onRetry: (retry) => seen.push(retry) },
    );
    assert.deepEqual(
      seen.map((retry) => retry.failure.message),
      ["later"],
    );
    assert.ok((seen[0]?.pauseS ?? 0) > 0.3);
  });
}

test("a pause past the deadline throws at once", () =>
  withService(async (service, client) => {
    service.handlers = [
      sends([], refusal(Code.RESOURCE_EXHAUSTED, "OVERLOADED", "the queue is full", { retryAfterS: 3600 })),
    ];
    await assert.rejects(client.complete("x", { timeoutS: 100 }), { name: "OverloadedError", retryAfterS: 3600 });
  }));

test("RESOURCE_EXHAUSTED without RetryInfo is grpc's own and final", () =>
  withService(async (service, client) => {
    service.handlers = [sends([], { code: Code.RESOURCE_EXHAUSTED, details: "too much" })];
    await assert.rejects(client.complete("x"), { name: "OverloadedError", message: "too much" });
  }));

test("a request that is too large for the server is an invalid argument", () =>
  withService(async (service, client) => {
    const details = "Received message larger than max (700000 vs. 589824)";
    service.handlers = [sends([], { code: Code.RESOURCE_EXHAUSTED, details })];
    await assert.rejects(client.complete("x"), {
      name: "InvalidArgumentError",
      message: /has 700000 bytes; the maximum is 589824/,
    });
  }));

test("retries are counted since the last new chunk", () =>
  withService(
    async (service, client) => {
      const [one, two] = [WHOLE.slice(0, 1), WHOLE.slice(1, 2)];
      const gone = sends([], GONE);
      // repeated chunks do not reset the count
      service.handlers = [gone, gone, sends(one), gone, sends(two), gone, sends(two), gone];
      const message = /session s-1 can be resumed from token 3/;
      await assert.rejects(client.complete("x"), { name: "UnavailableError", message });
      assert.equal(service.handlers.length, 1);
    },
    { maxRetries: 2 },
  ));

test("a hanging server exceeds the deadline", () =>
  withService(async (service, client) => {
    service.handlers = [hangs([])];
    const message = "deadline of 0.5 s exceeded; session s-1 can be resumed from token 2";
    const stream = client.resume("s-1", { offset: 2, timeoutS: 0.5 });
    await assert.rejects(stream.result(), { name: "DeadlineExceededError", message, code: Code.DEADLINE_EXCEEDED });
  }));

test("an address without a server fails after connectTimeoutS", async () => {
  const address = `127.0.0.1:${await unusedPort()}`;
  const client = new specdec.Client(address, { connectTimeoutS: 0.2 });
  const message = `no specdec answers on ${address} (connect ECONNREFUSED ${address})`;
  for (const call of [() => client.connect(), () => client.complete("x"), () => client.getModel()]) {
    await assert.rejects(call(), { name: "UnavailableError", message });
  }
  client.close();
});

test("a server that comes later is found", async () => {
  const port = await unusedPort();
  const client = new specdec.Client(`127.0.0.1:${port}`);
  const answer = client.complete("x");
  await withLateServer(port, async () => assert.equal((await answer).text, TEXT));
  client.close();
});

test("a server of another kind is named", async () => {
  const server = new Server();
  const port = await new Promise<number>((resolve) =>
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (_, bound) => resolve(bound)),
  );
  const client = new specdec.Client(`127.0.0.1:${port}`);
  await client.connect();
  await assert.rejects(client.complete("x"), { name: "ModelMismatchError", message: /not a specdec coordinator/ });
  client.close();
  server.forceShutdown();
});

test("a server of plain text is named where TLS was asked for", () =>
  withService(async (service, _, address) => {
    const client = new specdec.Client(address, { tls: {}, connectTimeoutS: 0.3 });
    await assert.rejects(client.complete("x"), { name: "UnavailableError", message: /it speaks plain text/ });
    assert.equal(service.requests.length, 0);
    client.close();
  }));

test("a stream that breaks in mid-message is resumed", async () => {
  const bytes = framed(1);
  const requests: string[] = [];
  const server = http2.createServer();
  server.on("stream", (stream, headers) => {
    stream.on("error", () => undefined);
    requests.push(String(headers[":path"]));
    stream.respond({ ":status": 200, "content-type": "application/grpc" }, { waitForTrailers: requests.length > 2 });
    if (requests.length === 1) {
      // the first chunk, and half of the second; then the connection is cut
      stream.write(Buffer.concat([framed(0), bytes.subarray(0, 9)]), () =>
        setImmediate(() => stream.session?.destroy()),
      );
    } else if (requests.length === 2) {
      stream.write(bytes.subarray(0, 9), () => stream.close(http2.constants.NGHTTP2_INTERNAL_ERROR));
    } else {
      stream.on("wantTrailers", () => stream.sendTrailers({ "grpc-status": "0" }));
      stream.end(Buffer.concat([bytes, framed(2), framed(3)]));
    }
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const client = new specdec.Client(`127.0.0.1:${(server.address() as net.AddressInfo).port}`);
  const completion = await client.complete("x");
  assert.deepEqual([completion.tokens, completion.text], [TOKENS, TEXT]);
  const service = "/specdec.v1.GenerationService";
  assert.deepEqual(requests, [`${service}/Generate`, `${service}/Resume`, `${service}/Resume`]);
  client.close();
  server.close();
});

test("pauses double up to 5 s, less at most half", () => {
  const gone = new specdec.UnavailableError("gone");
  const limits = { timeoutS: 600, connectTimeoutS: 20, now: () => 0 };
  const [longest, shortest] = [0, 1 - Number.EPSILON].map(
    (chance) => new Attempts({ ...limits, uniform: () => chance }),
  );
  const pauses = (attempts: Attempts | undefined) => Array.from({ length: 8 }, () => attempts?.pauseS(gone, true));
  assert.deepEqual(pauses(longest), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]);
  assert.ok(pauses(shortest).every((pause, number) => (pause ?? 0) >= Math.min(0.1 * 2 ** number, 5) / 2));
});

test("an address that never answered has a shorter budget", () => {
  let now = 0;
  const attempts = new Attempts({ timeoutS: 600, connectTimeoutS: 20, now: () => now });
  now = 30;
  assert.equal(attempts.pauseS(new specdec.UnavailableError("gone"), false), undefined);
  assert.ok(attempts.pauseS(new specdec.UnavailableError("gone"), true));
  assert.equal(attempts.pauseS(new specdec.DataLossError("gone"), true), undefined);
});

/** Returns one chunk as gRPC frames it, in whichever response it is sent. */
function framed(number: number): Buffer {
  const chunk = create(pb.GenerateResponseSchema, WHOLE[number] ?? {});
  const isFirst = number === 0;
  const bytes = isFirst
    ? toBinary(pb.GenerateResponseSchema, chunk)
    : toBinary(pb.ResumeResponseSchema, create(pb.ResumeResponseSchema, { chunk }));
  const head = Buffer.alloc(5);
  head.writeUInt32BE(bytes.length, 1);
  return Buffer.concat([head, bytes]);
}

async function unusedPort(): Promise<number> {
  const server = net.createServer();
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as net.AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
}

async function withLateServer(port: number, work: () => Promise<void>): Promise<void> {
  const { ScriptedService } = await import("./support/scripted.js");
  const service = new ScriptedService();
  service.handlers = [sends(WHOLE)];
  await service.listen(undefined, port);
  await work();
  service.server.forceShutdown();
}
