"""Each planted bug is rejected by its check; the production code passes the same check."""

import asyncio
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import ModuleType

import pytest
import torch

from benchmarks.judging import (
    Agreement,
    Floats,
    History,
    agreement,
    joint_distribution,
    reference_distribution,
)
from coordinator.choosing.chooser import PlanChooser
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms
from tests.support import block_mutants, loop_mutants, mutants, tree_mutants
from tests.support.enumeration import Enumeration, target_text_distribution, total_variation
from tests.support.toys import (
    NUM_TOKENS,
    PROMPT,
    DrawRecorder,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    TreeDrafter,
    generate_text,
    markov_logits,
    new_chooser,
    num_redrawn,
    random_distributions,
)

torch.set_num_threads(1)

# ---- enumerated

TEXT_TOKENS = 3
Mutant = mutants.Mutant | tree_mutants.TreeMutant
CONTROLS: list[type[Mutant]] = [
    mutants.StopsBeforeUnsure,
    mutants.DropsDistributions,
    block_mutants.BlockInParts,
    block_mutants.BranchesAfterDrawing,
    tree_mutants.TreeInParts,
]


def distance(enumeration: Enumeration, num_draft_tokens: int) -> Fraction:
    """Return the total variation of the text's distribution from the target's."""
    distribution = enumeration.text_distribution((0,), TEXT_TOKENS, lambda history, note: num_draft_tokens)
    assert sum(distribution.values()) == 1
    return total_variation(distribution, target_text_distribution(enumeration.pair, (0,), TEXT_TOKENS))


def enumerated_mutants(*modules: ModuleType) -> list[type[Mutant]]:
    """Return all of them."""
    bases = (mutants.Mutant, block_mutants.BlockMutant, tree_mutants.TreeMutant)
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    planted = [each for each in found if issubclass(each, bases) and each not in (*bases, *CONTROLS)]
    return sorted(planted, key=lambda each: (each.__module__, each.__name__))


@pytest.mark.parametrize(
    "mutant", enumerated_mutants(mutants, block_mutants, tree_mutants), ids=lambda mutant: mutant.__name__
)
def test_enumeration_rejects(mutant: type[Mutant]) -> None:
    """Its total variation is the documented one; that of the production rule on the same distributions is 0."""
    planted = mutant()
    assert distance(planted.production(), planted.num_draft_tokens) == 0
    found = distance(planted, planted.num_draft_tokens)
    print(f"{mutant.__name__}: total variation {float(found):.4f}")
    assert found > 0
    assert round(float(found), 4) == planted.total_variation


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_enumeration_passes_what_only_looks_wrong(control: type[Mutant]) -> None:
    """Stopping before a draw, forgetting distributions, branching after a draw, and rules put together from parts."""
    assert distance(control(), control().num_draft_tokens) == 0


# ---- the uniform 0

CERTAIN_NOT = Scores((TargetDistribution((0.0, 1.0), 0.0, 0), TargetDistribution((), 1.0, 5)))


def accepted_at_zero(rule: AcceptanceRule) -> int:
    """Return how many tokens pass that the target rules out, at the uniform 0."""
    proposal = Proposal((3,), (SparseDistribution((3, 4), (0.5, 0.5)),))
    return rule.accept(proposal, CERTAIN_NOT, Uniforms((0.0,), 0.0)).num_accepted


def test_the_uniform_zero_rejects_inclusive_acceptance() -> None:
    """`<=` where it must be `<`: total variation 0, and yet an impossible token."""
    assert accepted_at_zero(TokenRule()) == accepted_at_zero(BlockRule()) == 0
    assert accepted_at_zero(mutants.AcceptInclusively()) == 1


# ---- what is shipped


def test_redrawing_rejects_rounding_after_the_draw() -> None:
    """No statistic of texts detects it; drawing again from the decoded distribution does."""
    drawn = random_distributions(100)
    assert num_redrawn(drawn, drawn) == 0
    for dtype in (torch.bfloat16, torch.float16):
        rounded = [mutants.rounded(each, dtype) for each in drawn]
        shipped = [SparseDistribution(each.token_ids, [*map(float, each.probs)]) for each in rounded]
        assert num_redrawn(drawn, shipped) > 0


# ---- the real loop

NUM_GENERATIONS = 2_000
FEWER = 1_000  # where a bug is far from the law
REJECT_BELOW = 1e-6


@dataclass(frozen=True)
class Loop:
    """The real loop with replaceable parts."""

    drafter: type[ToyDrafter] = ToyDrafter
    scorer: type[ToyScorer] = ToyScorer
    rule: AcceptanceRule = field(default_factory=TokenRule)
    support_max: int = 5
    num_draft_tokens: int = 3
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
        return (await generate_text(drafter, scorer, self.chooser(drafter), self.num_tokens, self.rule)).tokens

    def chooser(self, drafter: ToyDrafter) -> PlanChooser:
        """Choose a fixed K; a drafter that remembers chooses its own."""
        if isinstance(drafter, loop_mutants.RememberingDrafter):
            return drafter.chooser
        return new_chooser(self.num_draft_tokens)

    def judged(self) -> Agreement:
        """Return how the texts agree with the target's distribution."""
        target = ToyModel(markov_logits(12))
        logits = target.logits.numpy()

        def distribution_after(text: History) -> Floats:
            return reference_distribution(logits[(*PROMPT, *text)[-1]], target.sampling, (), ())

        texts = [text[: self.num_judged] for text in asyncio.run(self.texts())]
        return agreement(texts, joint_distribution(distribution_after, self.num_judged))


TREES = Loop(TreeDrafter, num_draft_tokens=6, num_tokens=7)  # room for six draft tokens in a first round
LOOPS = {
    "argmax drafts": Loop(loop_mutants.ArgmaxDrafter, num_generations=FEWER),
    "discarding drafter": Loop(loop_mutants.DiscardingDrafter),
    "draft keys that accept": Loop(loop_mutants.AcceptKeyDrafter, num_generations=FEWER),
    "bonus from the position before": Loop(scorer=loop_mutants.EarlyBonusScorer),
    "tail from the whole distribution": Loop(scorer=loop_mutants.WholeTailScorer, support_max=3, num_generations=FEWER),
    "recovered from the target": Loop(rule=mutants.CloseBy(mutants.target_weights), num_generations=FEWER),
    "everything accepted": Loop(rule=mutants.AcceptAll(), num_generations=FEWER),
    "one uniform for all tests": Loop(rule=loop_mutants.ShareOneUniform(), num_generations=FEWER),
    "block: accepts as long as tests pass": Loop(rule=block_mutants.StopAtFailure()),
    "block: product without limit": Loop(rule=block_mutants.UnclippedProduct()),
    "tree: siblings sorted after drawing": Loop(loop_mutants.SortingDrafter, num_generations=FEWER),
    "tree: siblings tested against the target": replace(
        TREES, rule=tree_mutants.TestAgainstTarget(), num_generations=FEWER
    ),
    "tree: bonus of the last position": replace(TREES, rule=tree_mutants.BonusOfLastPosition()),
    "tree: read as a chain": replace(TREES, scorer=loop_mutants.ChainScorer, num_generations=FEWER),
}
SOUND = {
    "supports of five": Loop(),
    "supports of three": Loop(support_max=3),
    "block rule": Loop(rule=BlockRule()),
    "trees": TREES,
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.long(but=("block rule",))
def test_chi_square_passes_the_real_loop(name: str) -> None:
    """The production loop passes the test that must reject the bugs."""
    assert SOUND[name].judged().p_value > REJECT_BELOW


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.long(
    but=(
        "one uniform for all tests",
        "recovered from the target",
        "tail from the whole distribution",
        "everything accepted",
        "tree: siblings sorted after drawing",
    )
)
def test_chi_square_rejects(name: str) -> None:
    """A drafter, a scorer or a rule with a bug, in the real loop."""
    result = LOOPS[name].judged()
    print(f"{name}: {result}")
    assert result.p_value < REJECT_BELOW


@pytest.mark.long
def test_chi_square_rejects_keys_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """K chosen from rejected tokens is exact with keys by round, and biased where keys by position are reused."""
    loop = Loop(loop_mutants.RememberingDrafter, num_tokens=5, num_judged=2, num_generations=4_000)
    assert loop.judged().p_value > REJECT_BELOW
    DrawRecorder(key_of=loop_mutants.by_position).installed(monkeypatch)
    result = loop.judged()
    print(f"keys by position: {result}")
    assert result.p_value < REJECT_BELOW


# ---- keys


def num_repeated(recorder: DrawRecorder, loop: Loop) -> int:
    """Return how many draws of whole generations used a key that was used before."""
    asyncio.run(loop.texts())
    return len(recorder.entries) - len(set(recorder.entries))


def long_loop(drafter: type[ToyDrafter] = ToyDrafter, scorer: type[ToyScorer] = ToyScorer) -> Loop:
    """Return a loop with few long generations."""
    return Loop(drafter, scorer, num_tokens=24, num_generations=3)


@pytest.mark.parametrize("drafter", [ToyDrafter, TreeDrafter])
def test_no_key_is_reused_in_the_real_loop(drafter: type[ToyDrafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is used twice."""
    assert num_repeated(DrawRecorder().installed(monkeypatch), long_loop(drafter)) == 0


@pytest.mark.parametrize(
    "loop",
    [
        long_loop(loop_mutants.AcceptKeyDrafter),
        long_loop(scorer=loop_mutants.CloseKeyScorer),
        long_loop(loop_mutants.SiblingKeyDrafter),
    ],
    ids=["draft and accept", "close and tail", "siblings"],
)
def test_draws_that_share_keys_are_detected(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two purposes, or two siblings, under one key; no statistic could detect the second."""
    assert num_repeated(DrawRecorder().installed(monkeypatch), loop) > 0


def test_keys_by_position_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of rejected draft tokens are used again."""
    assert num_repeated(DrawRecorder(key_of=loop_mutants.by_position).installed(monkeypatch), long_loop()) > 0
