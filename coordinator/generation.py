"""The state of one request, without I/O: what a round commits, where it is cut, what a chunk holds.

Nothing here awaits, logs, reads clocks or draws randomness.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from coordinator.text import Detokenizer, StopText
from specdec.exact.prefix import PrefixChain, chain
from specdec.exact.randomness import acceptance_uniforms
from specdec.exact.values import Proposal, Scores, Uniforms, Verdict
from specdec.types import FinishReason, RoundDraft, SamplingParams, Statistics, TokenLogprobs, TokenOrigin

NO_DRAFTER = "none"  # what metrics, traces and chunks call rounds that no drafter took part in


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a generation must end, independent of its text."""

    max_new_tokens: int
    context_length: int  # prompt and completion together
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One completion token with its origin and log probabilities."""

    token: int
    origin: TokenOrigin
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What one round commits."""

    base_length: int  # tokens committed before, prompt included
    base_digest: bytes
    emitted: tuple[OutputToken, ...]
    digest: bytes  # after it
    finish: FinishReason | None
    statistics: Statistics  # after it; commit_s and total_s are the committer's to add
    drafter: str = NO_DRAFTER  # that proposed in it
    joined: "tuple[Round, ...]" = ()  # rounds that it is made of; empty: it is one


@dataclass(frozen=True, slots=True)
class CommittedChunk:
    """A contiguous part of the completion."""

    offset: int
    emitted: tuple[OutputToken, ...]
    text: str
    text_ends: tuple[int, ...]  # within `text`, in characters, one a token
    digest: bytes
    incarnation: str = ""  # which session of its name; empty: not recorded
    rounds: tuple[RoundDraft, ...] = ()  # that ended in it, as far as they ran here


@dataclass(slots=True)
class Generation:
    """One request: its prompt, what is committed so far, and where it must end."""

    prompt: tuple[int, ...]
    sampling: SamplingParams  # with its seed
    limits: Limits
    detokenizer: Detokenizer
    emitted: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    prompt_digest: bytes = b""  # the hash chain over the prompt; empty: computed here
    incarnation: str = ""  # which session of its name; empty: not recorded
    committed: list[int] = field(init=False)  # prompt and completion
    text: str = field(init=False, default="")
    _stop: StopText = field(init=False)
    _text_ends: list[int] = field(init=False, default_factory=list)
    _held: list[str] = field(init=False, default_factory=list)  # after each token, what may begin a stop string
    _digests: list[bytes] = field(init=False)
    _rounds: list[RoundDraft] = field(init=False, default_factory=list)
    _prompt_chain: PrefixChain = field(init=False, default_factory=PrefixChain)

    def __post_init__(self) -> None:
        replayed, finish = self.emitted, self.finish
        self.emitted, self.finish = [], None
        self.committed = list(self.prompt)
        self._stop = StopText(self.sampling.stop)
        self._digests = [self.prompt_digest or chain(b"", self.prompt)]
        self.replay(replayed, finish)

    @property
    def done(self) -> bool:
        """Return whether nothing more will be generated."""
        return self.finish is not None

    @property
    def seed(self) -> int:
        """The key of all the session's draws."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be committed."""
        completion = self.limits.max_new_tokens - len(self.emitted)
        return min(completion, self.limits.context_length - len(self.committed))

    @property
    def ending_tokens(self) -> frozenset[int]:
        """The tokens that end the text."""
        ends = frozenset[int]() if self.sampling.ignore_eos else self.limits.eos_token_ids
        return ends.union(self.sampling.stop_token_ids)

    def digest_at(self, offset: int) -> bytes:
        """Return the hash chain after `offset` completion tokens."""
        return self._digests[offset]

    def prefix_digest(self, length: int) -> bytes:
        """Return the hash chain after the first `length` committed tokens, the prompt's included."""
        if length < len(self.prompt):
            return self._prompt_chain.digest(self.prompt, length)
        return self.digest_at(length - len(self.prompt))

    def uniforms(self, num_draft_tokens: int) -> Uniforms:
        """Return the coordinator's draws of the round that begins now."""
        return acceptance_uniforms(self.seed, len(self.committed), num_draft_tokens)

    def advance(
        self,
        proposal: Proposal,
        scores: Scores,
        verdict: Verdict,
        draft_s: float = 0.0,
        score_s: float = 0.0,
        drafter: str = NO_DRAFTER,
    ) -> Round:
        """Append what the round yields, cut at the first end of any kind, and return what is to be committed."""
        base_length, base_digest, begin = len(self.committed), self._digests[-1], len(self.emitted)
        for entry in _entries(proposal, scores, verdict):
            self._append(entry)
            if self.finish:
                break
        emitted = tuple(self.emitted[begin:])
        before, depth = self.statistics, proposal.depth
        self.statistics = Statistics(
            num_rounds=before.num_rounds + 1,
            num_draft_tokens=before.num_draft_tokens + len(proposal),
            num_accepted_tokens=before.num_accepted_tokens + verdict.num_accepted,
            num_tokens=before.num_tokens + len(emitted),
            draft_s=before.draft_s + draft_s,
            score_s=before.score_s + score_s,
            commit_s=before.commit_s,
            total_s=before.total_s,
            num_drafts_per_depth=_counted(before.num_drafts_per_depth, depth, depth),
            num_accepted_tokens_per_depth=_counted(before.num_accepted_tokens_per_depth, verdict.num_accepted, depth),
        )
        self._rounds.append(RoundDraft(drafter, len(proposal), depth, len(self.emitted)))
        return Round(base_length, base_digest, emitted, self._digests[-1], self.finish, self.statistics, drafter)

    def replay(self, emitted: Iterable[OutputToken], finish: FinishReason | None) -> None:
        """Append what the store has, and end as the session did."""
        for entry in emitted:
            self._append(entry)
        if finish:
            self.end(finish)

    def end(self, reason: FinishReason) -> None:
        """End here; text that was held back as the beginning of a stop string is certain now."""
        self.finish = reason
        self.text += self._stop.flush()

    def cut(self, num_tokens: int, reason: FinishReason) -> None:
        """Roll back uncommitted tokens, and end after the first `num_tokens` completion tokens."""
        del self.emitted[num_tokens:], self._text_ends[num_tokens:], self._held[num_tokens:]
        del self.committed[len(self.prompt) + num_tokens :], self._digests[num_tokens + 1 :]
        del self._rounds[self._num_rounds_to(num_tokens) :]
        # as in a replay: text that was held back after the last token is certain now
        self.text = self.text[: self._text_ends[-1]] + self._held[-1] if self._text_ends else ""
        self.finish = reason

    def chunk(self, begin: int, end: int) -> CommittedChunk:
        """Return the completion from token `begin` to before token `end`; a finished one's last chunk ends its text."""
        first = self._text_ends[begin - 1] if begin else 0
        ends = self._text_ends[begin:end]
        last = len(self.text) if self.done and end == len(self.emitted) else (ends[-1] if ends else first)
        return CommittedChunk(
            offset=begin,
            emitted=tuple(self.emitted[begin:end]),
            text=self.text[first:last],
            text_ends=tuple(position - first for position in ends),
            digest=self._digests[end],
            incarnation=self.incarnation,
            rounds=tuple(self._rounds[self._num_rounds_to(begin) : self._num_rounds_to(end)]),
        )

    def _num_rounds_to(self, num_tokens: int) -> int:
        """Return how many of the rounds that ran here ended with the first `num_tokens` completion tokens."""
        return bisect_right(self._rounds, num_tokens, key=attrgetter("end"))

    def _append(self, entry: OutputToken) -> None:
        """Commit one token, and end if it ends the text. Stops come before the length: both may fall on one token."""
        self.committed.append(entry.token)
        self.emitted.append(entry)
        self._digests.append(chain(self._digests[-1], (entry.token,)))
        reason = self._ending_token(entry.token)
        if reason is None:
            certain, stopped = self._stop.push(self.detokenizer.push(entry.token))
            self.text += certain
            reason = FinishReason.STOP if stopped else None
        self._text_ends.append(len(self.text))
        self._held.append(self._stop.held)
        if reason or self.remaining_tokens <= 0:
            self.end(reason or FinishReason.LENGTH)

    def _ending_token(self, token: int) -> FinishReason | None:
        if token in self.limits.eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.EOS
        return FinishReason.STOP if token in self.sampling.stop_token_ids else None


def _counted(counts: tuple[int, ...], num_reached: int, depth: int) -> tuple[int, ...]:
    """Return counts by depth, [at least `depth`], with one more at each of the first `num_reached`."""
    if not depth:
        return counts
    longer = (*counts, *[0] * (depth - len(counts)))
    return tuple(count + (index < num_reached) for index, count in enumerate(longer))


def _entries(proposal: Proposal, scores: Scores, verdict: Verdict) -> list[OutputToken]:
    """Return the round's tokens in order, before any cut."""
    accepted = [(proposal.tokens[index], TokenOrigin.ACCEPTED) for index in verdict.path]
    tokens = [*accepted, (verdict.next_token, verdict.next_origin)]
    positions = [0, *(index + 1 for index in verdict.path)]
    logprobs = [scores.logprobs[position] if scores.logprobs else None for position in positions]
    return [
        OutputToken(token, origin, TokenLogprobs(entry.by_token[token], entry.top) if entry else None)
        for (token, origin), entry in zip(tokens, logprobs, strict=True)
    ]
