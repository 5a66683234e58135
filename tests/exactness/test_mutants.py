"""Each planted mistake is rejected by the check that is there for it; the production code passes that same check."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from coordinator import rounds
from coordinator.acceptance import accept
from coordinator.draft_length import Costs, DraftLength
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import TokenOrigin
from tests.support import mutants
from tests.support.distributions import (
    Agreement,
    Enumeration,
    History,
    Pair,
    agreement,
    joint_distribution,
    reference_distribution,
    target_text_distribution,
    total_variation,
)
from tests.support.toys import (
    NUM_TOKENS,
    PROMPT,
    Ledger,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    markov_logits,
    num_redrawn,
    play,
    random_distributions,
)

torch.set_num_threads(1)

# ---- enumerated

TEXT_TOKENS, NUM_DRAFT_TOKENS = 3, 2
CONTROLS = (mutants.StopsBeforeUnsure, mutants.DropsRows)


def distance(enumeration: Enumeration) -> Fraction:
    """Return the total variation of the text's distribution from the target's."""
    distribution = enumeration.text_distribution((0,), TEXT_TOKENS, lambda _: NUM_DRAFT_TOKENS)
    assert sum(distribution.values()) == 1
    return total_variation(distribution, target_text_distribution(enumeration.pair, (0,), TEXT_TOKENS))


@cache
def production_distance(pair: Pair) -> Fraction:
    """Return the production rule's distance; the mutants share a few pairs."""
    return distance(Enumeration(pair))


def enumerated_mutants() -> list[type[mutants.Mutant]]:
    """Return all of them."""
    found = [each for each in vars(mutants).values() if isinstance(each, type) and issubclass(each, mutants.Mutant)]
    return [each for each in found if each not in (mutants.Mutant, *CONTROLS)]


@pytest.mark.parametrize("mutant", enumerated_mutants(), ids=lambda mutant: mutant.__name__)
def test_enumeration_rejects(mutant: type[mutants.Mutant]) -> None:
    """It is off by what it says it is, and the production rule on the same distributions by nothing."""
    assert production_distance(mutant().pair) == 0
    found = distance(mutant())
    print(f"{mutant.__name__}: total variation {float(found):.4f}")
    assert found > 0
    assert round(float(found), 4) == mutant().total_variation


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_enumeration_passes_what_only_looks_wrong(control: type[mutants.Mutant]) -> None:
    """Stopping before a draw, and forgetting what a token was drawn from, leave the distribution alone."""
    assert distance(control()) == 0


# ---- the edge that has no measure

CERTAIN_NOT = Scores((TargetDistribution((0.0, 1.0), 0.0, 0), TargetDistribution((), 1.0, 5)))


def accepted_at_zero(rule: Callable[[Proposal, Scores, Uniforms], Verdict]) -> int:
    """Return how many tokens pass that the target rules out, at the uniform 0."""
    return rule(
        Proposal((3,), (SparseDistribution((3, 4), (0.5, 0.5)),)), CERTAIN_NOT, Uniforms((0.0,), 0.0)
    ).num_accepted


def test_the_uniform_zero_rejects_inclusive_acceptance() -> None:
    """`<=` where it must be `<`: total variation 0, and yet an impossible token."""
    assert accepted_at_zero(accept) == 0
    assert accepted_at_zero(mutants.accept_inclusively) == 1


# ---- what is shipped


def test_redrawing_rejects_rows_rounded_after_the_draw() -> None:
    """No statistic of texts sees it; drawing again from the decoded row does."""
    rows = random_distributions(100)
    assert num_redrawn(rows, rows) == 0
    for dtype in (torch.bfloat16, torch.float16):
        shipped = [mutants.rounded(row, dtype) for row in rows]
        assert num_redrawn(rows, [SparseDistribution(row.token_ids, [*map(float, row.probs)]) for row in shipped]) > 0


# ---- the real loop

NUM_GENERATIONS = 2_000
REJECT_BELOW = 1e-6


@dataclass(frozen=True)
class Loop:
    """The real loop with parts to plant mistakes in."""

    drafter: type[ToyDrafter] = ToyDrafter
    scorer: type[ToyScorer] = ToyScorer
    support_max: int = 5
    num_tokens: int = NUM_TOKENS
    num_generations: int = NUM_GENERATIONS
    num_judged: int = NUM_TOKENS  # the first so many tokens, jointly

    async def texts(self) -> list[History]:
        """Generate."""
        draft = ToyModel(markov_logits(11), support_max=self.support_max)
        target = ToyModel(markov_logits(12))
        return [await self.text(draft, target, seed) for seed in range(self.num_generations)]

    async def text(self, draft: ToyModel, target: ToyModel, seed: int) -> History:
        """Generate once."""
        drafter, scorer = self.drafter(draft, seed), self.scorer(target, seed)
        return (await play(drafter, scorer, self.draft_length(drafter), self.num_tokens)).tokens

    def draft_length(self, drafter: ToyDrafter) -> DraftLength:
        """Choose K = 3; a drafter that remembers has its own say."""
        remembers = isinstance(drafter, mutants.RememberingDrafter)
        return drafter.draft_length if remembers else DraftLength(Costs(), 3, 3)

    def judged(self) -> Agreement:
        """Return how the texts agree with the target's distribution."""
        logits = markov_logits(12).numpy()

        def distribution_after(text: History) -> np.ndarray:
            return reference_distribution(logits[(*PROMPT, *text)[-1]], ToyModel(logits).sampling, (), ())

        texts = [text[: self.num_judged] for text in asyncio.run(self.texts())]
        return agreement(texts, joint_distribution(distribution_after, self.num_judged))


def recover_from_target(proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
    """Play RecoversFromTarget in floats."""
    return mutants.RecoversFromTarget().rule(proposal, scores, uniforms)


def accept_all(proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
    """Play AcceptsAll in floats."""
    return Verdict(len(proposal), scores.rows[-1].tail_token, TokenOrigin.BONUS)


def share_one_uniform(proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
    """Test all tokens with the first one's uniform."""
    return accept(proposal, scores, Uniforms(uniforms.accept[:1] * len(proposal), uniforms.close))


LOOPS = {
    "argmax drafts": Loop(mutants.ArgmaxDrafter),
    "discarding drafter": Loop(mutants.DiscardingDrafter),
    "draft keys that accept": Loop(mutants.AcceptKeyDrafter),
    "bonus from the row before": Loop(scorer=mutants.EarlyBonusScorer),
    "tail from the whole row": Loop(scorer=mutants.WholeTailScorer, support_max=3),
}
RULES = [recover_from_target, accept_all, share_one_uniform]


@pytest.mark.parametrize("support_max", [5, 3])
def test_chi_square_passes_the_real_loop(support_max: int) -> None:
    """The controls' control."""
    assert Loop(support_max=support_max).judged().p_value > REJECT_BELOW


@pytest.mark.parametrize("name", LOOPS)
def test_chi_square_rejects(name: str) -> None:
    """A drafter or a scorer with a mistake, in the real loop."""
    result = LOOPS[name].judged()
    print(f"{name}: {result}")
    assert result.p_value < REJECT_BELOW


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_chi_square_rejects_the_rule(
    rule: Callable[[Proposal, Scores, Uniforms], Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rule, in the real loop."""
    monkeypatch.setattr(rounds, "accept", rule)
    result = Loop().judged()
    print(f"{rule.__name__}: {result}")
    assert result.p_value < REJECT_BELOW


def test_chi_square_rejects_keys_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """K chosen from rejected tokens is exact with keys by round, and biased where keys by position come again."""
    loop = Loop(mutants.RememberingDrafter, num_tokens=5, num_judged=2, num_generations=4_000)
    assert loop.judged().p_value > REJECT_BELOW
    Ledger(key_of=mutants.by_position).installed(monkeypatch)
    result = loop.judged()
    print(f"keys by position: {result}")
    assert result.p_value < REJECT_BELOW


# ---- keys


def num_repeated(ledger: Ledger, loop: Loop) -> int:
    """Return how many draws of whole generations used a key that was used before."""
    asyncio.run(loop.texts())
    return len(ledger.entries) - len(set(ledger.entries))


LONG = {"num_tokens": 24, "num_generations": 3}


def test_the_ledger_passes_the_real_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key comes twice."""
    assert num_repeated(Ledger().installed(monkeypatch), Loop(**LONG)) == 0


@pytest.mark.parametrize(
    "loop",
    [Loop(mutants.AcceptKeyDrafter, **LONG), Loop(scorer=mutants.CloseKeyScorer, **LONG)],
    ids=["draft and accept", "close and tail"],
)
def test_the_ledger_rejects_purposes_that_share(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two purposes under one key; of the second, no statistic could tell."""
    assert num_repeated(Ledger().installed(monkeypatch), loop) > 0


def test_the_ledger_rejects_keys_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rejected draft was drawn with is drawn with again."""
    assert num_repeated(Ledger(key_of=mutants.by_position).installed(monkeypatch), Loop(**LONG)) > 0
