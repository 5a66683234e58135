"""Drafts from reports of the target and from other sessions' texts leave the distribution as it is.

The production drafters in the production loop, with toys for the models; one drafter serves all generations, so that
each drafts from what those before it left.
"""

import asyncio
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from benchmarks.judging import Agreement, Floats, History, agreement, joint_distribution, reference_distribution
from coordinator.rounds import DEFAULT_OPTIONS, Drafted, Scored, ScoreOptions
from draft_service import finished_texts
from draft_service.drafters.recycle import RecycleDrafter
from draft_service.drafters.suffix import SuffixDrafter
from draft_service.finished_texts import FinishedTexts
from draft_service.session_texts import TextDrafter
from specdec.drafting.request import DraftRequest
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.values import Observations, Proposal
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from tests.support.counts import TEXTS
from tests.support.toys import (
    NUM_TOKENS,
    PROMPT,
    GenerationResult,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    generate_text,
    markov_logits,
    new_chooser,
)

torch.set_num_threads(1)

NUM_GENERATIONS = 1_500 * TEXTS
NUM_REPEATED = 300  # seeds
NUM_DRAFT_TOKENS = 6
NUM_GENERATED = 6  # so that later rounds draft from observations; the first NUM_TOKENS are judged
POOL_TOKENS = 400  # so that texts are dropped
REJECT_BELOW = 1e-6
SEED_OF_TARGET = 12
TARGET = ToyModel(markov_logits(SEED_OF_TARGET))


@dataclass(slots=True)
class ServedDrafter(ToyDrafter):
    """Asks a drafter of the draft worker, as a coordinator does."""

    drafter: TextDrafter[Any] = field(default_factory=RecycleDrafter)
    loses_observations: bool = False
    observed: Observations | None = None
    num_held: int = 0

    @property
    def session(self) -> WorkerSession:
        """What the worker is told when the stream opens."""
        return WorkerSession(f"session {self.seed}", 1, SamplingParams(seed=self.seed), len(PROMPT), "target")

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return the worker's proposal."""
        request = DraftRequest(self.num_held, committed[self.num_held :], num_draft_tokens, self.observed)
        result = await self.drafter.propose(self.session, request, match=False)
        self.num_held, self.observed = len(committed), None
        return Drafted(result.proposal)

    def observe(self, observations: Observations) -> None:
        """Keep observations for the next request."""
        if not (self.loses_observations and (self.seed + observations.start) % 3):
            self.observed = observations


@dataclass(slots=True)
class RankingScorer(ToyScorer):
    """Also sends all tokens, the most probable first, at the last committed token and at each draft token."""

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answers with observations."""
        scored = await ToyScorer.score(self, committed, proposal, options)
        if not options.observes:
            return scored
        ranked = self.distributions(tuple(committed), proposal).argsort(dim=-1, descending=True).tolist()
        top = tuple(struct.pack(f"<{len(tokens)}I", *tokens) for tokens in ranked)
        return replace(scored, scores=replace(scored.scores, observations=Observations(len(committed) - 1, (), top)))


async def generated(
    drafter: TextDrafter[Any],
    seed: int,
    rule: AcceptanceRule,
    loses_observations: bool = False,
    scorer: type[ToyScorer] = RankingScorer,
) -> GenerationResult:
    """Generate one text; its session is over."""
    served = ServedDrafter(TARGET, seed, drafter, loses_observations)
    chooser = new_chooser(NUM_DRAFT_TOKENS)
    result = await generate_text(served, scorer(TARGET, seed), chooser, NUM_GENERATED, rule)
    drafter.forget(served.session)
    await asyncio.sleep(0)  # the text is indexed
    await asyncio.sleep(0)
    return result


def judged(results: list[GenerationResult]) -> Agreement:
    """Return how texts agree with the target's distribution, which the toys have no part in."""
    logits = markov_logits(SEED_OF_TARGET).numpy()

    def distribution_after(text: History) -> Floats:
        return reference_distribution(logits[(*PROMPT, *text)[-1]], SamplingParams(), PROMPT, text)

    return agreement(
        [result.tokens[:NUM_TOKENS] for result in results], joint_distribution(distribution_after, NUM_TOKENS)
    )


def acceptance(results: list[GenerationResult]) -> float:
    """Return accepted tokens a generation."""
    return sum(result.total_accepted for result in results) / len(results)


@dataclass(frozen=True)
class Case:
    """One way of drafting."""

    is_recycled: bool
    rule: AcceptanceRule = field(default_factory=TokenRule)
    loses_observations: bool = False


CASES = {
    "recycle": Case(True),
    "recycle, lost observations": Case(True, loses_observations=True),
    "suffix": Case(False),
    "suffix, block": Case(False, BlockRule()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(but=("suffix, block",))
async def test_generated_text_has_the_targets_distribution(name: str) -> None:
    """Joint chi-square over the first four tokens, each generation with a seed of its own."""
    case, finished = CASES[name], FinishedTexts(POOL_TOKENS)
    drafter: TextDrafter[Any] = RecycleDrafter() if case.is_recycled else SuffixDrafter(finished)
    async with asyncio.TaskGroup() as tasks:
        indexing = tasks.create_task(finished.keep_indexing())
        plays = [await generated(drafter, seed, case.rule, case.loses_observations) for seed in range(NUM_GENERATIONS)]
        indexing.cancel()
    result = judged(plays)
    print(f"{name}: {result}, {acceptance(plays):.3f} accepted")
    assert result.p_value > REJECT_BELOW, f"{name}: {result}"
    assert acceptance(plays) > 0.5


# ---- equal seeds


@dataclass(slots=True)
class OlderScorer(RankingScorer):
    """Does not match chosen drafts. A rule accepts them, as it does where they are joined with drawn ones."""

    matches = False


async def repeated(is_recycled: bool) -> list[GenerationResult]:
    """Generate with each seed twice, the second time from what the first left; return the second ones."""
    plays = []
    for seed in range(NUM_REPEATED):
        finished = FinishedTexts(POOL_TOKENS)
        drafter: TextDrafter[Any] = RecycleDrafter() if is_recycled else SuffixDrafter(finished)
        async with asyncio.TaskGroup() as tasks:
            indexing = tasks.create_task(finished.keep_indexing())
            await asyncio.sleep(0)
            await generated(drafter, seed, TokenRule(), scorer=OlderScorer)
            plays.append(await generated(drafter, seed, TokenRule(), scorer=OlderScorer))
            indexing.cancel()
    return plays


@pytest.mark.parametrize("is_recycled", [True, False], ids=["recycle", "suffix"])
async def test_repeated_seeds_have_the_targets_distribution(is_recycled: bool) -> None:
    """A session drafts from nothing that its own draws led to."""
    result = judged(await repeated(is_recycled))
    assert result.p_value > REJECT_BELOW, result


@pytest.fixture
def sharing_whatever_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the mistake: sessions draft from all texts, also from those that their own draws led to."""
    monkeypatch.setattr(finished_texts, "draws_of", lambda session: None)


@pytest.mark.usefixtures("sharing_whatever_was_drawn")
async def test_sharing_among_equal_draws_is_noticed() -> None:
    result = judged(await repeated(is_recycled=False))
    print(result)
    assert result.p_value < REJECT_BELOW
