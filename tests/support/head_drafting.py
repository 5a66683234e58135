"""Heads in the worker's own drafter, with a target's real states, in one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draft_service.drafter import DraftResult
from draft_service.heads.build import load_head
from draft_service.heads.drafter import HeadDrafter
from draft_service.heads.loop import HeadLoop
from draft_service.heads.settings import HeadSettings
from specdec.drafting.request import DraftRequest
from specdec.exact.values import Observations
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams

KINDS = ("eagle3", "dflash", "medusa")


@contextmanager
def drafting(kind: str, folder: Path, target: Path, **settings: object) -> Iterator[HeadDrafter]:
    """Run a head as the worker does, in float32 on the CPU unless `settings` say otherwise."""
    chosen = {"head_target": str(target), "dtype": "float32", "device": "cpu", **settings}
    runner, model = load_head(kind, str(folder), HeadSettings.model_validate(chosen))
    loop = HeadLoop(runner)
    loop.start()
    try:
        yield HeadDrafter(kind, runner, loop, model)
    finally:
        loop.stop()


class TargetStates:
    """A target run by transformers, which says what a target worker observes."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Return bfloat16 states [tokens, layers, hidden_size]."""
        output = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1).bfloat16()

    def observations(self, tokens: Sequence[int], layers: Sequence[int], start: int = 0) -> Observations:
        """Return observations of all tokens but the last, as a coordinator sends them; from `start` on."""
        return packed(self.states(tokens, layers)[start:-1], start)


def packed(states: torch.Tensor, start: int) -> Observations:
    """Return states as they cross the wire."""
    return Observations(start, tuple(state.tobytes() for state in states.contiguous().view(torch.int16).numpy()))


def session(name: str = "session", num_prompt_tokens: int = 0, **sampling: object) -> WorkerSession:
    """Return a session."""
    params = SamplingParams(**{"seed": 1, **sampling})  # type: ignore[arg-type]
    return WorkerSession(name, 1, params, num_prompt_tokens)


async def asked(
    drafter: HeadDrafter,
    asking: WorkerSession,
    tokens: Sequence[int],
    observations: Observations | None,
    num_draft_tokens: int = 8,
    start: int = 0,
) -> DraftResult:
    """Play one round: the tokens from `start` on."""
    request = DraftRequest(start, list(tokens[start:]), num_draft_tokens, observations)
    return await drafter.propose(asking, request, match=False)
