/** What is allowed in sampling and speculation options, and what is wrong with a value. */

import type { SamplingOptions, SpeculationOptions } from "./values.js";

export const MAX_UINT32 = 2 ** 32 - 1;
const MAX_UINT64 = 2n ** 64n - 1n;
const MAX_DRAFT_TOKENS = 32;
const MAX_LOGPROBS = 20;
const MAX_STOP_TEXTS = 16;
const MAX_STOP_CHARACTERS = 256;
const MAX_STOP_TOKENS = 256;
const MAX_BIASES = 1024;
const MAX_GRAMMAR_CHARACTERS = 65_536;
const BIAS_LIMIT = 100;
const MIN_REPETITION_PENALTY = Math.fround(0.01); // as the protocol has it: a 32-bit float
const MAX_SHOWN_CHARACTERS = 40;

/** Returns what is wrong with a value, and what would be right; undefined where nothing is. */
type Check = (value: unknown) => string | undefined;

const SAMPLING: Readonly<Record<keyof SamplingOptions, Check>> = {
  temperature: number(0, 100),
  topK: wholeNumber(0),
  topP: number(0, 1, true),
  minP: number(0, 1),
  repetitionPenalty: number(MIN_REPETITION_PENALTY, 100),
  presencePenalty: number(-100, 100),
  frequencyPenalty: number(-100, 100),
  seed: seedProblem,
  maxNewTokens: wholeNumber(1),
  numLogprobs: wholeNumber(0, MAX_LOGPROBS),
  logitBias: biasesProblem,
  stop: stopProblem,
  stopTokenIds: stopTokensProblem,
  ignoreEos: switchProblem,
  jsonSchema: (value) => (isObject(value) ? undefined : grammarProblem(value)),
  regex: grammarProblem,
  lark: grammarProblem,
};

/** The options of which at most one is given. */
export const GRAMMARS = ["jsonSchema", "regex", "lark"] as const;

const SPECULATION: Readonly<Record<keyof SpeculationOptions, Check>> = {
  numDraftTokens: wholeNumber(0, MAX_DRAFT_TOKENS),
  drafter: (value) => (typeof value === "string" ? undefined : `is ${shown(value)}; give a drafter's name`),
  acceptanceRule: oneOf("token", "block"),
};

export const SAMPLING_NAMES = Object.keys(SAMPLING) as (keyof SamplingOptions)[];

/** Returns the problems of all sampling options by name. */
export function samplingProblems(options: SamplingOptions): Record<string, string> {
  const [first, second] = GRAMMARS.filter((name) => options[name] !== undefined);
  const problems = problemsOf(SAMPLING, options, "");
  if (second) problems[second] = `cannot be combined with ${first}; give one of ${GRAMMARS.join(", ")}`;
  if (first && options.ignoreEos) problems["ignoreEos"] = `cannot be combined with ${first}; leave it out`;
  return problems;
}

/** Returns the problems of all speculation options by name. Throws TypeError for an unknown name. */
export function speculationProblems(options: unknown): Record<string, string> {
  if (options === undefined) return {};
  if (typeof options !== "object" || options === null) return { speculation: `is ${shown(options)}; give an object` };
  refuseUnknown(options, Object.keys(SPECULATION), "speculation option");
  return problemsOf(SPECULATION, options, "speculation.");
}

/** Throws TypeError for a name that is none of the known ones. */
export function refuseUnknown(options: object, known: readonly string[], what: string): void {
  const wrong = Object.keys(options).find((name) => !known.includes(name));
  if (wrong !== undefined) throw new TypeError(`unknown ${what} ${shown(wrong)}; there are ${known.join(", ")}`);
}

/** Returns what is wrong with a list of token ids. */
export function tokenIdsProblem(ids: unknown): string | undefined {
  if (!Array.isArray(ids)) return `is ${shown(ids)}; give a list of token ids`;
  const wrong: unknown = ids.find((id) => !isWhole(id, 0, MAX_UINT32));
  return ids.every((id) => isWhole(id, 0, MAX_UINT32))
    ? undefined
    : `has ${shown(wrong)}, which is no token id; give integers of at least 0`;
}

/** Returns a check that a value is one of some names. */
export function oneOf(...names: readonly string[]): Check {
  return (value) =>
    typeof value === "string" && names.includes(value)
      ? undefined
      : `is ${shown(value)}; give ${names.map((name) => `"${name}"`).join(" or ")}`;
}

/** Returns a check that a value is an integer in [low, high]. */
export function wholeNumber(low: number, high = MAX_UINT32): Check {
  const range = high === MAX_UINT32 ? `of at least ${low}` : `from ${low} to ${high}`;
  return (value) =>
    isWhole(value, low, high) ? undefined : `is ${shown(value)}; give a whole number ${range}, or leave it out`;
}

/** Returns a short form of a wrong value, without quoting a whole prompt. */
export function shown(value: unknown): string {
  const text = typeof value === "string" ? JSON.stringify(value) : String(value);
  return text.length <= MAX_SHOWN_CHARACTERS ? text : `a ${typeof value} of ${text.length} characters`;
}

function problemsOf(
  checks: Readonly<Record<string, Check>>,
  options: Readonly<Record<string, unknown>> | object,
  prefix: string,
): Record<string, string> {
  const values = options as Readonly<Record<string, unknown>>;
  const found: [string, string][] = [];
  for (const [name, check] of Object.entries(checks)) {
    const problem = values[name] === undefined ? undefined : check(values[name]);
    if (problem !== undefined) found.push([`${prefix}${name}`, problem]);
  }
  return Object.fromEntries(found);
}

function isWhole(value: unknown, low: number, high: number): boolean {
  return typeof value === "number" && Number.isInteger(value) && value >= low && value <= high;
}

function number(low: number, high: number, excludesLow = false): Check {
  const interval = `${excludesLow ? "(" : "["}${low}, ${high}]`;
  return (value) => {
    const isInside = typeof value === "number" && (excludesLow ? low < value : low <= value) && value <= high;
    return isInside ? undefined : `is ${shown(value)}; give a number in ${interval}, or leave it out`;
  };
}

function seedProblem(value: unknown): string | undefined {
  if (typeof value === "bigint" ? value >= 0n && value <= MAX_UINT64 : isWhole(value, 0, Number.MAX_SAFE_INTEGER)) {
    return undefined;
  }
  return `is ${shown(value)}; give a whole number from 0 to 2^64 - 1, past 2^53 - 1 as a bigint, or leave it out`;
}

function biasesProblem(value: unknown): string | undefined {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    return `is ${shown(value)}; give an object from token ids to numbers`;
  }
  const entries = Object.entries(value);
  if (entries.length > MAX_BIASES) return `has ${entries.length} entries; the maximum is ${MAX_BIASES}`;
  for (const [token, bias] of entries) {
    if (!/^\d+$/.test(token) || Number(token) > MAX_UINT32) {
      return `has ${shown(token)}, which is no token id; give integers of at least 0`;
    }
    const problem = number(-BIAS_LIMIT, BIAS_LIMIT)(bias);
    if (problem !== undefined) return `for token ${token} ${problem}`;
  }
  return undefined;
}

function stopProblem(value: unknown): string | undefined {
  const texts: unknown = typeof value === "string" ? [value] : value;
  if (!Array.isArray(texts)) return `is ${shown(value)}; give a text or a list of texts`;
  if (texts.length > MAX_STOP_TEXTS) return `has ${texts.length} strings; the maximum is ${MAX_STOP_TEXTS}`;
  for (const text of texts) {
    if (typeof text !== "string") return `has ${shown(text)}; give texts`;
    if (!text.isWellFormed()) return "has a text without a UTF-8 encoding; mend it first";
    const size = [...text].length;
    if (size < 1 || size > MAX_STOP_CHARACTERS) {
      return `has a string of ${size} characters; give 1 to ${MAX_STOP_CHARACTERS}, or leave it out`;
    }
  }
  return undefined;
}

function stopTokensProblem(value: unknown): string | undefined {
  const tooMany = Array.isArray(value) && value.length > MAX_STOP_TOKENS;
  return tooMany ? `has ${value.length} ids; the maximum is ${MAX_STOP_TOKENS}` : tokenIdsProblem(value);
}

function grammarProblem(value: unknown): string | undefined {
  if (typeof value !== "string") return `is ${shown(value)}; give a text`;
  if (!value.isWellFormed()) return "is a text without a UTF-8 encoding; mend it first";
  const size = [...value].length;
  return size >= 1 && size <= MAX_GRAMMAR_CHARACTERS
    ? undefined
    : `has ${size} characters; give 1 to ${MAX_GRAMMAR_CHARACTERS}, or leave it out`;
}

function isObject(value: unknown): value is object {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function switchProblem(value: unknown): string | undefined {
  return typeof value === "boolean" ? undefined : `is ${shown(value)}; give true or false`;
}
