// What is known of a text while it arrives: its tokens, its rounds and its speed. Nothing here touches the page.

/** The tokens of one text as they arrive. */
export class Progress {
  constructor(beginMs) {
    this.tokens = [];
    // {accepted, closing, drafter, drafted, depth}: `closing` is the target's own token at the end, null where it was
    // cut; who drafted, how many tokens, and how many in a row, is null where the service did not tell it
    this.rounds = [];
    this.statistics = null;
    this.beginMs = beginMs;
    this.firstMs = null;
    this.lastMs = null;
    this.numFirst = 0; // tokens that came with the first piece
  }

  /** Adds a piece that arrived at `nowMs`. */
  add({ tokens, rounds, statistics }, nowMs) {
    this.statistics = statistics ?? this.statistics;
    if (!tokens.length) return;
    if (this.firstMs === null) [this.firstMs, this.numFirst] = [nowMs, tokens.length];
    this.lastMs = nowMs;
    const begin = this.tokens.length;
    this.tokens.push(...tokens);
    this.rounds.push(...roundsOf(tokens, rounds, begin));
  }

  /** Tokens per second from the first piece to the last one; null while there is only one. */
  get tokensPerSecond() {
    const elapsedMs = this.lastMs - this.firstMs;
    return elapsedMs > 0 ? (1000 * (this.tokens.length - this.numFirst)) / elapsedMs : null;
  }

  get tokensPerRound() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : null;
  }
}

/**
 * Splits a piece, before which the text has `begin` tokens, into rounds, each of which ends with a token of the target;
 * the last one may be cut by the end. `told` is what the service tells of those rounds.
 */
function roundsOf(tokens, told, begin) {
  const drafts = new Map(told.map((round) => [round.end, round]));
  const rounds = [];
  let accepted = 0;
  const close = (closing, end) => {
    const { drafter = null, num_draft_tokens: drafted = null, depth = null } = drafts.get(end) ?? {};
    rounds.push({ accepted, closing, drafter, drafted, depth });
    accepted = 0;
  };
  tokens.forEach(({ origin }, place) => {
    if (origin === "accepted") accepted += 1;
    else close(origin, begin + place + 1);
  });
  if (accepted) close(null, begin + tokens.length);
  return rounds;
}

/** Returns `{drafter, numRounds, drafted, accepted}` of each drafter that the service told of, sums over its rounds. */
export function draftersOf(rounds) {
  const sums = new Map();
  for (const { drafter, drafted, accepted } of rounds.filter((round) => round.drafter !== null)) {
    const sum = sums.get(drafter) ?? { drafter, numRounds: 0, drafted: 0, accepted: 0 };
    sums.set(drafter, sum);
    sum.numRounds += 1;
    sum.drafted += drafted;
    sum.accepted += accepted;
  }
  return [...sums.values()];
}

/** Returns what is known of a round's draft length: after a rejection without more from the service, a lower bound. */
export function draftLength({ accepted, closing, drafted }) {
  if (drafted !== null) return { count: drafted, isExact: true };
  return closing === "bonus" ? { count: accepted, isExact: true } : { count: accepted + (closing ? 1 : 0), isExact: false };
}

/**
 * Returns `{accepted, drafted}` of each depth, in rounds. `drafted` is null until the service has told it at the end.
 */
export function depthsOf({ rounds, statistics }) {
  if (statistics) {
    return statistics.num_drafts_per_depth.map((drafted, depth) => ({
      drafted,
      accepted: statistics.num_accepted_tokens_per_depth[depth],
    }));
  }
  const deepest = Math.max(0, ...rounds.map((round) => round.accepted));
  return Array.from({ length: deepest }, (_, depth) => ({
    drafted: null,
    accepted: rounds.filter((round) => round.accepted > depth).length,
  }));
}
