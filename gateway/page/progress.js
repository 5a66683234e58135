// What is known of a text while it arrives: its tokens, its rounds and its speed. Nothing here touches the page.

/** The tokens of one text as they arrive. */
export class Progress {
  constructor(beginMs) {
    this.tokens = [];
    this.rounds = []; // {accepted, closing}: `closing` is the target's own token at the end, null where it was cut
    this.statistics = null;
    this.beginMs = beginMs;
    this.firstMs = null;
    this.lastMs = null;
    this.numFirst = 0; // tokens that came with the first piece
  }

  /** Adds a piece that arrived at `nowMs`. */
  add({ tokens, statistics }, nowMs) {
    this.statistics = statistics ?? this.statistics;
    if (!tokens.length) return;
    if (this.firstMs === null) [this.firstMs, this.numFirst] = [nowMs, tokens.length];
    this.lastMs = nowMs;
    this.tokens.push(...tokens);
    this.rounds.push(...roundsOf(tokens));
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

/** Splits a piece into rounds, each of which ends with a token of the target; the last one may be cut by the end. */
function roundsOf(tokens) {
  const rounds = [];
  let accepted = 0;
  for (const { origin } of tokens) {
    if (origin === "accepted") {
      accepted += 1;
    } else {
      rounds.push({ accepted, closing: origin });
      accepted = 0;
    }
  }
  return accepted ? [...rounds, { accepted, closing: null }] : rounds;
}

/** Returns what a round tells of its draft length: after a rejection it is only a lower bound. */
export function draftLength({ accepted, closing }) {
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
