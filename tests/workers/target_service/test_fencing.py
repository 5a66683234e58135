"""Who may use a session at a target worker: epochs, streams, rounds."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from specdec.errors import FencedError, InvalidArgumentError, UnavailableError, from_rpc_error
from specdec.serving.session_stream import EpochFence, SessionRounds, SessionStream, WorkerSession, serve_session
from specdec.v1 import target_pb2 as pb
from specdec.v1 import types_pb2
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, packed_supports, score_request
from tests.workers.conftest import Reference
from tests.workers.target_service.streams import DRAFT, SUPPORTS, assert_scores, decoded, in_module_loop


@in_module_loop
async def test_a_newer_epoch_fences_the_older_stream(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    name = next(names)
    old = TargetStream(channel, name, epoch=3)
    await old.score(0, PROMPT)
    new = TargetStream(channel, name, epoch=4)
    await new.score(0, PROMPT)
    for message in (score_request(start=6, tokens=[1]), pb.ScoreRequest(close=types_pb2.CloseSession())):
        error = (
            await old.fail(message)
            if message.HasField("score")
            else await TargetStream(channel, name, epoch=3).fail(message)
        )
        assert error.code() == grpc.StatusCode.ABORTED
        assert isinstance(from_rpc_error(error), FencedError)
    late = await TargetStream(channel, name, epoch=2).fail(score_request(start=0, tokens=[1]))
    assert late.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7, "the owner is not disturbed"


@in_module_loop
async def test_closing_a_fenced_stream_frees_nothing(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    name = next(names)
    old = TargetStream(channel, name, epoch=1)
    await old.score(0, PROMPT)
    new = TargetStream(channel, name, epoch=2)
    await new.score(0, PROMPT)
    error = await old.fail(pb.ScoreRequest(close=types_pb2.CloseSession()))
    assert error.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7


@in_module_loop
async def test_late_messages_of_an_older_stream_are_refused(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """A connection that its coordinator gave up may still deliver a round; its epoch is the current one."""
    name = next(names)
    given_up, closing = TargetStream(channel, name), TargetStream(channel, name)
    await given_up.score(0, PROMPT)
    await closing.score(0, PROMPT)
    current = TargetStream(channel, name)
    await current.score(0, [*PROMPT, 3])
    late = score_request(start=6, tokens=[1], draft_tokens=DRAFT, supports=packed_supports(*SUPPORTS))
    for stream, message in ((given_up, late), (closing, pb.ScoreRequest(close=types_pb2.CloseSession()))):
        assert (await stream.fail(message)).code() == grpc.StatusCode.UNAVAILABLE
    answer = await current.score(7, [4, 5])
    assert_scores(decoded(answer, []), reference([*PROMPT, 3, 4, 5]).softmax(-1)[-1:], len(PROMPT) + 3)


@in_module_loop
async def test_draft_tokens_are_a_committed_prefix_only_if_the_digest_says_so(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    stream, start = TargetStream(channel, next(names)), len(PROMPT) + 2
    await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    for committed in (DRAFT[:1], [DRAFT[0], DRAFT[1] + 1]):
        stream.text = [*PROMPT, *committed]
        assert (await stream.score(start, [3])).cached_len == 0
    stream.text = [*PROMPT, *DRAFT[:2]]
    answer = await stream.score(start, [3])
    assert_scores(decoded(answer, []), reference([*stream.text]).softmax(-1)[-1:], start + 1)


async def test_a_session_has_one_round_at_a_time() -> None:
    """A round of an older stream that has begun ends first; one that was only received is refused."""
    fence, events, proceed = EpochFence(), list[str](), asyncio.Event()

    class Rounds(SessionRounds):
        async def answer(self, message: pb.Score, is_first: bool) -> pb.ScoreResponse:
            events.append(f"{message.start} begins")
            await proceed.wait()
            events.append(f"{message.start} ends")
            return pb.ScoreResponse()

        def forget(self) -> None: ...

    async def serve(*starts: int) -> None:
        async def requests() -> AsyncIterator[pb.ScoreRequest]:
            yield pb.ScoreRequest(open=pb.OpenTarget())
            for start in starts:
                yield score_request(start=start)

        async def write(answer: object) -> None: ...

        session = WorkerSession("s", 1, PLAIN, 0)
        await serve_session(SessionStream(requests(), "score"), write, fence, lambda _: Rounds(session))

    older = asyncio.create_task(serve(1, 2))
    while not events:  # noqa: ASYNC110  # the round begins
        await asyncio.sleep(0)
    newer = asyncio.create_task(serve(3))
    for _ in range(10):  # turns of the event loop, more than a round needs to begin
        await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(UnavailableError):
        await older
    await newer
    assert events == ["1 begins", "1 ends", "3 begins", "3 ends"]


async def test_a_stream_that_ends_late_leaves_nothing_of_the_newer_one() -> None:
    """A connection of a former owner may be found dead long after another one has come."""
    fence, left = EpochFence(), list[tuple[int, bool]]()

    class Rounds(SessionRounds):
        async def answer(self, message: pb.Score, is_first: bool) -> pb.ScoreResponse:
            return pb.ScoreResponse()

        def forget(self) -> None: ...

        def leave(self, is_latest: bool) -> None:
            left.append((self.session.epoch, is_latest))

    async def write(answer: object) -> None: ...

    async def serve(epoch: int, ended: asyncio.Event) -> None:
        async def requests() -> AsyncIterator[pb.ScoreRequest]:
            yield pb.ScoreRequest(open=pb.OpenTarget())
            yield score_request(start=1)
            await ended.wait()

        rounds = Rounds(WorkerSession("s", epoch, PLAIN, 0))
        await serve_session(SessionStream(requests(), "score"), write, fence, lambda _: rounds)

    ends = [asyncio.Event(), asyncio.Event()]
    streams = []
    for epoch, ended in enumerate(ends, 1):
        streams.append(asyncio.create_task(serve(epoch, ended)))
        for _ in range(10):  # turns of the event loop, more than a round needs
            await asyncio.sleep(0)
    for ended, stream in zip(ends, streams, strict=True):
        ended.set()
        await stream
    assert left == [(1, False), (2, True)]


async def test_what_comes_after_the_close_of_a_session_is_a_former_owners() -> None:
    """Messages of a stream that its coordinator cut may come after those of the newer one that closed the session."""
    fence, events, proceed = EpochFence(), list[str](), asyncio.Event()

    class Rounds(SessionRounds):
        async def answer(self, message: pb.Score, is_first: bool) -> pb.ScoreResponse:
            events.append("begins")
            await proceed.wait()
            return pb.ScoreResponse()

        def forget(self) -> None:
            events.append("forgotten")

    async def write(answer: object) -> None: ...

    async def serve(epoch: int, *messages: pb.ScoreRequest) -> None:
        async def requests() -> AsyncIterator[pb.ScoreRequest]:
            for message in (pb.ScoreRequest(open=pb.OpenTarget()), *messages):
                yield message

        rounds = Rounds(WorkerSession("s", epoch, PLAIN, 0))
        await serve_session(SessionStream(requests(), "score"), write, fence, lambda _: rounds)

    a_round, closing = score_request(start=1), pb.ScoreRequest(close=types_pb2.CloseSession())
    running = asyncio.create_task(serve(1, a_round))
    while not events:  # noqa: ASYNC110  # the round begins
        await asyncio.sleep(0)
    await serve(1, closing)
    assert events == ["begins", "forgotten"]
    proceed.set()
    with pytest.raises(FencedError):
        await running
    assert events == ["begins", "forgotten", "forgotten"], "what the round made again"
    with pytest.raises(FencedError):
        await serve(1, a_round)
    await serve(2, a_round)
    assert events[3:] == ["begins"], "a new owner may ask again"


async def test_a_round_that_fails_as_its_stream_is_cancelled_leaves_no_error_behind() -> None:
    failing, logged = asyncio.Event(), list[object]()

    class Rounds(SessionRounds):
        async def answer(self, message: pb.Score, is_first: bool) -> pb.ScoreResponse:
            await failing.wait()
            raise InvalidArgumentError({"score": "is wrong"})

        def forget(self) -> None: ...

    async def requests() -> AsyncIterator[pb.ScoreRequest]:
        yield pb.ScoreRequest(open=pb.OpenTarget())
        yield score_request(start=1)

    async def write(answer: object) -> None: ...

    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
    session = WorkerSession("s", 1, PLAIN, 0)
    stream = SessionStream(requests(), "score")
    serving = asyncio.create_task(serve_session(stream, write, EpochFence(), lambda _: Rounds(session)))
    for _ in range(10):  # turns of the event loop, more than the round needs to begin
        await asyncio.sleep(0)
    failing.set()
    await asyncio.sleep(0)  # the round fails in this turn
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    del serving  # with the frames that its exception holds
    for _ in range(10):  # until the loop holds nothing of the round either
        await asyncio.sleep(0)
    gc.collect()
    assert not logged


def test_the_fence_drops_the_least_recent_sessions() -> None:
    claims = EpochFence(max_sessions=2)

    def session(name: str, epoch: int) -> WorkerSession:
        return WorkerSession(name, epoch, PLAIN, 0)

    for name, epoch in (("a", 5), ("b", 5), ("a", 5), ("c", 5)):
        claims.enter(session(name, epoch))
    with pytest.raises(FencedError):
        claims.enter(session("a", 4))
    claims.enter(session("b", 4))
