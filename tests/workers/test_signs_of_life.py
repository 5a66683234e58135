"""While a round runs, its coordinator is told so every few seconds; and what happens where it cannot be told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.message import Message

from specdec.errors import InvalidArgumentError, UnavailableError
from specdec.serving import session_stream
from specdec.serving.session_stream import SessionRounds, SessionStream, WorkerSession, serve_session
from specdec.types import SamplingParams
from specdec.v1 import target_pb2

SESSION = WorkerSession("s", 1, SamplingParams(seed=1), 1)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_stream, "IN_PROGRESS_S", 0.001)


class Rounds(SessionRounds):
    """One round that is answered when it is told to, or fails then."""

    def __init__(self) -> None:
        super().__init__(SESSION)
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self.was_cancelled = False

    async def answer(self, message: Any, is_first: bool) -> Message:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error:
            raise self.error
        return target_pb2.ScoreResponse(cached_len=1)

    def in_progress(self) -> Message | None:
        return target_pb2.ScoreResponse(in_progress=True)

    def forget(self) -> None:
        """Nothing is held."""


class Writes:
    """What was written; a write may be held up, or fail."""

    def __init__(self) -> None:
        self.signs = asyncio.Semaphore(0)
        self.written: list[Any] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.error: BaseException | None = None
        self.num_at_once = 0

    async def __call__(self, message: Any) -> None:
        assert not self.num_at_once
        self.num_at_once += 1
        try:
            if message.in_progress:
                self.signs.release()
                await self.may_write.wait()
                if self.error:
                    raise self.error
            self.written.append(message)
        finally:
            self.num_at_once -= 1


async def _messages() -> AsyncIterator[Any]:
    yield target_pb2.ScoreRequest(open=target_pb2.OpenTarget())
    yield target_pb2.ScoreRequest(score=target_pb2.Score(round=7))


def serve(rounds: Rounds, writes: Writes) -> "asyncio.Task[None]":
    """Serve a stream of one round."""
    stream = SessionStream(_messages(), "score")
    return asyncio.ensure_future(serve_session(stream, writes, session_stream.EpochFence(), lambda _: rounds))


async def test_signs_come_until_the_answer() -> None:
    rounds, writes = Rounds(), Writes()
    serving = serve(rounds, writes)
    for _ in range(3):
        await writes.signs.acquire()
    rounds.may_end.set()
    await serving
    assert [each.in_progress for each in writes.written[-2:]] == [True, False]
    assert {each.round for each in writes.written} == {7}


async def test_an_answer_waits_for_the_sign_under_way() -> None:
    """Two messages cannot be written at once."""
    rounds, writes = Rounds(), Writes()
    writes.may_write.clear()
    serving = serve(rounds, writes)
    await writes.signs.acquire()
    rounds.may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not serving.done()
    writes.may_write.set()
    await serving
    assert [each.in_progress for each in writes.written] == [True, False]


async def test_a_failed_round_waits_for_the_sign_under_way() -> None:
    rounds, writes = Rounds(), Writes()
    writes.may_write.clear()
    rounds.error = InvalidArgumentError({"score": "is wrong"})
    serving = serve(rounds, writes)
    await writes.signs.acquire()
    rounds.may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    writes.may_write.set()
    with pytest.raises(InvalidArgumentError):
        await serving
    assert [each.in_progress for each in writes.written] == [True]


@pytest.mark.parametrize(
    "error", [UnavailableError("it takes nothing"), asyncio.CancelledError("it has left")], ids=repr
)
async def test_a_sign_that_cannot_be_sent_ends_the_round(error: BaseException) -> None:
    rounds, writes = Rounds(), Writes()
    writes.error = error
    with pytest.raises(type(error)):
        await serve(rounds, writes)
    assert rounds.was_cancelled


async def test_a_cancelled_round_leaves_no_sign_under_way() -> None:
    rounds, writes = Rounds(), Writes()
    writes.may_write.clear()
    serving = serve(rounds, writes)
    await writes.signs.acquire()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert rounds.was_cancelled
    assert (writes.num_at_once, writes.written) == (0, [])
