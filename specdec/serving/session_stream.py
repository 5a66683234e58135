"""Who owns a session at a worker: epochs, and the stream that is a session's claim on the worker's cache.

A stream is: open, rounds, close. A bare end means abandoned: the cache stays for the coordinator that takes the session
over. In grpc.aio a client's cancel or deadline looks like a bare end too, which is why `close` is a message.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from specdec import messages
from specdec.errors import FencedError, InvalidArgumentError
from specdec.serving.telemetry import get_logger
from specdec.types import SamplingParams
from specdec.v1 import types_pb2

MAX_SESSION_ID_CHARACTERS = 128
MAX_REMEMBERED_SESSIONS = 100_000  # some 20 MB; the least recent is forgotten first


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """The session facts that a worker receives when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int
    target: str = ""  # fingerprint of the model that the text belongs to, as far as the worker is told

    @property
    def seed(self) -> int:
        """What keys every draw of the session."""
        seed = self.sampling.seed
        assert seed is not None, "checked when the stream opened"
        return seed


def session_from_proto(message: types_pb2.OpenSession, vocab_size: int | None, target: str = "") -> WorkerSession:
    """Check a stream's first message. Raises InvalidArgumentError."""
    sampling = check_open(message, vocab_size)
    return WorkerSession(message.session_id, message.epoch, sampling, message.num_prompt_tokens, target)


class EpochFence:
    """The highest epoch that each session came with; lower ones are of former owners."""

    def __init__(self, max_sessions: int = MAX_REMEMBERED_SESSIONS) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()  # least recently heard of first
        self._max_sessions = max_sessions

    def check(self, session: WorkerSession) -> None:
        """Record the session's epoch. Raises FencedError if a higher one was seen."""
        highest = self._epochs.get(session.session_id, 0)
        if session.epoch < highest:
            raise FencedError(
                f"the session is at epoch {highest}, this stream at {session.epoch}; its owner has changed"
            )
        self._epochs[session.session_id] = session.epoch
        self._epochs.move_to_end(session.session_id)
        if len(self._epochs) > self._max_sessions:
            self._epochs.popitem(last=False)


class SessionStream:
    """One stream's messages: open, rounds, close, in this order."""

    def __init__(self, requests: AsyncIterator[Any], round_field: str) -> None:
        self._requests = requests
        self._round_field = round_field
        self.closed = False  # by a message, not by a bare end
        self.num_rounds = 0  # answered

    async def opening(self) -> Any:
        """Return the first message's `open`; None where the stream ends at once. Raises InvalidArgumentError."""
        async for request in self._requests:
            return self._expect(request, "open")
        return None

    async def rounds(self) -> AsyncIterator[Any]:
        """Give the rounds up to `close` or the stream's end. Raises InvalidArgumentError."""
        async for request in self._requests:
            if request.WhichOneof("payload") == "close":
                self.closed = True
                return
            yield self._expect(request, self._round_field)

    def _expect(self, request: Any, field: str) -> Any:
        given = request.WhichOneof("payload")
        if given != field:
            order = f"open, then {self._round_field} once a round, then close"
            raise InvalidArgumentError({"message": f"is {given or 'empty'} where {field} is due; a stream is: {order}"})
        return getattr(request, field)


class SessionRounds(ABC):
    """What a worker does for one session while its stream is open."""

    def __init__(self, session: WorkerSession, **facts: str) -> None:
        self.session = session
        self.facts = facts  # that belong into the log beside the session

    @abstractmethod
    async def answer(self, message: Any, is_first: bool) -> Message:
        """Return the answer to a round.

        Only a stream's first round may find tokens in the cache that the stream did not send: those of the one before.
        """

    def answered(self) -> None:  # noqa: B027  # optional
        """Use the time until the next round. Returns at once."""

    @abstractmethod
    def forget(self) -> None:
        """Free what is held of the session: it is over."""

    def leave(self) -> None:  # noqa: B027  # optional
        """Stop what `answered` began: the stream has ended, however that came."""


async def serve_session(
    stream: SessionStream,
    write: Callable[[Message], Awaitable[None]],
    fence: EpochFence,
    begin: Callable[[Any], SessionRounds],
) -> None:
    """Answer one session's rounds until its stream ends; `begin` checks the first message.

    Raises FencedError as soon as a higher epoch has come, InvalidArgumentError for messages out of order.
    """
    opening = await stream.opening()
    if opening is None:
        return
    rounds = begin(opening)
    fence.check(rounds.session)
    try:
        await _answer_rounds(stream, write, fence, rounds)
    finally:
        rounds.leave()
        _log_end(stream, rounds)


async def _answer_rounds(
    stream: SessionStream, write: Callable[[Message], Awaitable[None]], fence: EpochFence, rounds: SessionRounds
) -> None:
    async for message in stream.rounds():
        fence.check(rounds.session)
        await write(await rounds.answer(message, is_first=stream.num_rounds == 0))
        stream.num_rounds += 1
        fence.check(rounds.session)  # a write to a coordinator that hangs may outlast its ownership
        rounds.answered()
    if stream.closed:
        fence.check(rounds.session)
        rounds.forget()


def _log_end(stream: SessionStream, rounds: SessionRounds) -> None:
    get_logger().info(
        "session_left",
        session_id=rounds.session.session_id,
        epoch=rounds.session.epoch,
        rounds=stream.num_rounds,
        closed=stream.closed,
        **rounds.facts,
    )


def open_session(
    session_id: str, epoch: int, sampling: SamplingParams, num_prompt_tokens: int
) -> types_pb2.OpenSession:
    """Return the first message of a worker's stream; `sampling` has its seed."""
    return types_pb2.OpenSession(
        session_id=session_id,
        epoch=epoch,
        sampling=messages.sampling_to_proto(sampling),
        num_prompt_tokens=num_prompt_tokens,
    )


def check_open(message: types_pb2.OpenSession, vocab_size: int | None) -> SamplingParams:
    """Check a stream's first message in a worker. Raises InvalidArgumentError."""
    if not 1 <= len(message.session_id) <= MAX_SESSION_ID_CHARACTERS or message.epoch < 1:
        needs = f"a session_id of 1 to {MAX_SESSION_ID_CHARACTERS} characters and an epoch of at least 1"
        raise InvalidArgumentError({"open": f"needs {needs}"})
    if not message.sampling.HasField("seed"):
        raise InvalidArgumentError({"open.session.sampling.seed": "is unset; workers need the resolved seed"})
    return messages.sampling_from_proto(message.sampling, vocab_size)
