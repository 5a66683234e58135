// What the form asks for.

const part = (id) => document.getElementById(id);
const MAX_RANDOM_SEED = 2 ** 32;

/** Returns the request as the form has it; null where a field is empty. */
export function asked(model) {
  return {
    model,
    form: part("form").value,
    prompt: part("prompt").value,
    drafter: part("drafter").value,
    numDraftTokens: number("draft-tokens"),
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
  };
}

/** Returns the request that both sides of a comparison are made of: with a seed, which both have. */
export function seeded(request) {
  return { ...request, seed: request.seed ?? Math.floor(Math.random() * MAX_RANDOM_SEED) };
}

/** Shows what the service offers: the model's name, its drafters, and how much it drafts at most. */
export function showOffer({ id, specdec }) {
  part("model").textContent = `${id}, ${specdec.context_length} tokens of context`;
  const names = ["", ...specdec.drafters];
  part("drafter").replaceChildren(...names.map((name) => new Option(name || "automatic", name)));
  part("draft-tokens").max = specdec.max_draft_tokens;
}

/** Returns the drafter in words: the one that was asked for, or those that the service chooses from. */
export function drafterInWords(request, { specdec }) {
  if (request.numDraftTokens === 0 || !specdec.drafters.length) return "none, this is plain decoding";
  return request.drafter || `chosen by the service in each round, among ${specdec.drafters.join(", ")}`;
}

function number(id) {
  const { value } = part(id);
  return value === "" ? null : Number(value);
}
