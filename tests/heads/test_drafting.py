"""A head in the worker drafts what its network predicts, whatever arrived when, and for many sessions at once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.heads.drafting.drafter import HeadDrafter
from draft_service.heads.formats.dflash import load_dflash
from draft_service.heads.formats.eagle3 import load_eagle3
from draft_service.heads.formats.medusa import load_medusa
from specdec.errors import InvalidArgumentError, NonFiniteLogitsError
from specdec.exact.values import Observations, Proposal, one_hot
from tests.heads.test_forwards import drafted
from tests.support.architectures import build
from tests.support.cluster import save_tokenizer
from tests.support.head_drafting import KINDS, TargetStates, asked, drafting, packed, session
from tests.support.tiny_heads import save_heads

NUM_TOKENS = 310  # of the tokenizer; the target has 320 rows
REDUCED = 60
TEXT = [7, 31, 250, 9, 100, 7, 31, 44, 2, 300, 17]
K = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with padded logits."""
    return save_tokenizer(build("qwen3", tmp_path_factory.mktemp("target")), NUM_TOKENS)


@pytest.fixture(scope="module")
def states(target: Path) -> TargetStates:
    """What the target computes."""
    return TargetStates(target)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of all kinds, with a reduced vocabulary."""
    return save_heads(target, tmp_path_factory.mktemp("heads"), REDUCED)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, heads: dict[str, Path], target: Path) -> Any:
    """The drafter of a kind."""
    with drafting(request.param, heads[request.param], target) as drafter:
        yield drafter


all_kinds = pytest.mark.parametrize("drafter", KINDS, indirect=True)


def predicted(kind: str, head: Path, target: Path, states: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the network's own probabilities [steps, V] of the most probable chain after a text; V is reduced."""
    text = torch.tensor(tokens)
    root = len(tokens) - 2
    if kind == "eagle3":
        network = load_eagle3(head, target)
        ids = network.vocabulary.target_ids
        for step in range(3):
            logits = drafted(network, states.float(), text[1:], root, step + 1)
            text = torch.cat((text, ids[logits[step].argmax()][None]))
        return logits.softmax(dim=-1)
    if kind == "dflash":
        block = load_dflash(head, target)
        context = block.offered(states[:-1].float(), torch.arange(root + 1))
        return block.predict(text[-1], torch.tensor(root + 1), context, None).softmax(dim=-1)
    return load_medusa(head, target)(states[root, 0].float()).softmax(dim=-1)


@all_kinds
async def test_tree_follows_the_networks_predictions(
    drafter: HeadDrafter, heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    layers = drafter.observations.hidden_layers
    result = await asked(drafter, session(), TEXT, states.observations(TEXT, layers), K)
    probs = predicted(drafter.name, heads[drafter.name], target, states.states(TEXT, layers), TEXT)
    ids = load_medusa(heads["medusa"], target).vocabulary.target_ids
    proposal = result.proposal
    roots = [token for token, parent in zip(proposal.tokens, proposal.tree, strict=True) if parent == 0]
    assert roots == ids[probs[0].topk(len(roots)).indices].tolist()
    path = most_probable_path(proposal)
    assert path == [int(ids[row.argmax()]) for row in probs[: len(path)]]
    assert len(path) > 1 or probs[0].max() * probs[1].max() < 0.02, "a tree of one level shows too little"
    assert proposal.distributions == tuple(map(one_hot, proposal.tokens))


def most_probable_path(proposal: Proposal) -> list[int]:
    """Return the tokens of the first child of the first child and so on."""
    path, position = [], 0
    children = proposal.children()
    while children[position]:
        path.append(proposal.tokens[children[position][0]])
        position = children[position][0] + 1
    return path
