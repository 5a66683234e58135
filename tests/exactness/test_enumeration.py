"""The text has the target's distribution: enumerated in fractions, then generated through the real loop."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.acceptance import accept
from coordinator.draft_length import Costs, DraftLength
from specdec.exact.codec import distributions_from_proto, distributions_to_proto
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms
from specdec.types import SamplingParams
from specdec.v1 import types_pb2
from tests.support.distributions import (
    Agreement,
    Enumeration,
    History,
    Pair,
    agreement,
    joint_distribution,
    reference_distribution,
    standard_deviations,
    target_text_distribution,
)
from tests.support.toys import (
    DRAFT_S,
    MAX_DRAFT_TOKENS,
    NUM_TOKENS,
    PROMPT,
    SCORE_S,
    VOCAB_SIZE,
    FlakyDrafter,
    Ledger,
    Play,
    RepeatingDrafter,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    markov_logits,
    num_redrawn,
    play,
    random_distributions,
)

torch.set_num_threads(1)

# ---- enumerate


def dense(*weights: int) -> tuple[Fraction, ...]:
    """Return a distribution from whole weights."""
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def sparse(distribution: tuple[Fraction, ...], size: int | None = None) -> SparseDistribution:
    """Return a distribution as a draft's row: its `size` most probable tokens, renormalised."""
    order = sorted((token for token, prob in enumerate(distribution) if prob), key=lambda token: -distribution[token])[
        :size
    ]
    mass = sum(distribution[token] for token in order)
    return SparseDistribution(order, [distribution[token] / mass for token in order])


def constant_pair(target: tuple[Fraction, ...], row: SparseDistribution) -> Pair:
    """Return distributions that do not look at the text."""
    return Pair(lambda _: target, lambda _: row)


def markov_pair(targets: list[tuple[Fraction, ...]], rows: list[SparseDistribution]) -> Pair:
    """Return distributions that look at the last token."""
    return Pair(lambda history: targets[history[-1]], lambda history: rows[history[-1]])


def assert_exact(pair: Pair, num_tokens: int, num_draft_tokens: Callable[[History], int]) -> None:
    """Assert that the text's distribution is the target's: equality of fractions."""
    distribution = Enumeration(pair).text_distribution((0,), num_tokens, num_draft_tokens)
    assert distribution == target_text_distribution(pair, (0,), num_tokens)


SHAPES = {
    "ties": (dense(1, 1, 1), dense(1, 1, 1)),
    "identical": (dense(1, 2, 3), dense(1, 2, 3)),
    "disjoint": (dense(1, 3, 0, 0), dense(0, 0, 2, 1)),
    "zero in the target": (dense(0, 3, 1), dense(2, 1, 1)),
    "zero in the draft": (dense(2, 1, 1), dense(0, 3, 1)),
    "one-hot target": (dense(0, 1, 0), dense(2, 1, 1)),
    "one-hot draft": (dense(2, 1, 1), dense(0, 1, 0)),
    "one-hot draft, impossible": (dense(2, 0, 1), dense(0, 1, 0)),
    "both one-hot, equal": (dense(0, 1, 0), dense(0, 1, 0)),
    "both one-hot, unequal": (dense(0, 0, 1), dense(0, 1, 0)),
    "draft below the target but once": (dense(4, 1, 1, 1), dense(1, 2, 2, 2)),
    "two tokens": (dense(1, 4), dense(4, 1)),
}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_round_has_the_targets_distribution(shape: str, num_draft_tokens: int) -> None:
    """A round's first token and all others up to K + 1 from further rounds, for distributions of every shape."""
    target, draft = SHAPES[shape]
    assert_exact(constant_pair(target, sparse(draft)), min(num_draft_tokens + 1, 3), lambda _: num_draft_tokens)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_truncated_rows_leave_the_distribution_alone(shape: str, size: int) -> None:
    """Where the support is smaller than the vocabulary, the tail token fills in."""
    target, draft = SHAPES[shape]
    assert_exact(constant_pair(target, sparse(draft, size)), 3, lambda _: 2)


def small_distributions() -> list[tuple[Fraction, ...]]:
    """Return every distribution over three tokens in quarters."""
    return [dense(a, b, 4 - a - b) for a in range(5) for b in range(5 - a)]


@pytest.mark.parametrize("target", small_distributions(), ids=str)
def test_every_distribution_in_quarters(target: tuple[Fraction, ...]) -> None:
    """All 225 pairs, the draft's row whole and cut to two tokens and to one."""
    for draft in small_distributions():
        for size in (None, 2, 1):
            assert_exact(constant_pair(target, sparse(draft, size)), 2, lambda _: 1)


MARKOV_TARGETS = [dense(3, 1, 2), dense(0, 1, 1), dense(1, 5, 1)]
MARKOV_DRAFTS = [dense(1, 2, 3), dense(1, 2, 2), dense(4, 1, 0)]


@pytest.mark.parametrize("size", [None, 2, 1])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
def test_texts_of_several_rounds(num_draft_tokens: int, size: int | None) -> None:
    """Rounds cut anywhere: the joint distribution of four tokens of a Markov chain."""
    pair = markov_pair(MARKOV_TARGETS, [sparse(draft, size) for draft in MARKOV_DRAFTS])
    assert_exact(pair, 4, lambda _: num_draft_tokens)


def test_draft_length_may_follow_the_text() -> None:
    """K is chosen anew each round, by what came before."""
    pair = markov_pair(MARKOV_TARGETS, [sparse(draft) for draft in MARKOV_DRAFTS])
    assert_exact(pair, 4, lambda history: (history[-1] + len(history)) % 4)


@st.composite
def pairs(draw_from: st.DrawFn) -> Pair:
    """Draw a Markov pair over two to four tokens with rational distributions and supports of any size."""
    size = draw_from(st.integers(2, 4))
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    targets = [dense(*draw_from(weights)) for _ in range(size)]
    rows = [sparse(dense(*draw_from(weights)), draw_from(st.integers(1, size))) for _ in range(size)]
    return markov_pair(targets, rows)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(pairs(), st.integers(0, 2))
def test_any_rational_distributions(pair: Pair, num_draft_tokens: int) -> None:
    """Whatever the distributions are."""
    assert_exact(pair, 3, lambda _: num_draft_tokens)


def test_residual_that_rounding_emptied_is_the_target() -> None:
    """A rejection where p nowhere exceeds q and no tail is left cannot be in exact arithmetic; it draws from p."""
    row = SparseDistribution((0, 1), (0.5 + 2**-30, 0.5 + 2**-30))
    scores = Scores((TargetDistribution((0.5, 0.5), 0.0, 7), TargetDistribution((), 1.0, 8)))
    tokens = [
        accept(Proposal((0,), (row,)), scores, Uniforms((1 - 2**-53,), close)).next_token for close in (0.0, 0.4, 0.6)
    ]
    assert tokens == [0, 0, 1]


# ---- generate

SEED_OF_TARGET, SEED_OF_DRAFT = 12, 11
NUM_GENERATIONS = 3_000
REJECT_BELOW = 1e-6


@dataclass(frozen=True)
class Case:
    """One way of generating."""

    num_draft_tokens: int | None = 3
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafter: type[ToyDrafter] = ToyDrafter
    support_mass: float = 1.0
    support_max: int = VOCAB_SIZE
    prompt: History = PROMPT
    num_generations: int = NUM_GENERATIONS
    num_tokens: int = NUM_TOKENS  # generated; the distribution is judged on the first NUM_TOKENS

    def models(self) -> tuple[ToyModel, ToyModel]:
        """Return draft and target."""
        cut = self.support_mass, self.support_max, self.prompt
        return (
            ToyModel(markov_logits(SEED_OF_DRAFT), self.sampling, *cut),
            ToyModel(markov_logits(SEED_OF_TARGET), self.sampling, prompt=self.prompt),
        )


PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.6)
CASES = {
    "K = 3": Case(num_generations=20_000),
    "K = 0": Case(0),
    "K = 1": Case(1),
    "automatic K": Case(None, num_tokens=6),
    "nucleus of the draft": Case(support_mass=0.9),
    "supports of three": Case(support_max=3),
    "n-gram": Case(drafter=RepeatingDrafter),
    "penalties": Case(sampling=PENALTIES, prompt=(0,)),
    "lost drafter": Case(drafter=FlakyDrafter, num_tokens=6),
    "temperature and bias": Case(sampling=SamplingParams(temperature=0.7, logit_bias={1: 1.5, 3: -2.0})),
    "top_k and top_p": Case(sampling=SamplingParams(top_k=4, top_p=0.9, temperature=1.3), support_max=3),
    "min_p": Case(sampling=SamplingParams(min_p=0.15)),
}


@cache
def plays(name: str) -> list[Play]:
    """Return the generations of a case; seeds are 0, 1, 2, ..."""
    case = CASES[name]
    draft, target = case.models()
    costs = Costs()

    async def generate() -> list[Play]:
        costs.observe(1, DRAFT_S, SCORE_S)
        return [
            await play(
                case.drafter(draft, seed),
                ToyScorer(target, seed),
                DraftLength(costs, MAX_DRAFT_TOKENS, case.num_draft_tokens),
                case.num_tokens,
            )
            for seed in range(case.num_generations)
        ]

    return asyncio.run(generate())


def judged(name: str) -> Agreement:
    """Return how the generated texts agree with the target's distribution, which the toys have no part in."""
    case = CASES[name]
    texts = [play.tokens[:NUM_TOKENS] for play in plays(name)]
    logits = markov_logits(SEED_OF_TARGET).numpy()

    def distribution_after(text: History) -> np.ndarray:
        return reference_distribution(logits[(*case.prompt, *text)[-1]], case.sampling, case.prompt, text)

    return agreement(texts, joint_distribution(distribution_after, NUM_TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_generated_text_has_the_targets_distribution(name: str) -> None:
    """Joint chi-square over the first four tokens."""
    result = judged(name)
    print(f"{name}: {result}")
    assert result.p_value > REJECT_BELOW, f"{name}: {result}"


# ---- acceptance

MAX_DEVIATIONS = 5.0


def truncated(distribution: np.ndarray, support_mass: float, support_max: int) -> np.ndarray:
    """Return a distribution cut to the fewest tokens with `support_mass`, at most `support_max`, renormalised; [V]."""
    order = np.argsort(-distribution)[:support_max]
    size = 1 + int((np.cumsum(distribution[order]) < support_mass).sum())
    cut = np.zeros_like(distribution)
    cut[order[:size]] = distribution[order[:size]]
    return cut / cut.sum()


def survival(case: Case) -> list[float]:
    """Return for each position of a first round the chance that it is accepted, and all before it."""
    target, draft = (markov_logits(seed).numpy() for seed in (SEED_OF_TARGET, SEED_OF_DRAFT))
    reached = {case.prompt[-1]: 1.0}
    chances = []
    for _ in range(case.num_draft_tokens or 0):
        onward: Counter[int] = Counter()
        for last, chance in reached.items():
            p = reference_distribution(target[last], case.sampling, (), ())
            q = truncated(
                reference_distribution(draft[last], case.sampling, (), ()), case.support_mass, case.support_max
            )
            onward.update({token: chance * both for token, both in enumerate(np.minimum(p, q))})
        reached = dict(onward)
        chances.append(sum(reached.values()))
    return chances


@pytest.mark.parametrize("name", ["K = 3", "K = 1", "nucleus of the draft", "supports of three", "top_k and top_p"])
def test_acceptance_is_the_sum_of_minima(name: str) -> None:
    """A first round's position is reached and accepted as often as the two distributions say: sum of min(p, q)."""
    for position, chance in enumerate(survival(CASES[name])):
        num_accepted = sum(play.num_accepted > position for play in plays(name))
        deviations = standard_deviations(num_accepted, len(plays(name)), chance)
        assert deviations < MAX_DEVIATIONS, f"position {position}: {num_accepted} of {len(plays(name))}, not {chance}"


def test_automatic_draft_length_tries_several() -> None:
    """The case above is worth its name."""
    assert len({play.num_drafted for play in plays("automatic K")}) > 1
    assert {play.num_drafted for play in plays("lost drafter")} >= {0, 1, 3}


# ---- keys


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Note every draw of the production code and the toys."""
    return Ledger().installed(monkeypatch)


async def one_play(case: Case, seed: int, num_tokens: int = 24) -> Play:
    """Generate once."""
    draft, target = case.models()
    draft_length = DraftLength(Costs(), MAX_DRAFT_TOKENS, case.num_draft_tokens)
    return await play(case.drafter(draft, seed), ToyScorer(target, seed), draft_length, num_tokens)


@pytest.mark.parametrize("name", CASES)
async def test_no_key_is_consumed_twice(name: str, ledger: Ledger) -> None:
    """Over all rounds of a session, whatever K was; and the generation repeated draws the very same keys."""
    case = CASES[name]
    for seed in range(5):
        first = await one_play(case, seed)
        entries, ledger.entries = ledger.entries, []
        assert len(set(entries)) == len(entries)
        assert {entry_seed for entry_seed, _ in entries} == {seed}
        assert await one_play(case, seed) == first
        assert ledger.entries == entries
        ledger.entries = []


async def test_repeated_calls_decide_the_same() -> None:
    """A proposal or a score asked for again is the one that was lost."""
    draft, target = CASES["K = 3"].models()
    drafter, scorer = ToyDrafter(draft, 5), ToyScorer(target, 5)
    drafted = await drafter.propose([0, 1, 2], 3)
    assert await drafter.propose([0, 1, 2], 3) == drafted
    assert await scorer.score([0, 1, 2], drafted.proposal) == await scorer.score([0, 1, 2], drafted.proposal)


# ---- the contract, bit for bit


def over_the_wire(rows: list[SparseDistribution]) -> list[SparseDistribution]:
    """Return rows as their receiver sees them."""
    return distributions_from_proto(
        types_pb2.SparseDistributions.FromString(distributions_to_proto(rows).SerializeToString())
    )


def test_the_shipped_row_is_the_row_drawn_from() -> None:
    """Drawing from the decoded row with the same uniform gives the shipped token; probabilities survive bit for bit."""
    rows = random_distributions(300)
    assert num_redrawn(rows, over_the_wire(rows)) == 0
    for row, decoded in zip(rows, over_the_wire(rows), strict=True):
        assert (tuple(decoded.token_ids), tuple(decoded.probs)) == (tuple(row.token_ids), tuple(row.probs))


def test_rows_of_every_peakedness_are_tried() -> None:
    """The test above sees single tokens and full supports."""
    sizes = {len(row.token_ids) for row in random_distributions(300)}
    assert {1, 64} <= sizes
