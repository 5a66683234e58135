"""Drafting ends before a token that is not worth it, and never leaves out one that was drawn."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from specdec.exact.values import Proposal
from specdec.types import SamplingParams
from tests.support.worker_streams import PROMPT, DraftStream, propose_request
from tests.workers.conftest import Forwards, Reference
from tests.workers.draft_service.streams import assert_same, decoded, guess_of, in_module_loop

STOPS = [0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0]


@in_module_loop
@pytest.mark.parametrize("heat", [0.0, 1.0])
async def test_an_unsure_draft_is_shorter(channel: grpc.aio.Channel, names: Iterator[str], heat: float) -> None:
    """The same tokens and distributions, up to where it stopped: nothing that was drawn is left out."""
    sampling, lengths = SamplingParams(seed=11, temperature=heat), []
    whole = decoded(await DraftStream(channel, next(names), sampling).propose(0, PROMPT, 4), 4)
    for stop_below in STOPS:
        stream = DraftStream(channel, next(names), sampling)
        drafted = decoded(await stream.propose(0, PROMPT, 4, stop_below), 4)
        assert_same(drafted, Proposal(whole.tokens[: len(drafted)], whole.distributions[: len(drafted)]))
        lengths.append(len(drafted))
    assert lengths[0] == 4
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2


@in_module_loop
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("later", STOPS)
@pytest.mark.parametrize("first", [0.0, 0.03])
async def test_rounds_drafted_ahead_stop_where_asked(
    first: float,
    later: float,
    heat: float,
    ahead_channel: grpc.aio.Channel,
    channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    forwards: Forwards,
) -> None:
    """What a token costs has changed since it was drafted ahead: a hit is what a miss would have drawn, bit for bit."""
    sampling, name = SamplingParams(seed=11, temperature=heat), next(names)
    ahead, plain = DraftStream(ahead_channel, name, sampling), DraftStream(channel, next(names), sampling)
    drafted = decoded(await ahead.propose(0, PROMPT, 2, first), 2)
    while len(forwards.by_session[name]) < 4:  # noqa: ASYNC110  # the engine has no event for this
        await asyncio.sleep(0.001)
    length = len(PROMPT) + len(drafted)
    following = [drafted.tokens[-1], guess_of(reference, [*PROMPT, *drafted.tokens])]
    answer = await ahead.propose(length - 1, following, 4, later)
    await plain.propose(0, PROMPT, 2, first)
    wanted = await plain.propose(length - 1, following, 4, later)
    for each in (answer, wanted):
        each.ClearField("timing")
    assert answer == wanted


@in_module_loop
@pytest.mark.parametrize("stop_below", [-0.1, 1.5, float("nan")])
async def test_a_chance_is_between_0_and_1(channel: grpc.aio.Channel, names: Iterator[str], stop_below: float) -> None:
    request = propose_request(tokens=PROMPT, num_draft_tokens=2, stop_below=stop_below)
    stream = DraftStream(channel, next(names))
    await stream.open()
    assert "stop_below" in str((await stream.fail(request)).details())
