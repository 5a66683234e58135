"""Drafts of heads leave the distribution as it is: the joint distribution of the first tokens, by chi-square.

Target and heads are tiny and random. The worker's own drafters draft from the target's real hidden states in the
production loop, many sessions at once, and one drafter serves all generations.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.judging import Agreement, Floats, History, agreement, joint_distribution, reference_distribution
from benchmarks.random_heads import save_heads
from coordinator.rounds import DEFAULT_OPTIONS, Drafted, Scored, ScoreOptions
from draft_service.heads.drafter import HeadDrafter
from specdec.drafting.request import DraftRequest
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.sampling import SamplingContext, next_token_distributions
from specdec.exact.tree import path_to
from specdec.exact.values import Observations, Proposal
from specdec.heads.drafting import rounds
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from tests.support.cluster import save_tokenizer
from tests.support.counts import TEXTS
from tests.support.head_drafting import KINDS, TargetStates, drafting, packed
from tests.support.toys import GenerationResult, ToyDrafter, ToyModel, ToyScorer, generate_text, new_chooser

torch.set_num_threads(1)

VOCAB_SIZE = 5
DRAFT_VOCAB_SIZE = 4  # so that one token is never drafted
PROMPT = (0, 1, 4, 2, 1, 3, 0)
NUM_TOKENS = 3  # judged
NUM_GENERATED = 5  # there is room for K in the first rounds
NUM_DRAFT_TOKENS = 4
NUM_GENERATIONS = 400 * TEXTS
NUM_TOGETHER = 100
REJECT_BELOW = 1e-6
LAYERS = (0, 1, 2)  # all states of the target


@dataclass(frozen=True)
class TextTable:
    """The target's logits and states at each token of every text of NUM_GENERATED tokens."""

    logits: torch.Tensor  # float32 [texts, prompt + generated, V]
    states: torch.Tensor  # bfloat16 [texts, prompt + generated, layers, hidden_size]

    def logits_after(self, text: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] after a text that begins with the prompt."""
        return self.logits[_row(text), len(text) - 1]

    def states_at(self, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Return the states [tokens, layers, hidden_size] at each token of a text."""
        return self.states[_row(text), : len(text)][:, list(layers)]


def _row(text: Sequence[int]) -> int:
    """Return the number of the first text that begins so."""
    generated = [*text[len(PROMPT) :], *[0] * (NUM_GENERATED + len(PROMPT) - len(text))]
    return sum(token * VOCAB_SIZE ** (NUM_GENERATED - 1 - place) for place, token in enumerate(generated))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with distributions far from uniform."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS[-1],
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("target")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder, VOCAB_SIZE)


@pytest.fixture(scope="module")
def table(target: Path) -> TextTable:
    """What the target computes, once."""
    texts = torch.tensor([(*PROMPT, *text) for text in product(range(VOCAB_SIZE), repeat=NUM_GENERATED)])
    model = TargetStates(target).model
    with torch.inference_mode():
        output = model(texts, output_hidden_states=True, use_cache=False)
    return TextTable(output.logits, torch.stack(output.hidden_states, dim=2).bfloat16())


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head of each kind."""
    return save_heads(target, tmp_path_factory.mktemp("heads"), DRAFT_VOCAB_SIZE)


@dataclass(slots=True)
class KnownTarget(ToyModel):
    """The target under sampling parameters, looked up."""

    table: TextTable | None = None

    def distribution(self, history: History) -> torch.Tensor:
        """Return the next-token distribution [V] after a text."""
        assert self.table
        if history not in self._distributions:
            context = SamplingContext(self.sampling, PROMPT, history[len(PROMPT) :])
            logits = self.table.logits_after(history)[None]
            self._distributions[history] = next_token_distributions(logits, [context], VOCAB_SIZE)[0]
        return self._distributions[history]


@dataclass(slots=True)
class ServedHead(ToyDrafter):
    """Asks the worker's drafter, as a coordinator does."""

    drafter: HeadDrafter | None = None
    loses_observations: bool = False
    observed: Observations | None = None
    num_held: int = 0
    num_drafting: int = 0  # rounds with a draft

    @property
    def session(self) -> WorkerSession:
        """What the worker is told when the stream opens."""
        sampling = replace(self.model.sampling, seed=self.seed)
        return WorkerSession(f"session {self.seed}", 1, sampling, len(PROMPT), "target")

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return the worker's proposal."""
        assert self.drafter
        request = DraftRequest(self.num_held, committed[self.num_held :], num_draft_tokens, self.observed)
        result = await self.drafter.propose(self.session, request, match=False)
        self.num_held, self.observed = len(committed), None
        self.num_drafting += bool(result.proposal)
        return Drafted(result.proposal)

    def observe(self, observations: Observations) -> None:
        """Keep observations for the next request, if they are not lost."""
        if not (self.loses_observations and (self.seed + observations.start) % 3):
            self.observed = observations


@dataclass(slots=True)
class ObservedTarget(ToyScorer):
    """Also sends the states at the committed tokens that are new, and at each draft token."""

    layers: tuple[int, ...] = ()
    num_seen: int = 0

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answers with observations."""
        assert isinstance(self.model, KnownTarget)
        assert self.model.table
        scored = await ToyScorer.score(self, committed, proposal, options)
        states = [self.model.table.states_at(committed, self.layers)[self.num_seen :]]
        for token in range(len(proposal)):
            path = [proposal.tokens[index] for index in path_to(token + 1, proposal.tree)]
            states.append(self.model.table.states_at([*committed, *path], self.layers)[-1:])
        observations = packed(torch.cat(states), self.num_seen) if options.observes else None
        self.num_seen = len(committed)
        return replace(scored, scores=replace(scored.scores, observations=observations))


@dataclass(frozen=True)
class Case:
    """One way of drafting."""

    shape: str = "tree"
    rule: AcceptanceRule = field(default_factory=TokenRule)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    loses_observations: bool = False


PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.6)
CASES = {
    "tree": Case(),
    "tree, block": Case(rule=BlockRule()),
    "chain": Case("chain"),
    "chain, block": Case("chain", BlockRule()),
    "tree, top_p": Case(sampling=SamplingParams(top_p=0.8)),
    "chain, penalties": Case("chain", sampling=PENALTIES),
    "tree, lost states": Case(loses_observations=True),
    "chain, lost states, block": Case("chain", BlockRule(), loses_observations=True),
}


async def generated(
    drafter: HeadDrafter, model: KnownTarget, case: Case, seed: int
) -> tuple[GenerationResult, ServedHead]:
    """Generate one text."""
    served = ServedHead(model, seed, drafter, case.loses_observations)
    scorer = ObservedTarget(model, seed, drafter.observations.hidden_layers)
    result = await generate_text(served, scorer, new_chooser(NUM_DRAFT_TOKENS), NUM_GENERATED, case.rule)
    drafter.forget(served.session)
    return result, served


async def plays(
    drafter: HeadDrafter, model: KnownTarget, case: Case, num_generations: int
) -> list[tuple[GenerationResult, ServedHead]]:
    """Generate texts, many at once."""
    found = []
    for begin in range(0, num_generations, NUM_TOGETHER):
        seeds = range(begin, min(begin + NUM_TOGETHER, num_generations))
        found += await asyncio.gather(*(generated(drafter, model, case, seed) for seed in seeds))
    return found


def judged(texts: Sequence[History], table: TextTable, sampling: SamplingParams) -> Agreement:
    """Return how texts agree with the target's distribution."""

    def distribution_after(text: History) -> Floats:
        logits = table.logits_after((*PROMPT, *text)).double().numpy()
        return reference_distribution(logits, sampling, PROMPT, text)

    return agreement([text[:NUM_TOKENS] for text in texts], joint_distribution(distribution_after, NUM_TOKENS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(
    but=(
        "chain, block-dflash",
        "chain, penalties-eagle3",
        "tree-eagle3",
        "tree, lost states-medusa",
        "tree, top_p-medusa",
    )
)
async def test_generated_text_has_the_targets_distribution(
    kind: str, name: str, heads: dict[str, Path], target: Path, table: TextTable
) -> None:
    case = CASES[name]
    model = KnownTarget(table.logits[0], case.sampling, prompt=PROMPT, table=table)
    with drafting(kind, heads[kind], target, head_shape=case.shape, support_max=3) as drafter:
        found = await plays(drafter, model, case, NUM_GENERATIONS)
    result = judged([play.tokens for play, _ in found], table, case.sampling)
    accepted = sum(play.total_accepted for play, _ in found) / len(found)
    drafting_rounds = sum(served.num_drafting for _, served in found) / len(found)
    print(f"{kind}, {name}: {result}, {accepted:.2f} accepted, {drafting_rounds:.2f} rounds with drafts")
    assert result.p_value > REJECT_BELOW, f"{kind}, {name}: {result}"
    assert accepted > 0.2
    assert drafting_rounds > 0.5


async def test_most_probable_drafts_with_shipped_distributions_are_noticed(
    heads: dict[str, Path], target: Path, table: TextTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant the mistake: the most probable token is drafted, and the distribution is shipped as if it were drawn."""
    monkeypatch.setattr(rounds, "draw", lambda distribution, uniform: distribution.token_ids[0])
    model = KnownTarget(table.logits[0], prompt=PROMPT, table=table)
    with drafting("medusa", heads["medusa"], target, head_shape="chain") as drafter:
        found = await plays(drafter, model, Case("chain"), NUM_GENERATIONS)
    assert judged([play.tokens for play, _ in found], table, SamplingParams()).p_value < REJECT_BELOW
