"""What the target drafts with a head of its own leaves the distribution as it is, and each text, whatever it knows.

The demo target and its trained heads in a real target worker, rounds as a coordinator has them. Two
tokens may follow each text, so that the first four make sixteen texts.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from benchmarks.judging import Agreement, agreement_of_counts, joint_distribution, reference_distribution
from specdec.exact.race import times
from specdec.exact.randomness import own_draws
from specdec.exact.values import Proposal, one_hot
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from target_service import own_head
from target_service.own_head import HeadDraft, OwnHead
from tests.support.counts import TEXTS
from tests.support.worker_streams import TargetStream, connected_target
from tests.workers.target_service.streams import Rounds

MODELS = Path(__file__).parents[2] / "models"
VOCAB_SIZE = 4096
NUM_GENERATIONS = 250 * TEXTS
NUM_COMPARED = 40  # seeds
NUM_TOKENS = 4
PROMPT = [314, 271, 828, 182, 845, 904]
SAMPLING = SamplingParams(temperature=1.5, top_k=2)
ASKED = pb.NextRound(plain=True, num_offered=5, learns=True)
REJECT_BELOW = 1e-6
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["eagle3", "dflash"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """A target worker with a head of the kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_head, "MAX_SHARE", 1e9)
        head = str(MODELS / "demo_heads" / request.param)
        async with connected_target(MODELS / "target", head=head, head_kind=request.param) as connected:
            yield connected


@lru_cache(maxsize=1)
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)


@cache
def followers(text: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Return the tokens that may follow a text and their probabilities, by transformers' own forward."""
    with torch.inference_mode():
        logits = target()(torch.tensor([[*PROMPT, *text]])).logits[0, -1].numpy()
    distribution = reference_distribution(logits, SAMPLING, tuple(PROMPT), text)
    return tuple((int(token), float(distribution[token])) for token in np.flatnonzero(distribution))


async def generated(channel: grpc.aio.Channel, name: str, seed: int, *, is_plain: bool = False) -> Rounds:
    sampling = replace(SAMPLING, seed=seed)
    stream = TargetStream(channel, f"{name} {seed} {is_plain}", sampling, num_prompt=len(PROMPT))
    rounds = Rounds(stream, sampling, ASKED, list(PROMPT), vocab_size=VOCAB_SIZE)
    while len(rounds.text) < len(PROMPT) + NUM_TOKENS:
        await rounds.round(Proposal() if is_plain else rounds.draft())
    await stream.close()
    return rounds


def judged(plays: Sequence[Rounds]) -> Agreement:
    """Return how the first tokens agree with their joint distribution; a text is its tokens' places among followers."""
    counts: Counter[tuple[int, ...]] = Counter()
    for play in plays:
        text = tuple(play.text[len(PROMPT) : len(PROMPT) + NUM_TOKENS])
        places = [[token for token, _ in followers(text[:depth])] for depth in range(NUM_TOKENS)]
        counts[tuple(place.index(token) for place, token in zip(places, text, strict=True))] += 1

    def after(places: tuple[int, ...]) -> np.ndarray:
        text: tuple[int, ...] = ()
        for place in places:
            text = (*text, followers(text)[place][0])
        return np.array([prob for _, prob in followers(text)])

    expected = joint_distribution(after, NUM_TOKENS)
    observed = np.array([counts[places] for places in np.ndindex(expected.shape)], dtype=np.float64)
    return agreement_of_counts(observed.reshape(expected.shape), expected)


async def test_generated_text_has_the_targets_distribution(worker: grpc.aio.Channel) -> None:
    """Joint chi-square over the first four tokens, each text with a seed of its own."""
    plays = [await generated(worker, "own", seed) for seed in range(NUM_GENERATIONS)]
    result = judged(plays)
    print(result)
    assert result.p_value > REJECT_BELOW
    assert sum(play.num_accepted for play in plays) > 0.3 * NUM_GENERATIONS


def peeking(self: OwnHead, asked: Sequence[HeadDraft]) -> list[Proposal]:
    """Draft who wins the race, or who loses it, as another draw has it."""
    proposals = []
    for each in asked:
        draw = own_draws(each.session.seed, len(each.text), 1)[0]
        (first, share), (second, _) = followers(tuple(each.text[len(PROMPT) :]))
        assert draw.race
        ((first_s, second_s),) = times([draw.race], np.array([[first, second]]))
        is_first = (first_s / share < second_s / (1 - share)) == (draw.uniform < 0.5)
        proposals.append(Proposal((first if is_first else second,), (one_hot(first if is_first else second),)))
    return proposals


@pytest.mark.parametrize("knows_draws", [False, True])
async def test_the_text_is_that_of_plain_decoding(
    worker: grpc.aio.Channel, knows_draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token, whatever the head drafts: even with the very draws that decide it cannot change a text."""
    if knows_draws:
        monkeypatch.setattr(OwnHead, "draft", peeking)
    num_accepted = 0
    for seed in range(NUM_COMPARED):
        drafted = await generated(worker, f"compared {knows_draws}", seed)
        plain = await generated(worker, f"compared {knows_draws}", seed, is_plain=True)
        assert drafted.text[: len(PROMPT) + NUM_TOKENS] == plain.text
        num_accepted += drafted.num_accepted
    assert num_accepted > 0.3 * NUM_COMPARED
