"""Through the real loop, the text has the target's distribution, and drafts are accepted as often as expected.

A joint chi-square over the first four tokens sees a total variation of 0.04 to 0.06 at 6,000 generations, as many as
`make exactness` asks for in nearly every case; smaller bugs are for the enumerations to find.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.judging import (
    Agreement,
    Floats,
    History,
    agreement,
    joint_distribution,
    reference_distribution,
    standard_deviations,
)
from coordinator import rounds
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.lookups import LOOKUP
from coordinator.choosing.plans import NOTHING, DraftPlan, Found
from coordinator.choosing.shared_statistics import SharedStatistics
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.codec import distributions_from_proto, distributions_to_proto
from specdec.exact.lookup import TextLookup
from specdec.exact.randomness import Purpose
from specdec.exact.values import SparseDistribution
from specdec.types import SamplingParams
from specdec.v1 import types_pb2
from tests.support import loop_mutants
from tests.support.counts import TEXTS
from tests.support.toys import (
    DRAFT_S,
    MAX_DRAFT_TOKENS,
    NUM_TOKENS,
    PROMPT,
    SCORE_S,
    TOY,
    VOCAB_SIZE,
    DrawRecorder,
    FlakyDrafter,
    GenerationResult,
    LosingDrafter,
    MergingDrafter,
    ObservedScorer,
    ObservingDrafter,
    OlderScorer,
    RepeatingDrafter,
    StemDrafter,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    TreeDrafter,
    generate_text,
    generate_with,
    markov_logits,
    new_chooser,
    num_redrawn,
    random_distributions,
)

torch.set_num_threads(1)

SEED_OF_TARGET, SEED_OF_DRAFT = 12, 11
NUM_GENERATIONS = 1_200 * TEXTS
REJECT_BELOW = 1e-6


@dataclass(frozen=True)
class Case:
    """One way of generating."""

    num_draft_tokens: int | None = 3
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafter: type[ToyDrafter] = ToyDrafter
    scorer: type[ToyScorer] = ToyScorer
    rule: AcceptanceRule = field(default_factory=TokenRule)
    support_mass: float = 1.0
    support_max: int = VOCAB_SIZE
    prompt: History = PROMPT
    num_generations: int = NUM_GENERATIONS
    num_tokens: int = NUM_TOKENS  # generated; the distribution is judged on the first NUM_TOKENS

    def models(self) -> tuple[ToyModel, ToyModel]:
        """Return draft and target."""
        draft = ToyModel(markov_logits(SEED_OF_DRAFT), self.sampling, self.support_mass, self.support_max, self.prompt)
        return draft, ToyModel(markov_logits(SEED_OF_TARGET), self.sampling, prompt=self.prompt)


TREE = Case(6, drafter=TreeDrafter, num_tokens=7)  # room for six draft tokens in a first round
FEWER_TREES = replace(TREE, num_generations=900 * TEXTS)
PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.6)
CASES = {
    "K = 3": Case(num_generations=6_000 * TEXTS),
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
    "block": Case(rule=BlockRule()),
    "block, supports of three": Case(rule=BlockRule(), support_max=3),
    "block, automatic K": Case(None, rule=BlockRule(), num_tokens=6),
    "block, top_p": Case(sampling=SamplingParams(top_p=0.8), rule=BlockRule()),
    "n-gram, not matched": Case(drafter=RepeatingDrafter, scorer=OlderScorer),
    "block, n-gram, not matched": Case(drafter=RepeatingDrafter, scorer=OlderScorer, rule=BlockRule()),
    "trees": TREE,
    "trees with a stem, block": replace(FEWER_TREES, drafter=StemDrafter, rule=BlockRule()),
    "trees, penalties": replace(FEWER_TREES, sampling=PENALTIES, prompt=(0,)),
    "trees, top_p, supports of three": replace(FEWER_TREES, sampling=SamplingParams(top_p=0.9), support_max=3),
    "trees, automatic K": replace(FEWER_TREES, num_draft_tokens=None),
    "merged": replace(FEWER_TREES, drafter=MergingDrafter),
    "merged, block, top_p": Case(4, SamplingParams(top_p=0.9), MergingDrafter, rule=BlockRule(), num_tokens=6),
    "observations": Case(2, drafter=ObservingDrafter, scorer=ObservedScorer, num_tokens=6),
    "lost observations": Case(2, drafter=LosingDrafter, scorer=ObservedScorer, num_tokens=6),
}


SHORT = (
    "K = 1",
    "supports of three",
    "penalties",
    "block, top_p",
    "trees",
    "trees, automatic K",
    "merged, block, top_p",
    "lost observations",
)


@cache
def results(name: str) -> list[GenerationResult]:
    """Return the generations of a case; seeds are 0, 1, 2, ..."""
    case = CASES[name]
    draft, target = case.models()
    shared = SharedStatistics()

    async def generate() -> list[GenerationResult]:
        shared.costs.observe_draft(TOY, 1, DRAFT_S)
        shared.costs.observe_score(1, SCORE_S)
        return [
            await generate_text(
                case.drafter(draft, seed),
                case.scorer(target, seed),
                new_chooser(case.num_draft_tokens, shared),
                case.num_tokens,
                case.rule,
            )
            for seed in range(case.num_generations)
        ]

    return asyncio.run(generate())


def judged(name: str) -> Agreement:
    """Return how the generated texts agree with the target's distribution, computed independently of the toys."""
    return judge([result.tokens[:NUM_TOKENS] for result in results(name)], CASES[name])


def judge(texts: Sequence[History], case: Case) -> Agreement:
    """Return how texts agree with the target's distribution."""
    logits = markov_logits(SEED_OF_TARGET).numpy()

    def distribution_after(text: History) -> Floats:
        return reference_distribution(logits[(*case.prompt, *text)[-1]], case.sampling, case.prompt, text)

    return agreement(texts, joint_distribution(distribution_after, NUM_TOKENS))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(but=SHORT)
def test_generated_text_has_the_targets_distribution(name: str) -> None:
    """Joint chi-square over the first four tokens."""
    result = judged(name)
    print(f"{name}: {result}")
    assert result.p_value > REJECT_BELOW, f"{name}: {result}"


# ---- acceptance

MAX_DEVIATIONS = 5.0


def cut_to_support(distribution: Floats, support_mass: float, support_max: int) -> Floats:
    """Return a distribution cut to the fewest tokens with `support_mass`, at most `support_max`, renormalised; [V]."""
    order = np.argsort(-distribution)[:support_max]
    size = 1 + int((np.cumsum(distribution[order]) < support_mass).sum())
    cut = np.zeros_like(distribution)
    cut[order[:size]] = distribution[order[:size]]
    return normalised(cut)


def normalised(weights: Floats) -> Floats:
    """Return weights over their sum."""
    distribution: Floats = weights / weights.sum()
    return distribution


def distributions_after(case: Case, last: int) -> tuple[Floats, Floats]:
    """Return p and q after a token."""
    target, draft = (markov_logits(seed).numpy()[last] for seed in (SEED_OF_TARGET, SEED_OF_DRAFT))
    q = reference_distribution(draft, case.sampling, (), ())
    return reference_distribution(target, case.sampling, (), ()), cut_to_support(q, case.support_mass, case.support_max)


def survival(case: Case) -> list[float]:
    """Return for i = 1 to K the probability that i tokens or more of a first round are accepted: the mean of w_i.

    Token rule: w_i is the product of min(1, p / q). Block rule: w_i = min(1, w_(i-1) p / q) (Sun et al. 2024).
    """
    is_block = isinstance(case.rule, BlockRule)
    reached: dict[History, tuple[float, float]] = {case.prompt[-1:]: (1.0, 1.0)}  # its probability, its weight
    chances = []
    for _ in range(case.num_draft_tokens or 0):
        longer: dict[History, tuple[float, float]] = {}
        for text, (chance, weight) in reached.items():
            p, q = distributions_after(case, text[-1])
            for token in np.flatnonzero(q):
                ratio = p[token] / q[token]
                next_weight = min(1.0, weight * ratio) if is_block else weight * min(1.0, ratio)
                longer[*text, int(token)] = (chance * q[token], next_weight)
        reached = longer
        chances.append(sum(chance * weight for chance, weight in reached.values()))
    return chances


CHAINS = ["K = 3", "K = 1", "nucleus of the draft", "supports of three", "top_k and top_p"]
BLOCKS = ["block", "block, supports of three", "block, top_p"]


@pytest.mark.parametrize("name", CHAINS + BLOCKS)
@pytest.mark.long(but=[name for name in SHORT if name in CHAINS + BLOCKS])
def test_acceptance_is_the_mean_weight(name: str) -> None:
    """A first round accepts i tokens or more as often as the two distributions say."""
    assert_accepted(name, survival(CASES[name]))


def assert_accepted(name: str, chances: list[float]) -> None:
    """Assert that first rounds accept more than i tokens with probability `chances[i]`."""
    for position, chance in enumerate(chances):
        num_accepted = sum(result.num_accepted > position for result in results(name))
        deviations = standard_deviations(num_accepted, len(results(name)), chance)
        print(f"{name}: more than {position}: {num_accepted} of {len(results(name))}, expected {chance:.4f}")
        assert deviations < MAX_DEVIATIONS, f"position {position}: {num_accepted} of {len(results(name))}, not {chance}"


def test_the_block_rule_accepts_more() -> None:
    """Same drafts, same target: more accepted tokens a round."""
    assert sum(survival(CASES["block"])) > sum(survival(CASES["K = 3"])) + 0.02


def accepted_children(p: Floats, q: Floats, width: int) -> Iterator[tuple[int, int, float]]:
    """Yield rank, token and probability of each child that TreeDrafter may propose at a position and that is accepted.

    The first is drawn from q, the second is the most probable other one, the third is drawn from q.
    """
    if width > 0:
        yield from ((0, token, chance) for token, chance in enumerate(np.minimum(p, q).tolist()))
    left = normalised(np.maximum(p - q, 0)) if width > 1 else p
    for drawn, rejected in enumerate(np.maximum(q - p, 0).tolist() if width > 1 else []):
        certain = int(np.argmax(np.where(np.arange(len(q)) == drawn, -1, q)))
        yield 1, certain, rejected * left[certain]
        after = np.where(np.arange(len(q)) == certain, 0, left)
        if width > 2 and after.any():
            both = np.minimum(normalised(after), q).tolist()
            yield from ((2, token, rejected * (1 - left[certain]) * chance) for token, chance in enumerate(both))


def tree_survival(case: Case, widths: list[int]) -> list[float]:
    """Return the probabilities that one token or more, and two, are accepted; `widths` are of positions 0, 1, 2, 3."""
    one, two = 0.0, 0.0
    for rank, token, chance in accepted_children(*distributions_after(case, case.prompt[-1]), widths[0]):
        one += chance
        below = accepted_children(*distributions_after(case, token), widths[rank + 1])
        two += chance * sum(each for _, _, each in below)
    return [one, two]


@pytest.mark.parametrize("name", ["trees", "trees, top_p, supports of three"])
@pytest.mark.long(but=("trees",))
def test_acceptance_of_trees_is_analytic(name: str) -> None:
    """Six tokens are three at the root, two after the first of them, and one after the second."""
    assert_accepted(name, tree_survival(CASES[name], [3, 2, 1, 0]))


@pytest.mark.long
def test_acceptance_of_a_stem_is_the_blocks() -> None:
    """Where a tree begins with a chain of two, one token or more is accepted as often as of any chain."""
    name = "trees with a stem, block"
    assert_accepted(name, survival(replace(CASES[name], num_draft_tokens=2)))


def test_trees_accept_more_than_one_draft() -> None:
    """The first level of a tree of three siblings accepts more often than a single drawn token."""
    assert tree_survival(CASES["trees"], [3, 2, 1, 0])[0] > survival(CASES["K = 1"])[0] + 0.02


@pytest.mark.long
def test_automatic_draft_length_tries_several() -> None:
    """The automatic K of the case above varies."""
    for name in ("automatic K", "block, automatic K", "trees, automatic K"):
        assert len({result.num_drafted for result in results(name)}) > 1
    assert {result.num_drafted for result in results("lost drafter")} >= {0, 1, 3}


# ---- observations


async def acceptance_rate(drafter: Callable[[ToyModel, int], ToyDrafter]) -> float:
    """Return the accepted fraction over long generations."""
    case, totals = CASES["observations"], defaultdict[str, int](int)
    draft, target = case.models()
    for seed in range(60):
        generated = await generate_text(drafter(draft, seed), ObservedScorer(target, seed), new_chooser(2), 40)
        totals["accepted"] += generated.total_accepted
        totals["drafted"] += generated.total_drafted
    return totals["accepted"] / totals["drafted"]


async def test_lost_observations_only_cost_acceptance() -> None:
    """The distribution is judged above; what is lost is acceptance."""
    rates = [await acceptance_rate(drafter) for drafter in (ObservingDrafter, LosingDrafter, ToyDrafter)]
    print("acceptance with observations, with a few of them, without:", rates)
    assert rates[0] > rates[1] + 0.02
    assert rates[1] > rates[2] + 0.02


# ---- several drafters


async def test_chosen_drafters_leave_the_targets_distribution() -> None:
    """Sessions choose drafter and K by what all sessions measured; costs make the choice change with acceptance."""
    draft, target = CASES["K = 3"].models()
    kinds = {"chain": ToyDrafter, "tree": TreeDrafter, "ngram": RepeatingDrafter}
    shared, used = SharedStatistics(), Counter[str | None]()
    generated = []
    for seed in range(NUM_GENERATIONS):
        chooser = NotingChooser(shared, list(kinds), MAX_DRAFT_TOKENS)
        drafters = {name: kind(draft, seed) for name, kind in kinds.items()}
        generated.append((await generate_with(drafters, ToyScorer(target, seed), chooser, 6)).tokens[:NUM_TOKENS])
        used.update(chooser.drafters)
    result = judge(generated, CASES["K = 3"])
    print(f"{result}; {used}")
    assert result.p_value > REJECT_BELOW
    assert min(used[name] for name in kinds) > 10


@dataclass(frozen=True)
class LookingUp:
    """Texts for which the coordinator may draft what it looks up: that depends on each text, and on earlier ones."""

    rule: AcceptanceRule = field(default_factory=TokenRule)
    num_generations: int = 3 * NUM_GENERATIONS
    used: Counter[str | None] = field(default_factory=Counter)

    async def judged(self) -> Agreement:
        """Generate, and judge."""
        case = Case(prompt=(0, 1, 2, 0, 1, 3, 0, 2, 1, 0, 1), num_tokens=6, rule=self.rule)
        (draft, target), shared, generated = case.models(), SharedStatistics(), []
        for seed in range(self.num_generations):
            chooser = NotingChooser(shared, [TOY], MAX_DRAFT_TOKENS, looks_up=True)
            drafters, scorer = {TOY: ToyDrafter(draft, seed)}, ToyScorer(target, seed)
            text = (await generate_with(drafters, scorer, chooser, 6, self.rule, TextLookup())).tokens
            generated.append(text[:NUM_TOKENS])
            self.used.update(chooser.drafters)
        result = judge(generated, case)
        print(f"{result}; {self.used}")
        return result


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token rule", "block rule"])
@pytest.mark.long(but=("token rule",))
async def test_what_the_coordinator_looks_up_leaves_the_targets_distribution(rule: AcceptanceRule) -> None:
    """The real loop, chooser and lookup."""
    texts = LookingUp(rule)
    assert (await texts.judged()).p_value > REJECT_BELOW
    assert texts.used[LOOKUP] > NUM_GENERATIONS
    assert texts.used[LOOKUP] < 0.9 * texts.used.total()


@pytest.mark.parametrize(
    ("part", "mutant", "num_generations"),
    [
        ("continued", loop_mutants.continued_by_chance, 1_200),
        ("_drafted", loop_mutants.drafted_if_agreed, 6_000),
    ],
    ids=["mass for what was not drawn", "a drawn draft given up for what was looked up"],
)
@pytest.mark.long
async def test_lookups_with_a_bug_are_rejected(
    part: str, mutant: object, num_generations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions that nothing was drawn from, and drafts that are given up for others by what was drawn."""
    monkeypatch.setattr(rounds, part, mutant)
    assert (await LookingUp(num_generations=num_generations).judged()).p_value < REJECT_BELOW


class NotingChooser(PlanChooser):
    """Notes the drafters that it chose."""

    def __init__(
        self, shared: SharedStatistics, drafters: Sequence[str], maximum: int, *, looks_up: bool = False
    ) -> None:
        super().__init__(shared, drafters, maximum, looks_up=looks_up)
        self.drafters: list[str | None] = []

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        """Choose, and note."""
        plan = super().choose(remaining_tokens, available, found)
        self.drafters.append(plan.drafter)
        return plan


# ---- keys


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> DrawRecorder:
    """Record every draw of the production code and the toys."""
    return DrawRecorder().installed(monkeypatch)


async def generate_one(case: Case, seed: int, num_tokens: int = 24) -> GenerationResult:
    """Generate once."""
    draft, target = case.models()
    chooser = new_chooser(case.num_draft_tokens)
    return await generate_text(case.drafter(draft, seed), case.scorer(target, seed), chooser, num_tokens, case.rule)


@pytest.mark.parametrize("name", CASES)
async def test_no_key_is_consumed_twice(name: str, recorder: DrawRecorder) -> None:
    """Over all rounds of a session, whatever K was; and the generation repeated draws the very same keys.

    The target's own draws belong to places in the text: a later round comes to the same place, and draws the same.
    """
    case = CASES[name]
    for seed in range(5):
        first = await generate_one(case, seed)
        entries, recorder.entries = recorder.entries, []
        others = [key for _, key in entries if not (key.purpose is Purpose.TAIL and key.position == 0)]
        assert len(set(others)) == len(others)
        assert len(set(entries)) == len(entries) or case.drafter in (RepeatingDrafter, MergingDrafter), "all were drawn"
        assert {entry_seed for entry_seed, _ in entries} == {seed}
        assert await generate_one(case, seed) == first
        assert recorder.entries == entries
        recorder.entries = []


@pytest.mark.parametrize("name", ["K = 3", "trees"])
async def test_repeated_calls_decide_the_same(name: str) -> None:
    """A repeated call returns the lost proposal or score."""
    case = CASES[name]
    draft, target = case.models()
    drafter, scorer = case.drafter(draft, 5), case.scorer(target, 5)
    drafted = await drafter.propose([0, 1, 2], 3)
    assert await drafter.propose([0, 1, 2], 3) == drafted
    assert await scorer.score([0, 1, 2], drafted.proposal) == await scorer.score([0, 1, 2], drafted.proposal)


# ---- the contract, bit for bit


def over_the_wire(distributions: list[SparseDistribution]) -> list[SparseDistribution]:
    """Return distributions as their receiver sees them."""
    message = distributions_to_proto(distributions).SerializeToString()
    return distributions_from_proto(types_pb2.SparseDistributions.FromString(message), len(distributions))


def test_the_shipped_distribution_is_the_drawn_one() -> None:
    """Drawing again from the decoded distribution gives the shipped token; probabilities survive bit for bit."""
    drawn = random_distributions(300)
    assert num_redrawn(drawn, over_the_wire(drawn)) == 0
    for one, decoded in zip(drawn, over_the_wire(drawn), strict=True):
        assert (tuple(decoded.token_ids), tuple(decoded.probs)) == (tuple(one.token_ids), tuple(one.probs))


def test_distributions_of_every_entropy_are_tested() -> None:
    """The test above sees single tokens and full supports."""
    sizes = {len(each.token_ids) for each in random_distributions(300)}
    assert {1, 64} <= sizes
