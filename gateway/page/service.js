// Asks the service: which model it has, and for texts, whose two forms become the same pieces here.

import { events } from "./stream.js";

const NUM_ALTERNATIVES = 3;

/** An error that the service described. `param` is the field that it is about, null where there is none. */
export class Refused extends Error {
  constructor(status, { message, param = null } = {}) {
    super(message ?? `The service answered with status ${status}.`);
    this.status = status;
    this.param = param;
  }
}

/** Returns the served model as /v1/models describes it. Throws Refused. */
export async function servedModel(key) {
  const response = await answered("v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

/**
 * Yields `{tokens, rounds, statistics}` for each piece of a text; `statistics` is null before the last one. A token is
 * `{id, text, origin, probability, alternatives}`; its probability is null where the service does not give it. A round
 * that ends in the piece is `{drafter, num_draft_tokens, depth, end}`; the service may not know of all.
 */
export async function* pieces(request, key, signal) {
  const response = await opened(request, key, signal);
  for await (const event of events(response.body)) {
    if (event.error) throw new Refused(response.status, event.error);
    const choice = event.choices[0];
    if (!choice?.specdec) continue;
    const { rounds = [], statistics = null } = choice.specdec;
    yield { tokens: tokensOf(choice), rounds, statistics };
  }
}

async function opened(request, key, signal) {
  try {
    return await asked(request, true, key, signal);
  } catch (problem) {
    if (problem.param !== "logprobs") throw problem;
    return await asked(request, false, key, signal); // this service has no tokenizer for the texts of alternatives
  }
}

function asked(request, withProbabilities, key, signal) {
  const isChat = request.form === "chat";
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const body = JSON.stringify({ ...bodyOf(request), ...(withProbabilities && wishes(isChat)) });
  const sent = { ...headers(key), "content-type": "application/json" };
  return answered(path, { method: "POST", headers: sent, body, signal });
}

function bodyOf({ form, prompt, model, maxTokens, temperature, seed, drafter, numDraftTokens }) {
  return {
    model,
    ...(form === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: maxTokens,
    temperature,
    ...(seed !== null && { seed }),
    stream: true,
    stream_options: { include_usage: true },
    specdec: {
      ...(drafter && numDraftTokens !== 0 && { drafter }),
      ...(numDraftTokens !== null && { num_draft_tokens: numDraftTokens }),
    },
  };
}

function wishes(isChat) {
  return isChat ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES };
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function answered(path, options) {
  const response = await fetch(path, options);
  if (response.ok) return response;
  const content = await response.json().catch(() => ({}));
  throw new Refused(response.status, content.error);
}

function tokensOf({ specdec, logprobs }) {
  const known = logprobs ? knownProbabilities(logprobs) : [];
  return (specdec.tokens ?? []).map((token, place) => ({
    ...token,
    probability: known[place]?.probability ?? null,
    alternatives: known[place]?.alternatives ?? [],
  }));
}

/** Returns each token's probability and the most probable tokens of its place: of a chat, or of a text. */
function knownProbabilities(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((entry) => ({
      probability: Math.exp(entry.logprob),
      alternatives: entry.top_logprobs.map((top) => ({ text: top.token, probability: Math.exp(top.logprob) })),
    }));
  }
  return logprobs.token_logprobs.map((logprob, place) => ({
    probability: Math.exp(logprob),
    alternatives: Object.entries(logprobs.top_logprobs[place])
      .map(([text, top]) => ({ text, probability: Math.exp(top) }))
      .sort((one, other) => other.probability - one.probability),
  }));
}
