"""The drafter `self`: some of the target's layers draft, through real servers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.drafters.self import layer_numbers
from draft_service.registry import registered
from draft_service.settings import SETTINGS as DraftSettings
from draft_service.settings import chosen_kinds
from specdec.exact import codec
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.support.worker_streams import PROMPT, DraftStream, connected_draft
from tests.workers.conftest import NUM_TOKENS

GREEDY = SamplingParams(seed=1, temperature=0)


def continued(folder: Path, text: Sequence[int], count: int) -> tuple[int, ...]:
    """Return what the model in a folder continues with, greedily, where its layer 1 returns its input."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: inputs[0])
    tokens = list(text)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1, :NUM_TOKENS].argmax()))
    return tuple(tokens[len(text) :])


async def test_drafts_are_those_of_the_kept_layers(model_folder: Path) -> None:
    settings = {"drafters": "self", "self_model": str(model_folder), "self_layers": "0,2"}
    async with connected_draft(None, **settings) as channel:
        answer = await DraftStream(channel, "s", GREEDY, drafter="self").propose(0, PROMPT, 5)
        offered = await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(draft_pb2.GetDraftRequest())
    assert codec.proposal_from_proto(answer, 5, NUM_TOKENS).tokens == continued(model_folder, PROMPT, 5)
    assert [(drafter.name, drafter.model.num_layers) for drafter in offered.drafters] == [("self", 2)]


async def test_other_layers_are_another_model(model_folder: Path) -> None:
    fingerprints = set()
    for layers in ("0", "1", "0-2"):
        settings = {"drafters": "self", "self_model": str(model_folder), "self_layers": layers}
        async with connected_draft(None, **settings) as channel:
            offered = await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(draft_pb2.GetDraftRequest())
            fingerprints.add(offered.drafters[0].model.fingerprint)
    assert len(fingerprints) == 3


async def test_absent_layers_stop_the_start(model_folder: Path) -> None:
    settings = {"drafters": "self", "self_model": str(model_folder), "self_layers": "0,3"}
    with pytest.raises(ValueError, match="has no layer 3; its 3 layers are 0 to 2"):
        async with connected_draft(None, **settings):
            pass


def test_layers_are_numbers_and_ranges() -> None:
    assert layer_numbers("7, 0,2-4 ,3") == (0, 2, 3, 4, 7)


@pytest.mark.parametrize("text", ["", "0,,1", "five", "5-2", "-1", "0-99999", "1.5"])
def test_malformed_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--self-layers has .*; give numbers and ranges like 0,1,2,5-9"):
        layer_numbers(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafters": "self"}, "--self-model is missing"),
        ({"self_model": "models/target"}, "--self-layers is missing"),
        ({"self_model": "models/target", "self_layers": "x"}, "--self-layers has 'x'"),
    ],
)
def test_incomplete_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_kinds(DraftSettings.model_validate(settings), registered())
