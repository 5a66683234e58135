"""Enumerate one round over every draw, in fractions: the text distribution that the production rule yields.

Each round is repeated for every combination of choices. Choices are made lazily, so only uniforms that a rule reads
are branched on. A uniform is represented by an interval of [0, 1) between two thresholds that the rule supplies; the
rule is also run at the intervals' ends, so that wrong thresholds are detected.

Fractions pass through production code that is typed for floats: `sparse` hands them in, `Fraction(...)` takes them out.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar, cast, overload

from specdec.exact.acceptance import AcceptanceRule, Thresholds, TokenRule
from specdec.exact.randomness import Purpose
from specdec.exact.tree import path_to
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict

T = TypeVar("T")
History = tuple[int, ...]
Dense = Sequence[Fraction]  # [V]
Distribution = Mapping[History, Fraction]  # of texts
Interval = tuple[Fraction, Fraction]  # [low, high) within [0, 1)

ZERO, ONE = Fraction(0), Fraction(1)
FIRST_TAIL = 1_000_000  # FIRST_TAIL + position marks the tail token of a position


# ---- distributions in fractions


def dense(*weights: Fraction | int) -> tuple[Fraction, ...]:
    """Return the distribution [V] with these weights."""
    total = Fraction(sum(weights))
    return tuple(weight / total for weight in weights)


def sparse(weights: Mapping[int, Fraction | int]) -> SparseDistribution:
    """Return the distribution on a support with these weights, in fractions."""
    return SparseDistribution(tuple(weights), cast("tuple[float, ...]", dense(*weights.values())))


def truncated(distribution: Sequence[Fraction | int], size: int | None = None) -> SparseDistribution:
    """Return a distribution [V] on its `size` most probable tokens, renormalised."""
    support = [token for token, prob in enumerate(distribution) if prob]
    ordered = sorted(support, key=lambda token: -distribution[token])
    return sparse({token: distribution[token] for token in ordered[:size]})


def one_hot(token: int) -> SparseDistribution:
    """Return the distribution of a token that was chosen without a draw."""
    return sparse({token: 1})


def without(distribution: SparseDistribution, token: int) -> SparseDistribution | None:
    """Return a distribution with a token removed, renormalised; None where nothing is left."""
    probs = zip(distribution.token_ids, map(Fraction, distribution.probs), strict=True)
    left = {other: prob for other, prob in probs if other != token}
    return sparse(left) if any(left.values()) else None


def prob_of(distribution: SparseDistribution, token: int) -> Fraction:
    """Return a token's probability."""
    if token not in distribution.token_ids:
        return ZERO
    return Fraction(distribution.probs[distribution.token_ids.index(token)])


@dataclass(frozen=True)
class Pair:
    """A draft and a target with rational next-token distributions; the draft's are sparse."""

    target: Callable[[History], Dense]
    draft: Callable[[History], SparseDistribution]
    memory: int | None = None  # the distributions depend on this many last tokens; None: on all


def markov_pair(targets: Sequence[Dense], drafts: Sequence[SparseDistribution]) -> Pair:
    """Return distributions that depend on the last token."""
    return Pair(lambda history: targets[history[-1]], lambda history: drafts[history[-1]], memory=1)


# ---- enumeration of choices


@dataclass
class Draws:
    """The choices of one run: a given prefix of choices, then always the first option."""

    prefix: tuple[int, ...] = ()
    probability: Fraction = ONE
    taken: list[int] = field(default_factory=list)
    num_options: list[int] = field(default_factory=list)

    def choose(self, options: Sequence[tuple[T, Fraction]]) -> T:
        """Choose one of the options, given as (option, probability)."""
        number = len(self.taken)
        index = self.prefix[number] if number < len(self.prefix) else 0
        self.taken.append(index)
        self.num_options.append(len(options))
        option, probability = options[index]
        self.probability *= probability
        return option

    def token(self, distribution: SparseDistribution) -> int:
        """Draw a token."""
        probs = zip(distribution.token_ids, map(Fraction, distribution.probs), strict=True)
        return self.choose([(token, prob) for token, prob in probs if prob])

    def alternatives(self) -> Iterator[tuple[int, ...]]:
        """Yield the prefixes of all runs that differ from this one after its prefix."""
        for number in range(len(self.prefix), len(self.taken)):
            for index in range(1, self.num_options[number]):
                yield (*self.taken[:number], index)


def enumerate_runs(run: Callable[[Draws], T]) -> Iterator[tuple[T, Fraction]]:
    """Yield the result of every run with its probability; the probabilities sum to 1."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        draws = Draws(pending.pop())
        result = run(draws)
        pending.extend(draws.alternatives())
        yield result, draws.probability


# ---- uniforms


class Use(NamedTuple):
    """A place where a rule reads a uniform."""

    purpose: Purpose
    number: int  # of the token


CLOSE = Use(Purpose.CLOSE, 0)


class AcceptUniforms(Sequence[float]):
    """The uniforms of the tests; each is looked up when it is read."""

    def __init__(self, look_up: Callable[[Use], Fraction], size: int) -> None:
        self.look_up, self.size = look_up, size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.size))]
        return cast(float, self.look_up(Use(Purpose.ACCEPT, range(self.size)[index])))


class ReadUniforms:
    """A round's uniforms; each is looked up when it is read."""

    def __init__(self, look_up: Callable[[Use], Fraction], size: int) -> None:
        self.look_up, self.accept = look_up, AcceptUniforms(look_up, size)

    @property
    def close(self) -> Fraction:
        """The uniform of the closing draw."""
        return self.look_up(CLOSE)


def read_uniforms(look_up: Callable[[Use], Fraction], size: int) -> Uniforms:
    """Return uniforms that are looked up when they are read."""
    return cast(Uniforms, ReadUniforms(look_up, size))


NEARLY = 1 - Fraction(1, 2**60)  # relative: an interval does not contain its end


def probes(intervals: Mapping[Use, Interval]) -> Iterator[Mapping[Use, Fraction]]:
    """Yield points near the intervals' ends: all low, all high, and alternating."""
    for low_at in ((True, True), (False, False), (True, False), (False, True)):
        yield {
            key: low if low_at[number % 2] else low + (high - low) * NEARLY
            for number, (key, (low, high)) in enumerate(intervals.items())
        }


def split_interval(domain: Interval, points: set[Fraction]) -> list[tuple[Interval, Fraction]]:
    """Split a domain at points; return the intervals with their conditional probabilities."""
    low, high = domain
    bounds = sorted({low, high, *(point for point in points if low < point < high)})
    return [(interval, (interval[1] - interval[0]) / (high - low)) for interval in pairwise(bounds)]


# ---- rounds


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One possible outcome of a round; its closing token may be the marker of a tail token."""

    proposal: Proposal
    verdict: Verdict
    probability: Fraction

    @property
    def accepted(self) -> History:
        """The accepted tokens."""
        return tuple(self.proposal.tokens[index] for index in self.verdict.path)


Note = Hashable  # what the next K may depend on besides the text


@dataclass(frozen=True)
class Enumeration:
    """One exact round, enumerated over every draw; a mutant overrides the part that it breaks."""

    pair: Pair
    rule: AcceptanceRule = field(default_factory=TokenRule)

    # parts that a mutant may override

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft a chain."""
        tokens: History = ()
        distributions: tuple[SparseDistribution, ...] = ()
        for _ in range(num_draft_tokens):
            text = (*history, *tokens)
            token = draws.token(self.drawn_from(text))
            distributions += (self.shipped(text, token),)
            tokens += (token,)
        return Proposal(tokens, distributions)

    def drawn_from(self, text: History) -> SparseDistribution:
        """Return the distribution from which a draft token is drawn."""
        return self.pair.draft(text)

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return the distribution that the proposal holds for a token: the one it was drawn from."""
        return self.drawn_from(text)

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Dense:
        """Return the target's distribution [V] at a position of the proposal."""
        return self.pair.target((*history, *text_at(proposal, position)))

    def target_answer(self, history: History, proposal: Proposal, position: int) -> TargetDistribution:
        """Return the target's answer at a position, its tail token as a marker."""
        distribution, token_ids = self.target_distribution(history, proposal, position), proposal.unions()[position]
        outside = sum((prob for token, prob in enumerate(distribution) if token not in token_ids), ZERO)
        probs = cast("list[float]", [distribution[token] for token in token_ids])
        return TargetDistribution(probs, cast(float, outside), FIRST_TAIL + position)

    def tail_distribution(self, history: History, proposal: Proposal, position: int) -> Mapping[int, Fraction]:
        """Return the distribution of a position's tail token: the target's, outside the supports."""
        distribution, token_ids = self.target_distribution(history, proposal, position), proposal.unions()[position]
        outside = {token: prob for token, prob in enumerate(distribution) if token not in token_ids and prob}
        total = sum(outside.values())
        return {token: prob / total for token, prob in outside.items()}

    def key(self, use: Use) -> Use:
        """Return the key of the uniform that a use reads; different for each use."""
        return use

    def domain(self, proposal: Proposal, key: Use) -> Interval:
        """Return the interval that contains a uniform, given the proposal: [0, 1)."""
        return ZERO, ONE

    # the round

    def outcomes(self, history: History, num_draft_tokens: int) -> Iterator[RoundOutcome]:
        """Yield every outcome of a round; the probabilities sum to 1."""
        for proposal, chance in enumerate_runs(lambda draws: self.propose(history, num_draft_tokens, draws)):
            positions = range(len(proposal) + 1)
            scores = Scores(tuple(self.target_answer(history, proposal, position) for position in positions))
            for verdict, weight in self.verdicts(proposal, scores):
                yield RoundOutcome(proposal, verdict, chance * weight)

    def verdicts(self, proposal: Proposal, scores: Scores) -> Iterator[tuple[Verdict, Fraction]]:
        """Yield every verdict with its probability."""
        thresholds = self.rule.thresholds(proposal, scores)
        return enumerate_runs(lambda draws: self.verdict(proposal, scores, thresholds, draws))

    def verdict(self, proposal: Proposal, scores: Scores, thresholds: Thresholds, draws: Draws) -> Verdict:
        """Apply the rule; assert that its verdict is constant on the intervals of the uniforms that it read."""
        intervals: dict[Use, Interval] = {}

        def middle(use: Use) -> Fraction:
            key = self.key(use)
            if key not in intervals:
                points = self.breakpoints(key, proposal, scores, thresholds, middle)
                intervals[key] = draws.choose(split_interval(self.domain(proposal, key), points))
            low, high = intervals[key]
            return (low + high) / 2

        verdict = self.rule.accept(proposal, scores, read_uniforms(middle, len(proposal)))
        for probe in probes(intervals):
            again = self.rule.accept(proposal, scores, read_uniforms(lambda use: probe[self.key(use)], len(proposal)))  # noqa: B023
            assert again == verdict, f"{verdict} becomes {again} between the thresholds {thresholds}"
        return verdict

    def breakpoints(
        self,
        key: Use,
        proposal: Proposal,
        scores: Scores,
        thresholds: Thresholds,
        known: Callable[[Use], Fraction],
    ) -> set[Fraction]:
        """Return the thresholds of a key's uses; for the closing draw, those where the round closes."""
        tests = [index for index in range(len(proposal)) if self.key(Use(Purpose.ACCEPT, index)) == key]
        points = {Fraction(thresholds.accept[index]) for index in tests}
        if self.key(CLOSE) != key:
            return points
        if tests:
            return points | {Fraction(at) for position in thresholds.close for at in position}
        uniforms = read_uniforms(lambda use: ZERO if use == CLOSE else known(use), len(proposal))
        path = self.rule.accept(proposal, scores, uniforms).path
        return {Fraction(at) for at in thresholds.close[path[-1] + 1 if path else 0]}

    # its text

    def round_distribution(
        self,
        history: History,
        outcomes: Iterable[RoundOutcome],
        note: Callable[[RoundOutcome], Note] = lambda outcome: None,
    ) -> Mapping[tuple[History, Note], Fraction]:
        """Return the joint distribution of the text that one round appends and of its note."""
        distribution: dict[tuple[History, Note], Fraction] = defaultdict(Fraction)
        for outcome in outcomes:
            for token, prob in self.closing(history, outcome).items():
                distribution[(*outcome.accepted, token), note(outcome)] += outcome.probability * prob
        return distribution

    def closing(self, history: History, outcome: RoundOutcome) -> Mapping[int, Fraction]:
        """Return the distribution of the token that closes a round."""
        token = outcome.verdict.next_token
        is_tail = token >= FIRST_TAIL
        return self.tail_distribution(history, outcome.proposal, token - FIRST_TAIL) if is_tail else {token: ONE}

    def text_distribution(
        self,
        prompt: History,
        num_tokens: int,
        num_draft_tokens: Callable[[History, Note], int],
        note: Callable[[RoundOutcome], Note] = lambda outcome: None,
    ) -> Distribution:
        """Return the distribution of the first `num_tokens` tokens after the prompt, over as many rounds as needed.

        K may depend on the text and on the note of the last round.
        """
        rounds: dict[tuple[History, int], Mapping[tuple[History, Note], Fraction]] = {}
        unfinished: dict[tuple[History, Note], Fraction] = {(prompt, None): ONE}
        distribution: dict[History, Fraction] = defaultdict(Fraction)
        while unfinished:
            (history, last_note), chance = unfinished.popitem()
            seen = history[-self.pair.memory :] if self.pair.memory else history
            size = num_draft_tokens(history, last_note)
            if (seen, size) not in rounds:
                rounds[seen, size] = self.round_distribution(seen, self.outcomes(seen, size), note)
            for (text, noted), prob in rounds[seen, size].items():
                longer = (*history, *text)
                if len(longer) >= len(prompt) + num_tokens:
                    distribution[longer[len(prompt) :][:num_tokens]] += chance * prob
                else:
                    unfinished[longer, noted] = unfinished.get((longer, noted), ZERO) + chance * prob
        return {text: prob for text, prob in distribution.items() if prob}

    def continued_distribution(
        self, history: History, outcomes: Iterable[RoundOutcome], num_tokens: int
    ) -> Distribution:
        """Return the distribution of the first tokens after one round and plain decoding from there."""
        texts: dict[History, Fraction] = defaultdict(Fraction)
        for (text, _), prob in self.round_distribution(history, outcomes).items():
            texts[text[:num_tokens]] += prob
        for length in range(1, num_tokens):
            for text in [each for each in texts if len(each) == length]:
                chance = texts.pop(text)
                for token, prob in enumerate(self.pair.target((*history, *text))):
                    texts[*text, token] += chance * prob
        return {text: prob for text, prob in texts.items() if prob}


def expected_accepted(outcomes: Iterable[RoundOutcome]) -> Fraction:
    """Return the mean number of accepted tokens of a round."""
    return sum((outcome.probability * outcome.verdict.num_accepted for outcome in outcomes), ZERO)


def text_at(proposal: Proposal, position: int) -> History:
    """Return the draft tokens before a position of the proposal."""
    return tuple(proposal.tokens[index] for index in path_to(position, proposal.tree))


def cumulative(weights: Sequence[Fraction]) -> list[Fraction]:
    """Return the normalised cumulative sums of weights: where an inverse-CDF draw changes."""
    total = sum(weights)
    return [value / total for value in accumulate(weights)] if total else []


def target_text_distribution(pair: Pair, prompt: History, num_tokens: int) -> Distribution:
    """Return the distribution of plain decoding of the target."""
    distribution: dict[History, Fraction] = {(): ONE}
    for _ in range(num_tokens):
        distribution = {
            (*text, token): chance * prob
            for text, chance in distribution.items()
            for token, prob in enumerate(pair.target((*prompt, *text)))
            if prob
        }
    return distribution


def total_variation(one: Distribution, other: Distribution) -> Fraction:
    """Return half the sum of the absolute differences."""
    texts = one.keys() | other.keys()
    return sum((abs(one.get(text, ZERO) - other.get(text, ZERO)) for text in texts), ZERO) / 2
