"""The layer of a head in one call of C: what torch's steps give, for observed pairs and trees, alone and together."""

import pytest
import torch
from torch import nn

from benchmarks import random_heads
from benchmarks.random_heads import eagle3_head
from specdec.drafting.candidate_tree import Guesses
from specdec.engine import layer_structs, linear
from specdec.engine.linear import MIN_FLOAT32_LANES, KernelLinear
from specdec.engine.native import has_bytes, has_pairs, num_lanes
from specdec.engine.quantized import KernelInt8Linear
from specdec.exact.values import Proposal
from specdec.heads.drafting import fast
from specdec.heads.drafting.eagle3 import Eagle3Runner
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.formats.target import TargetFolder, target_folder
from target_service.own_head import HeadDraft, OwnHead, States
from tests.support.architectures import build
from tests.support.head_drafting import session

NUM_TOKENS, MAX_SESSIONS = 40, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFolder:
    """Return a tiny target."""
    return target_folder(str(build("llama", tmp_path_factory.mktemp("target"))))


@pytest.fixture(params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run with vectors of so many floats."""
    if request.param > num_lanes():
        pytest.skip(f"this processor's vectors have {num_lanes()} floats")
    monkeypatch.setattr(layer_structs, "num_lanes", lambda: request.param)
    monkeypatch.setattr(linear, "num_lanes", lambda: request.param)
    lanes: int = request.param
    return lanes


def runner_of(target: TargetFolder, dtype: torch.dtype, kernel: type[nn.Module] | None, **flags: bool) -> Eagle3Runner:
    """Return a runner whose products are of one kind; None: torch's own, in steps."""
    head = eagle3_head(target, fc_norm=True, **flags).to(dtype)

    def joined(*parts: nn.Linear, **_unused: object) -> nn.Module:
        whole = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False)
        whole.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        if kernel is KernelInt8Linear:
            return KernelInt8Linear(whole.weight.detach(), None)
        return kernel(whole) if kernel else whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "joined", joined)
        patch.setattr("specdec.heads.drafting.eagle3.joined", joined)
        predictions = Predictions(head.vocabulary, target.vocab_size, 1.0, 64)
        runner = Eagle3Runner(head, predictions, draws=False, max_bytes=1 << 24)
    assert (runner._network._compiled is not None) == (kernel is not None)
    return runner


def drafts(runner: Eagle3Runner, target: TargetFolder, num_sessions: int) -> tuple[list[Proposal], list[torch.Tensor]]:
    """Let sessions of different lengths draft together, three rounds; return drafts and all outputs of the layer."""
    outputs, run = [], runner._network.run
    runner._network.run = lambda *given: outputs.append(run(*given)) or outputs[-1]  # type: ignore[method-assign, func-returns-value]
    head, found = OwnHead(runner), []
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(target.vocab_size, (MAX_SESSIONS, NUM_TOKENS), generator=generator).tolist()
    states = torch.randn(MAX_SESSIONS, NUM_TOKENS, len(head.layers), target.hidden_size, generator=generator)
    begins = [0] * num_sessions
    for length in (17, 18, 29):
        asked = []
        for number in range(num_sessions):
            end = length + number
            known = States(begins[number], states[number, begins[number] : end - 1])
            guesses = Guesses([3, 4], [0, 1], [0.6, 0.5])
            asked.append(HeadDraft(session(f"{number}"), texts[number][:end], known, 9, guesses=guesses))
            begins[number] = end - 1
        found += head.draft(asked)
    return found, outputs


@pytest.mark.parametrize("num_sessions", [1, 3])
@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_float32_is_what_the_steps_give(
    target: TargetFolder, lanes: int, num_sessions: int, flags: dict[str, bool]
) -> None:
    if lanes < MIN_FLOAT32_LANES:
        pytest.skip("narrow vectors have no kernel")
    expected, steps = drafts(runner_of(target, torch.float32, None, **flags), target, num_sessions)
    found, outputs = drafts(runner_of(target, torch.float32, KernelLinear, **flags), target, num_sessions)
    assert all(expected)
    assert found == expected
    assert len(outputs) == len(steps) > 3
    for one, other in zip(outputs, steps, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def test_the_input_of_a_pair_may_be_wider_than_all_else(target: TargetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bytes():
        pytest.skip("this processor has no kernel of that type")
    config = random_heads.layers_for(target)
    config.intermediate_size = target.hidden_size // 2
    monkeypatch.setattr(random_heads, "layers_for", lambda *_: config)
    in_steps = runner_of(target, torch.float32, KernelInt8Linear)
    in_steps._network._compiled = None
    _, steps = drafts(in_steps, target, 3)
    _, outputs = drafts(runner_of(target, torch.float32, KernelInt8Linear), target, 3)
    assert (outputs[0] - steps[0]).norm() < 0.02 * steps[0].norm()


@pytest.mark.parametrize("kernel", [KernelLinear, KernelInt8Linear])
def test_bfloat16_and_int8_are_close_to_the_steps(target: TargetFolder, kernel: type[nn.Module]) -> None:
    if not (has_pairs() if kernel is KernelLinear else has_bytes()):
        pytest.skip("this processor has no kernel of that type")
    _, steps = drafts(runner_of(target, torch.float32, None), target, 2)
    _, outputs = drafts(runner_of(target, torch.bfloat16, kernel), target, 2)
    first, expected = outputs[0].float(), steps[0]  # later ones may follow other candidates
    assert (first - expected).norm() < 0.05 * expected.norm()


def test_a_draft_is_the_same_alone_and_with_others(target: TargetFolder) -> None:
    if num_lanes() < MIN_FLOAT32_LANES:
        pytest.skip("narrow vectors have no kernel")
    together, _ = drafts(runner_of(target, torch.float32, KernelLinear), target, 3)
    alone, _ = drafts(runner_of(target, torch.float32, KernelLinear), target, 1)
    assert together[::3] == alone
