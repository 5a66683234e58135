"""A round is drafted ahead of several outcomes of the one before; each is answered as if nothing had been."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
import torch

from draft_service.model import ahead
from draft_service.model.drafted import Drafted
from draft_service.model.forecasts import Rival, forecasts_of
from specdec.exact.values import Proposal, one_hot
from specdec.types import SamplingParams
from tests.support.worker_streams import PLAIN, PROMPT, DraftStream
from tests.workers.conftest import NUM_TOKENS, Forwards, Reference
from tests.workers.draft_service.streams import assert_same, decoded, expected, guess_of, in_module_loop

COUNT = 3
GREEDY = SamplingParams(seed=5, temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": PLAIN,
    "penalties": SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.3),
}


@pytest.fixture(autouse=True)
def _any_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows nothing finds every outcome unlikely."""
    monkeypatch.setattr(ahead, "LEAST_CHANCE", 0.0)


async def until_drafted(forwards: list[int], num_forwards: int) -> None:
    """Return once there were so many forwards, and no more come."""
    async with asyncio.timeout(60):
        while len(forwards) < num_forwards:  # noqa: ASYNC110  # the engine has no event for this
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(forwards) == num_forwards


def rival_of(reference: Reference, text: list[int]) -> int:
    """Return the second most probable next token."""
    return int(reference(text)[-1].topk(2).indices[1])


@pytest.mark.parametrize("num_accepted", range(COUNT + 1))
@in_module_loop
async def test_a_round_after_any_outcome_is_there(
    num_accepted: int,
    outcomes_channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    forwards: Forwards,
) -> None:
    """The answer needs no forward, whatever is accepted; the next round, of other tokens, is right as well."""
    name = next(names)
    stream, sizes = DraftStream(outcomes_channel, name, GREEDY), forwards.by_session[name]
    drafted = decoded(await stream.propose(0, PROMPT, COUNT), COUNT).tokens
    num_drafted = COUNT + 1 + COUNT + COUNT * COUNT  # the proposal, the guess, after all, after each rejection
    await until_drafted(sizes, num_drafted)
    kept = [*PROMPT, *drafted[:num_accepted]]
    text = [*kept, (rival_of if num_accepted < COUNT else guess_of)(reference, kept)]
    stream.text = list(text)
    start = len(PROMPT) + min(num_accepted, COUNT - 1)
    given = await stream.propose(start, text[start:], COUNT)
    assert given.timing.forward_s == 0
    answer = decoded(given, COUNT)
    assert_same(answer, expected(reference, text, COUNT, GREEDY))
    await asyncio.sleep(0.02)
    closing = (guess_of(reference, [*text, *answer.tokens]) + 1) % NUM_TOKENS
    text = [*text, *answer.tokens, closing]
    stream.text = list(text)
    following = await stream.propose(len(text) - 2, text[-2:], COUNT)
    assert_same(decoded(following, COUNT), expected(reference, text, COUNT, GREEDY))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@in_module_loop
async def test_any_course_of_rounds_is_drafted_as_without(
    sampling: SamplingParams, seed: int, outcomes_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Whatever is accepted, whatever closes a round, however many tokens are asked for, and however early."""
    course = random.Random(seed)
    stream, text, start = DraftStream(outcomes_channel, next(names), replace(sampling, seed=seed)), list(PROMPT), 0
    for _ in range(10):
        count = course.randrange(1, 5)
        stream.text = list(text)
        answer = await stream.propose(start, text[start:], count)
        drafted = decoded(answer, count)
        assert_same(drafted, expected(reference, text, count, replace(sampling, seed=seed)))
        await asyncio.sleep(course.choice([0.0, 0.01, 0.05]))
        num_accepted = course.randrange(len(drafted) + 1)
        start = min(answer.cached_len, len(text) + num_accepted)
        text = [*text, *drafted.tokens[:num_accepted]]
        closers = [guess_of(reference, text), rival_of(reference, text), course.randrange(NUM_TOKENS)]
        text.append(course.choice(closers))


@pytest.mark.parametrize("seed", range(4))
@in_module_loop
async def test_matched_drafts_are_the_same_as_without(
    seed: int, channel: grpc.aio.Channel, outcomes_channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """They guess who wins a race; a rival is who may come second. Often everything is accepted."""
    course, text, starts = random.Random(seed), list(PROMPT), [0, 0]
    sampling = replace(PLAIN, seed=seed)
    streams = [DraftStream(each, next(names), sampling, is_matched=True) for each in (channel, outcomes_channel)]
    for _ in range(20):
        answers = []
        for stream, start in zip(streams, starts, strict=True):
            stream.text = list(text)
            answers.append(await stream.propose(start, text[start:], COUNT))
        plain, drafted = (decoded(answer, COUNT) for answer in answers)
        assert drafted == plain
        assert len(plain) == COUNT
        await asyncio.sleep(0.02)
        num_accepted = course.choice([0, 1, COUNT, COUNT])
        starts = [min(answer.cached_len, len(text) + num_accepted) for answer in answers]
        text = [*text, *plain.tokens[:num_accepted], course.randrange(3)]


@in_module_loop
async def test_a_streak_of_hits_is_drafted_as_without(
    outcomes_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Round after round everything is accepted, and closed as the draft has guessed."""
    stream, text, start, num_found = DraftStream(outcomes_channel, next(names), GREEDY), list(PROMPT), 0, 0
    for _ in range(25):
        stream.text = list(text)
        answer = await stream.propose(start, text[start:], COUNT)
        drafted = decoded(answer, COUNT)
        assert_same(drafted, expected(reference, text, COUNT, GREEDY))
        num_found += answer.timing.forward_s == 0
        await asyncio.sleep(0.05)
        start = len(text) + COUNT - 1
        text = [*text, *drafted.tokens]
        text.append(guess_of(reference, text))
    assert num_found > 0


def test_the_likeliest_rejection_comes_first() -> None:
    """By the chances of getting so far, and of the rival there."""
    proposal = Proposal((7, 8, 9), (one_hot(7), one_hot(8), one_hot(9)))
    rivals = Rival(1, 0.1), Rival(2, 0.3), Rival(3, 0.2)
    drafted = Drafted(proposal, (0.9, 0.5, 0.4), rivals)
    assert [(found.num_accepted, found.closing) for found in drafted.rejections()] == [(1, 2), (0, 1), (2, 3)]
    assert [found.chance for found in drafted.rejections()] == pytest.approx([0.27, 0.1, 0.1])


def test_a_rival_is_another_token_than_the_draft() -> None:
    """Also where the drawn token is not the likeliest, and where there is but one."""
    [forecast] = forecasts_of(torch.tensor([[0.0, 2.0, 1.0, -9.0]]))
    assert (forecast.rival(1).token, forecast.rival(2).token, forecast.rival(0).token) == (2, 1, 1)
    [alone] = forecasts_of(torch.tensor([[-torch.inf, 2.0, -torch.inf]]))
    assert alone.confidence == 1.0
    assert alone.rival(1).share == 0.0
