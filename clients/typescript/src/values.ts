/** What callers give and get: plain values. Durations are seconds, as everywhere in specdec. */

/** How tokens are drawn and when generation ends; what is left out changes nothing. Ranges: types.proto. */
export interface SamplingOptions {
  /** 0 takes the most probable token. */
  readonly temperature?: number | undefined;
  /** Keeps the k most probable tokens; 0: all. */
  readonly topK?: number | undefined;
  /** Keeps the most probable tokens with this mass. */
  readonly topP?: number | undefined;
  /** Drops tokens less probable than this fraction of the most probable one. */
  readonly minP?: number | undefined;
  readonly repetitionPenalty?: number | undefined;
  readonly presencePenalty?: number | undefined;
  readonly frequencyPenalty?: number | undefined;
  /** Up to 2^64 - 1: past 2^53 - 1 as a bigint. */
  readonly seed?: number | bigint | undefined;
  readonly maxNewTokens?: number | undefined;
  /** Log probabilities of this many tokens a position; 0: of the emitted token alone. */
  readonly numLogprobs?: number | undefined;
  /** Added to the logits of these token ids. */
  readonly logitBias?: Readonly<Record<number, number>> | undefined;
  /** Generation ends before this text, or the first of these. */
  readonly stop?: string | readonly string[] | undefined;
  readonly stopTokenIds?: readonly number[] | undefined;
  readonly ignoreEos?: boolean | undefined;
  /** The text is JSON that this schema allows, given as an object or as its JSON; one of the three at most. */
  readonly jsonSchema?: string | object | undefined;
  /** The whole text matches this regular expression. */
  readonly regex?: string | undefined;
  /** The text is derived from the rule `start` of this grammar, in Lark's EBNF. */
  readonly lark?: string | undefined;
}

/** The rules that accept draft tokens. */
export type AcceptanceRule = "token" | "block";

/** Speculative decoding options; none of them changes the distribution of the text. */
export interface SpeculationOptions {
  /** Left out: automatic; 0: plain decoding. */
  readonly numDraftTokens?: number | undefined;
  readonly drafter?: string | undefined;
  readonly acceptanceRule?: AcceptanceRule | undefined;
}

/** What becomes of a session when its last client has left. */
export type DetachedPolicy = "park" | "finish" | "cancel";

/** What every call takes. */
export interface CallOptions {
  /** Deadline of the call with all its attempts, in seconds. */
  readonly timeoutS?: number | undefined;
  /** Ends the call with the signal's reason; a session stays in the store. */
  readonly signal?: AbortSignal | undefined;
}

/** What a call that generates takes. */
export interface GenerateOptions extends SamplingOptions, CallOptions {
  readonly speculation?: SpeculationOptions | undefined;
  readonly whenDetached?: DetachedPolicy | undefined;
  /** Idempotency key: the same key and parameters attach to the same session. Left out: a new session. */
  readonly requestId?: string | undefined;
}

/** Where to go on in a session. */
export interface ResumeOptions extends CallOptions {
  /** Completion tokens that the caller has; 0 if left out. */
  readonly offset?: number | undefined;
  /** `digest` of the last chunk that the caller has: with it the service checks that it holds the same text. */
  readonly digest?: Uint8Array | undefined;
}

/** Text, which the service encodes, or token ids of the target's vocabulary. */
export type Prompt = string | { readonly tokenIds: readonly number[] };

/** One message of a chat. */
export interface ChatMessage {
  readonly role: string;
  readonly content: string;
}

/** Where a committed token came from. */
export type TokenOrigin = "accepted" | "recovered" | "bonus";

/** Why a session ended. */
export type FinishReason = "eos" | "stop" | "length" | "cancelled";

/** The state of a session in the store. */
export type SessionStatus = "active" | "finished" | "cancelled";

/** One of the most probable tokens of a position; its log probability in nats. */
export interface TopLogprob {
  readonly token: number;
  readonly logprob: number;
}

/** A token's log probability under the model's own distribution, in nats; then the most probable tokens, best first. */
export interface TokenLogprobs {
  readonly logprob: number;
  readonly top: readonly TopLogprob[];
}

/** How a round was drafted. */
export interface RoundDraft {
  /** Its drafter's name; "none" without one, "grammar" for forced text, "lookup" for what the coordinator looked up. */
  readonly drafter: string;
  /** Draft tokens, those of all branches of a tree. */
  readonly numDraftTokens: number;
  /** Draft tokens of the longest branch. */
  readonly depth: number;
  /** Completion tokens up to the round's end. */
  readonly end: number;
}

/** What a session cost, in tokens. */
export interface Usage {
  readonly numPromptTokens: number;
  readonly numCompletionTokens: number;
}

/** Sums over all rounds of a session, durations in seconds. */
export interface Statistics {
  readonly numRounds: number;
  readonly numDraftTokens: number;
  readonly numAcceptedTokens: number;
  readonly numTokens: number;
  readonly draftS: number;
  readonly scoreS: number;
  readonly commitS: number;
  readonly totalS: number;
  /** Rounds that drafted a token at each depth, the first draft token's depth first. */
  readonly numDraftsPerDepth: readonly number[];
  /** Rounds that accepted a token at each depth. */
  readonly numAcceptedTokensPerDepth: readonly number[];
}

/** How a session ended. */
export interface Finish {
  readonly reason: FinishReason;
  readonly usage: Usage;
  readonly statistics: Statistics;
}

/** The parameters of a session as the store holds them, with the seed that is used. */
export interface SamplingUsed extends Omit<SamplingOptions, "seed" | "stop"> {
  readonly seed?: bigint | undefined;
  readonly stop: readonly string[];
}

/** What the store holds of a session. */
export interface Session {
  readonly sessionId: string;
  readonly status: SessionStatus;
  /** The fencing number of its owner. */
  readonly epoch: bigint;
  readonly numPromptTokens: number;
  readonly tokens: readonly number[];
  readonly text: string;
  readonly digest: Uint8Array;
  readonly sampling: SamplingUsed;
  readonly finish: Finish | undefined;
}

/** What a model is. Fields: specdec.v1.ModelInfo. */
export interface ModelInfo {
  readonly name: string;
  readonly tokenizerFingerprint: string;
  readonly vocabSize: number;
  readonly contextLength: number;
  readonly dtype: string;
  readonly device: string;
  readonly eosTokenIds: readonly number[];
  readonly fingerprint: string;
  readonly numLayers: number;
  readonly hiddenSize: number;
  readonly quantization: string;
}

/** The models of a service. No drafters means plain decoding. */
export interface ServedModel {
  readonly target: ModelInfo;
  readonly drafters: readonly string[];
  readonly contextLength: number;
  readonly maxDraftTokens: number;
}

/** Whether a coordinator asks a worker. */
export type WorkerState = "in_service" | "on_trial" | "out" | "leaving";

/** One value of one metric. */
export interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

/** One process: the one that answered (its address is empty), or a worker of it. */
export interface ProcessStatus {
  readonly kind: string;
  readonly address: string;
  /** Of a worker; undefined for a state that this client does not know. */
  readonly state: WorkerState | undefined;
  /** Why it is not in service. */
  readonly reason: string;
  readonly numStreams: number;
  readonly samples: readonly Sample[];
}
