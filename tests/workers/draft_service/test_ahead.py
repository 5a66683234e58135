"""Rounds that are drafted ahead are those that would be drafted on request; what spoils them leaves no trace."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from draft_service.drafters.model import ModelDrafterSettings
from draft_service.drafters.ngram import NgramDrafter
from draft_service.model.drafter import ModelDrafter
from draft_service.model.forecasts import Forecast
from draft_service.model.tasks import DraftProcessor, ProposeTask
from draft_service.servicer import DraftServicer
from specdec.drafting.request import DraftRequest
from specdec.engine import ContiguousPool, KvCache, LayerShape, Submission
from specdec.engine.loop import Load
from specdec.errors import FencedError
from specdec.exact.sampling import SamplingContext, next_token_distributions
from specdec.exact.values import Proposal, SparseDistribution
from specdec.serving import session_stream
from specdec.serving.model_worker import load_model, new_engine
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb
from tests.support.architectures import CONTEXT_LENGTH
from tests.support.worker_streams import PLAIN, PROMPT, DraftStream, propose_request
from tests.workers.conftest import NUM_TOKENS, Forwards, Reference
from tests.workers.draft_service.streams import (
    SUPPORT_MASS,
    SUPPORT_MAX,
    assert_same,
    decoded,
    expected,
    guess_of,
    in_module_loop,
)

WAIT_S = 60.0
SURE = Forecast(1.0, (), 0.0)


async def until_fed(sizes: list[int], expected_sizes: list[int]) -> None:
    """Return once there were as many forwards, which must be these; the first one may be in pieces."""
    while len(in_one(sizes, expected_sizes[0])) < len(expected_sizes):  # noqa: ASYNC110  # the engine has no event
        await asyncio.sleep(0.001)
    assert in_one(sizes, expected_sizes[0]) == expected_sizes


def in_one(sizes: list[int], num_tokens: int) -> list[int]:
    """Return the sizes with the pieces of a prompt of `num_tokens` in one."""
    count = next((count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) == num_tokens), 1)
    return [sum(sizes[:count]), *sizes[count:]]


@pytest.mark.parametrize(
    ("count", "later", "more"),
    [(4, 4, []), (4, 2, []), (4, 6, [1, 1]), (1, 1, []), (1, 3, [1, 1])],
    ids=["as many", "fewer", "more", "one", "more than one"],
)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@in_module_loop
async def test_rounds_drafted_ahead_equal_rounds_drafted_on_request(
    count: int,
    later: int,
    more: list[int],
    heat: float,
    channel: grpc.aio.Channel,
    ahead_channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    forwards: Forwards,
) -> None:
    """Bit for bit, and with no forward that was done before."""
    sampling, name = SamplingParams(seed=11, temperature=heat), next(names)
    ahead, plain = DraftStream(ahead_channel, name, sampling), DraftStream(channel, next(names), sampling)
    drafted = decoded(await ahead.propose(0, PROMPT, count), count)
    before = [6, *[1] * (count - 1), 1, 2, *[1] * (count - 1)]  # the proposal, the guess, the round after it
    await until_fed(forwards.by_session[name], before)
    length = len(PROMPT) + count
    following = [drafted.tokens[-1], guess_of(reference, [*PROMPT, *drafted.tokens])]
    ahead.text += drafted.tokens
    answer = await ahead.propose(length - 1, following, later)
    assert forwards.by_session[name][len(before) : len(before) + len(more)] == more
    await plain.propose(0, PROMPT, count)
    plain.text += drafted.tokens
    wanted = await plain.propose(length - 1, following, later)
    for each in (answer, wanted):
        each.ClearField("timing")
    assert answer == wanted


@pytest.mark.parametrize("kept", range(4))
@in_module_loop
async def test_a_wrong_guess_leaves_no_trace(
    kept: int, ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """For any number of accepted tokens, with another closing token than guessed."""
    name = next(names)
    stream = DraftStream(ahead_channel, name)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 1, 2, 1, 1])
    closing = (guess_of(reference, [*PROMPT, *drafted]) + 1) % NUM_TOKENS
    text = [*PROMPT, *drafted[:kept], closing]
    start = min(len(text) - 1, len(PROMPT) + 2)
    stream.text = list(text)
    answer = await stream.propose(start, text[start:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3))


@in_module_loop
async def test_drafts_ahead_of_another_text_are_not_used(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """Though all that the request repeats of its text is the same."""
    name, other = next(names), [PROMPT[0] + 1, *PROMPT[1:]]
    stream = DraftStream(ahead_channel, name)
    drafted = decoded(await stream.propose(0, other, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    text = [*PROMPT, *drafted, guess_of(reference, [*other, *drafted])]
    stream.text = list(text)
    assert (await stream.propose(7, text[7:], 2)).cached_len == 0
    assert_same(decoded(await stream.propose(0, text, 2), 2), expected(reference, text, 2))


@in_module_loop
async def test_drafts_ahead_of_another_epoch_are_discarded(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """The new owner has another seed here, so that its rounds differ."""
    name, other = next(names), SamplingParams(seed=8)
    drafted = decoded(await DraftStream(ahead_channel, name).propose(0, PROMPT, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    taken_over = DraftStream(ahead_channel, name, other, epoch=2)
    taken_over.text = text
    answer = await taken_over.propose(7, text[7:], 2)
    assert_same(decoded(answer, 2), expected(reference, text, 2, other))


@in_module_loop
async def test_penalties_count_what_was_drafted_ahead(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    sampling, name = SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.3), next(names)
    stream = DraftStream(ahead_channel, name, sampling)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 1, 2, 1, 1])
    context = SamplingContext(sampling, PROMPT, drafted)
    guess = int(next_token_distributions(reference([*PROMPT, *drafted])[-1:], [context], NUM_TOKENS).argmax())
    text = [*PROMPT, *drafted, guess]
    stream.text = list(text)
    answer = await stream.propose(8, text[8:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3, sampling))
    assert forwards.by_session[name][:8] != [6, 1, 1, 1, 2, 1, 1, 2], "it was drafted ahead"


@in_module_loop
async def test_drafting_ahead_ends_with_the_context(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    name, text = next(names), [token % 290 for token in range(CONTEXT_LENGTH - 4)]
    stream = DraftStream(ahead_channel, name)
    await stream.propose(0, text, 2)
    await until_fed(
        forwards.by_session[name], [CONTEXT_LENGTH - 4, 1, 1, 2, 1]
    )  # one token is left, and one that is never fed
    whole = next(names)
    stream = DraftStream(ahead_channel, whole)
    assert len((await stream.propose(0, [*text, 1, 2, 3], 5)).tokens) == 2
    await stream.close()
    read = in_one(forwards.by_session[whole], CONTEXT_LENGTH - 1)
    assert read == [CONTEXT_LENGTH - 1, 1], "there is nothing to go on to"


async def close_while_drafting_ahead(
    drafter: ModelDrafter, session: WorkerSession, ask: DraftRequest, drafted: Proposal
) -> None:
    """Close a session on another stream than the one that drafts ahead."""
    drafter.draft_ahead(session, ask, drafted)
    await asyncio.sleep(0.001)
    drafter.forget(replace(session))


def is_busy(load: Load) -> bool:
    """Return whether anything runs, waits or has a place."""
    return bool(load.num_running or load.num_waiting or load.num_resident)


@in_module_loop
async def test_drafting_ahead_stops_for_requests_and_ended_streams(model_folder: Path, forwards: Forwards) -> None:
    settings = ModelDrafterSettings(model=str(model_folder), dtype="float32", port=0)
    model, info = await load_model(settings, str(model_folder))
    engine = new_engine(settings, model, DraftProcessor(info.vocab_size, SUPPORT_MASS, SUPPORT_MAX))
    drafter = ModelDrafter("model", engine, info, num_outcomes=3)
    engine.start()
    try:
        first, second = (WorkerSession(name, 1, PLAIN, len(PROMPT)) for name in ("first", "second"))
        ask = DraftRequest(0, PROMPT, 8)
        drafted = await drafter.propose(first, ask, match=False)
        asking = asyncio.create_task(drafter.propose(second, ask, match=False))
        await asyncio.sleep(0)  # a request is waiting now
        drafter.draft_ahead(first, ask, drafted.proposal)
        await asking
        assert forwards.by_session["first"] == [6, *[1] * 7], "nothing was drafted ahead"

        for session in (first, second):
            drafter.draft_ahead(session, ask, drafted.proposal)
            await asyncio.sleep(0.001)
            drafter.abandon(session, is_latest=True)
        await drafter.propose(first, ask, match=False)
        await close_while_drafting_ahead(drafter, first, ask, drafted.proposal)
        async with asyncio.timeout(WAIT_S):
            while is_busy(engine.load):  # noqa: ASYNC110  # the engine has no event for this
                await asyncio.sleep(0.001)
    finally:
        engine.stop()


@in_module_loop
async def test_an_ended_stream_stops_only_its_own_drafting(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    name = next(names)
    old = DraftStream(ahead_channel, name)
    await old.propose(0, PROMPT, 2)
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    new = DraftStream(ahead_channel, name, epoch=2)
    drafted = decoded(await new.propose(0, PROMPT, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1, 1, 1, 1, 2, 1])
    await old.fail(propose_request(start=6, tokens=[1]))
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    await new.propose(7, text[7:], 2)
    assert forwards.by_session[name][10:11] != [2], "what was drafted ahead is gone"


async def test_a_stream_fenced_while_writing_drafts_nothing_ahead() -> None:
    """The answer is not read before another stream owns the session."""
    asked_ahead: list[int] = []

    class Recorder(NgramDrafter):
        def draft_ahead(self, session: WorkerSession, ask: DraftRequest, proposal: Proposal) -> None:
            asked_ahead.append(session.epoch)

    class Context:
        def __init__(self) -> None:
            self.reads, self.wrote = asyncio.Event(), asyncio.Event()

        async def send_initial_metadata(self, metadata: object) -> None:
            pass

        async def write(self, answer: pb.ProposeResponse) -> None:
            self.wrote.set()
            await self.reads.wait()

    async def requests(epoch: int) -> AsyncIterator[pb.ProposeRequest]:
        yield pb.ProposeRequest(open=pb.OpenDraft(session=session_stream.open_session("s", epoch, PLAIN, 2)))
        yield propose_request(tokens=[1, 2, 1], num_draft_tokens=1)

    servicer = DraftServicer({"ngram": Recorder(1, 3)})
    hanging, reading = Context(), Context()
    reading.reads.set()
    old = asyncio.create_task(servicer.Propose(requests(1), hanging))
    await hanging.wrote.wait()
    await servicer.Propose(requests(2), reading)
    hanging.reads.set()
    with pytest.raises(FencedError):
        await old
    assert asked_ahead == [2]


async def test_drafting_ahead_stops_after_the_current_forward() -> None:
    """It returns what is drafted so far, which a later request can continue."""
    cache, asked = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8)), False
    task = ProposeTask(WorkerSession("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), False, interrupted=lambda: asked)
    task.submit(Submission(1))
    task.sequence = cache.open("s")
    task.prepare()
    task.sequence.reserve(2)
    task.sequence.append([1, 2])
    task.draw_from(SparseDistribution((5,), (1.0,)), SURE)
    assert not task.done
    asked = True
    task.draw_from(SparseDistribution((6,), (1.0,)), SURE)
    assert task.done
    assert task.submission.result == Proposal(
        (5, 6), (SparseDistribution((5,), (1.0,)), SparseDistribution((6,), (1.0,)))
    )
