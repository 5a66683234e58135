/** What callers give, as the service gets it; wrong arguments are named and nothing is sent. */

import assert from "node:assert/strict";
import test from "node:test";

import { create } from "@bufbuild/protobuf";
import * as specdec from "specdec";

import * as pb from "../src/generated/specdec/v1/generation_pb.js";
import * as statuses from "../src/generated/specdec/v1/status_pb.js";
import * as types from "../src/generated/specdec/v1/types_pb.js";
import { isLoopback } from "../src/address.js";
import { WHOLE, sends, withService } from "./support/scripted.js";

const MAX_SEED = 2n ** 64n - 1n;

test("every option reaches the request", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE)];
    await client.complete("größer 😀", {
      temperature: 0.5,
      topK: 7,
      topP: 0.75,
      minP: 0.25,
      repetitionPenalty: 1.5,
      presencePenalty: 2,
      frequencyPenalty: -1,
      seed: MAX_SEED,
      maxNewTokens: 5,
      numLogprobs: 0,
      logitBias: { 42: -1.5, 7: 2 },
      stop: ["END", "\n\n"],
      stopTokenIds: [9],
      ignoreEos: true,
      speculation: { numDraftTokens: 0, drafter: "ngram", acceptanceRule: "token" },
      whenDetached: "finish",
      requestId: "r",
    });
    const sampling = create(types.SamplingParamsSchema, {
      temperature: 0.5,
      topK: 7,
      topP: 0.75,
      minP: 0.25,
      repetitionPenalty: 1.5,
      presencePenalty: 2,
      frequencyPenalty: -1,
      seed: MAX_SEED,
      maxNewTokens: 5,
      numLogprobs: 0,
      logitBias: { 42: -1.5, 7: 2 },
      stop: ["END", "\n\n"],
      stopTokenIds: [9],
      ignoreEos: true,
    });
    const speculation = { numDraftTokens: 0, drafter: "ngram", acceptanceRule: types.AcceptanceRule.TOKEN };
    const expected = create(pb.GenerateRequestSchema, {
      requestId: "r",
      prompt: { case: "text", value: "größer 😀" },
      sampling,
      speculation,
      whenDetached: pb.DetachedPolicy.FINISH,
    });
    assert.deepEqual(service.requests, [expected]);
  }));

test("a grammar is sent as it is, a schema also as an object", () =>
  withService(async (service, client) => {
    const given = [{ jsonSchema: { type: "object" } }, { jsonSchema: '{"type":"object"}' }, { regex: "a+" }, { lark: "start: /a/" }];
    service.handlers = given.map(() => sends(WHOLE));
    for (const options of given) await client.complete("x", options);
    const grammars = service.requests.map((request) => (request as pb.GenerateRequest).sampling?.grammar);
    assert.deepEqual(grammars, [
      { case: "jsonSchema", value: '{"type":"object"}' },
      { case: "jsonSchema", value: '{"type":"object"}' },
      { case: "regex", value: "a+" },
      { case: "lark", value: "start: /a/" },
    ]);
  }));

test("what is left out is unset, or neutral beside another sampling option", () =>
  withService(async (service, client) => {
    service.handlers = [sends(WHOLE), sends(WHOLE)];
    await client.complete({ tokenIds: [5, 0, 2 ** 32 - 1] }, { requestId: "" });
    await client.chat([{ role: "user", content: "hi" }], { requestId: "", stop: "END", seed: undefined });
    const ids = create(pb.TokenSequenceSchema, { ids: [5, 0, 2 ** 32 - 1] });
    const chat = create(pb.ChatPromptSchema, { messages: [{ role: "user", content: "hi" }] });
    const penalties = { repetitionPenalty: 1, presencePenalty: 0, frequencyPenalty: 0 };
    const neutral = { temperature: 1, topK: 0, topP: 1, minP: 0, ...penalties };
    const sampling = create(types.SamplingParamsSchema, { ...neutral, stop: ["END"] });
    assert.deepEqual(service.requests, [
      create(pb.GenerateRequestSchema, { prompt: { case: "tokens", value: ids } }),
      create(pb.GenerateRequestSchema, { prompt: { case: "chat", value: chat }, sampling }),
    ]);
  }));

test("tokens and metadata go with each call", () => {
  let number = 0;
  const options = { token: async () => `t-${++number}`, metadata: { "x-tenant": "acme" } };
  return withService(async (service, client) => {
    service.handlers = [sends(WHOLE)];
    service.answers = [create(pb.GetModelResponseSchema, { target: { name: "toy" } })];
    await client.complete("x");
    assert.equal((await client.getModel()).target.name, "toy");
    assert.deepEqual(
      service.metadata.map((each) => each.get("authorization")),
      [["Bearer t-1"], ["Bearer t-2"]],
    );
    assert.deepEqual(
      service.metadata.map((each) => each.get("x-tenant")),
      [["acme"], ["acme"]],
    );
  }, options);
});

test("a stream whose token expires goes on with the next one", () => {
  const tokens = ["old", "new", "new"];
  return withService(
    async (service, client) => {
      const expired = { code: 16, details: "the token has expired" };
      service.handlers = [sends(WHOLE.slice(0, 1), expired), sends(WHOLE.slice(1))];
      assert.equal((await client.complete("x")).tokens.length, 7);
      assert.deepEqual(service.metadata.at(-1)?.get("authorization"), ["Bearer new"]);
    },
    { token: () => tokens.shift() },
  );
});

test("a stream whose token expires and is not replaced ends", () =>
  withService(
    async (service, client) => {
      service.handlers = [sends(WHOLE.slice(0, 1), { code: 16, details: "the token has expired" })];
      await assert.rejects(client.complete("x"), { name: "UnauthenticatedError", message: "the token has expired" });
    },
    { token: "old" },
  ));

test("a session is returned as the store has it", () =>
  withService(async (service, client) => {
    const sampling = { temperature: 0.5, seed: MAX_SEED, stop: ["END"], logitBias: { 3: 1 } };
    const fields = { sessionId: "s-1", status: pb.SessionStatus.ACTIVE, epoch: 2n ** 63n, tokens: [1, 2], text: "ab" };
    service.answers = [create(pb.GetSessionResponseSchema, { ...fields, sampling })];
    const session = await client.getSession("s-1");
    assert.deepEqual([session.status, session.epoch, session.sampling.seed], ["active", 2n ** 63n, MAX_SEED]);
    assert.deepEqual([session.sampling.temperature, session.sampling.stop], [0.5, ["END"]]);
    assert.equal(session.finish, undefined);
  }));

test("cancel returns the state after it", () =>
  withService(async (service, client) => {
    service.answers = [create(pb.CancelSessionResponseSchema, { status: pb.SessionStatus.FINISHED })];
    assert.equal(await client.cancel("s-1"), "finished");
  }));

test("status has the metrics of all processes", () =>
  withService(async (service, client) => {
    const sample = { name: "specdec_x", labels: { call: "commit" }, value: 2 };
    const worker = { kind: "target", address: "h:1", state: statuses.WorkerState.ON_TRIAL, samples: [sample] };
    service.answers = [create(statuses.GetStatusResponseSchema, { processes: [{ kind: "coordinator" }, worker] })];
    const [own, target] = await client.getStatus();
    assert.deepEqual([own?.kind, own?.state, target?.state], ["coordinator", undefined, "on_trial"]);
    assert.deepEqual(target?.samples, [sample]);
  }));

const NOBODY = new specdec.Client("127.0.0.1:1");
const x =
  (options: object): (() => unknown) =>
  () =>
    NOBODY.generate("x", options);
const WRONG: [string, RegExp, () => unknown][] = [
  ["prompt", /is empty/, () => NOBODY.generate("")],
  ["prompt", /UTF-8/, () => NOBODY.generate("\ud800")],
  ["prompt", /give text/, () => NOBODY.generate(5 as never)],
  ["prompt.tokenIds", /is empty/, () => NOBODY.generate({ tokenIds: [] })],
  ["prompt.tokenIds", /-1/, () => NOBODY.generate({ tokenIds: [1, -1] })],
  ["prompt.tokenIds", /4294967296/, () => NOBODY.generate({ tokenIds: [2 ** 32] })],
  ["prompt.tokenIds", /1\.5/, () => NOBODY.generate({ tokenIds: [1.5] })],
  ["messages", /is empty/, () => NOBODY.streamChat([])],
  ["messages[0]", /keys \[name,role\]/, () => NOBODY.streamChat([{ role: "user", name: "n" } as never])],
  ["messages[0].content", /give text/, () => NOBODY.streamChat([{ role: "user", content: 5 as never }])],
  ["seed", /2\^64/, x({ seed: -1 })],
  ["seed", /2\^64/, x({ seed: 2n ** 64n })],
  ["seed", /as a bigint/, x({ seed: 2 ** 53 })],
  ["temperature", /\[0, 100\]/, x({ temperature: "hot" })],
  ["temperature", /NaN/, x({ temperature: NaN })],
  ["topP", /\(0, 1\]/, x({ topP: 0 })],
  ["topK", /1\.5/, x({ topK: 1.5 })],
  ["stop", /has 3/, x({ stop: [3] })],
  ["stop", /257 characters/, x({ stop: "😀".repeat(257) })],
  ["stopTokenIds", /a list/, x({ stopTokenIds: 3 })],
  ["stopTokenIds", /257 ids/, x({ stopTokenIds: new Array(257).fill(1) })],
  ["logitBias", /"a"/, x({ logitBias: { a: 1 } })],
  ["logitBias", /token 1 is "a"/, x({ logitBias: { 1: "a" } })],
  ["ignoreEos", /true or false/, x({ ignoreEos: 1 })],
  ["regex", /0 characters/, x({ regex: "" })],
  ["jsonSchema", /give a text/, x({ jsonSchema: [1] })],
  ["lark", /combined with regex/, x({ regex: "a", lark: "start: /a/" })],
  ["ignoreEos", /combined with regex/, x({ regex: "a", ignoreEos: true })],
  ["speculation.numDraftTokens", /33/, x({ speculation: { numDraftTokens: 33 } })],
  ["speculation.acceptanceRule", /"token" or "block"/, x({ speculation: { acceptanceRule: "best" } })],
  ["whenDetached", /"park" or/, x({ whenDetached: "wait" })],
  ["requestId", /give text/, x({ requestId: 5 })],
  ["timeoutS", /seconds/, x({ timeoutS: 0 })],
  ["timeoutS", /seconds/, x({ timeoutS: Infinity })],
  ["sessionId", /is empty/, () => NOBODY.resume("")],
  ["offset", /-1/, () => NOBODY.resume("s", { offset: -1 })],
  ["digest", /16 bytes/, () => NOBODY.resume("s", { digest: new Uint8Array(5) })],
  ["maxRetries", /-1/, () => new specdec.Client("127.0.0.1:1", { maxRetries: -1 })],
  ["connectTimeoutS", /seconds/, () => new specdec.Client("127.0.0.1:1", { connectTimeoutS: 0 })],
  ["address", /without http:\/\/, as localhost:50051/, () => new specdec.Client("http://localhost:50051")],
  ["address", /as localhost:50051/, () => new specdec.Client("localhost")],
  ["address", /plain text/, () => new specdec.Client("example.org:443")],
  ["tls", /the key is missing/, () => new specdec.Client("h:1", { tls: { certificate: "x" } })],
  ["tls", /ENOENT/, () => new specdec.Client("h:1", { tls: { ca: "/nowhere/ca.pem" } })],
];
for (const [field, problem, call] of WRONG) {
  test(`wrong ${field} is named: ${problem}`, () => {
    assert.throws(call, (error) => {
      assert.ok(error instanceof specdec.InvalidArgumentError);
      assert.deepEqual(Object.keys(error.violations), [field]);
      assert.match(error.violations[field] ?? "", problem);
      return true;
    });
  });
}

test("unknown options are type errors that name the known ones", () => {
  assert.throws(x({ temprature: 1 }), { name: "TypeError", message: /"temprature"; there are temperature/ });
  assert.throws(x({ speculation: { k: 1 } }), { name: "TypeError", message: /"k"; there are numDraftTokens/ });
  assert.throws(() => new specdec.Client("127.0.0.1:1", { retries: 1 } as object), { name: "TypeError" });
});

test("errors do not quote long prompts", () => {
  assert.throws(
    () => NOBODY.generate(["secret".repeat(20)] as never),
    (error: Error) => !error.message.includes("secret"),
  );
});

test("loopback is told from other addresses", () => {
  const own = [
    "127.0.0.1:1",
    "localhost:1",
    "[::1]:1",
    "unix:/run/x",
    "ipv4:127.0.0.1:1,127.0.0.2:1",
    "dns:///localhost:1",
  ];
  const others = ["10.0.0.1:1", "example.org:1", "[::]:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///example.org:1"];
  assert.deepEqual(
    own.filter((address) => !isLoopback(address)),
    [],
  );
  assert.deepEqual(others.filter(isLoopback), []);
});
