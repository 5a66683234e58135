/**
 * OpenAI's npm package, as it is, against the gateway at SPECDEC_BASE_URL. SPECDEC_EXPECTED is what specdec's own client
 * got for the same prompt: { model, prompt, text, tokens (texts), logprobs }.
 */

import assert from "node:assert/strict";
import test from "node:test";

import OpenAI from "openai";

const { model, prompt, text, tokens, logprobs } = JSON.parse(process.env.SPECDEC_EXPECTED);
const client = new OpenAI({ baseURL: process.env.SPECDEC_BASE_URL, apiKey: "none", maxRetries: 0 });
// few draft tokens: else the whole text may be one round, and so one piece
const specdec = { ignore_eos: true, num_draft_tokens: 2 };
const common = { model, temperature: 0, max_tokens: tokens.length, specdec };
const messages = [{ role: "user", content: prompt }];

test("models are listed", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
});

test("a completion has the text and its usage", async () => {
  const answer = await client.completions.create({ ...common, prompt });
  assert.equal(answer.choices[0].text, text);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, tokens.length);
});

test("a completion streams", async () => {
  const pieces = [];
  for await (const event of await client.completions.create({ ...common, prompt, stream: true })) {
    pieces.push(event.choices[0].text);
  }
  assert.equal(pieces.join(""), text);
  assert.ok(pieces.length > 2);
});

test("a chat has the message", async () => {
  const answer = await client.chat.completions.create({ ...common, messages });
  assert.deepEqual([answer.choices[0].message.role, answer.choices[0].message.content], ["assistant", text]);
});

test("a chat streams, with usage at its end", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const events = [];
  for await (const event of await client.chat.completions.create({ ...common, messages, ...options }))
    events.push(event);
  assert.equal(events.map((event) => event.choices[0]?.delta.content ?? "").join(""), text);
  assert.equal(events.at(-1).usage.completion_tokens, tokens.length);
});

test("the package's own stream helper gathers the message", async () => {
  const stream = client.chat.completions.stream({ ...common, messages });
  assert.equal((await stream.finalChatCompletion()).choices[0].message.content, text);
});

test("log probabilities are those of specdec's own client", async () => {
  const answer = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });
  const entries = answer.choices[0].logprobs.content;
  assert.deepEqual(
    entries.map((entry) => entry.token),
    tokens,
  );
  entries.forEach((entry, number) => assert.ok(Math.abs(entry.logprob - logprobs[number]) < 1e-4)); // the rounds differ
  assert.ok(entries.every((entry) => entry.top_logprobs.length === 2));
});

test("a stream that is aborted ends, and the gateway serves on", async () => {
  const stream = await client.completions.create({ ...common, prompt, stream: true });
  for await (const event of stream) {
    assert.equal(event.object, "text_completion");
    stream.controller.abort();
  }
  assert.equal((await client.completions.create({ ...common, prompt })).choices[0].text, text);
});

test("leaving the loop ends the stream", async () => {
  const stream = await client.completions.create({ ...common, prompt, stream: true });
  for await (const event of stream) {
    assert.equal(event.object, "text_completion");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("a signal ends a call", async () => {
  const call = client.completions.create({ ...common, prompt }, { signal: AbortSignal.abort() });
  await assert.rejects(call, OpenAI.APIUserAbortError);
});

test("a wrong field is a BadRequestError with its name", async () => {
  await assert.rejects(client.completions.create({ ...common, prompt, max_tokens: 5000 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.status, error.param], [400, "max_tokens"]);
    assert.match(error.message, /this server's limit is 4096/);
    return true;
  });
});

test("an unknown model is a NotFoundError", async () => {
  const call = client.completions.create({ ...common, model: "gpt-6", prompt });
  await assert.rejects(call, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
});
