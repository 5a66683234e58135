"""Who owns a session at a worker: epochs, and the stream that is a session's claim on the worker's cache.

A stream is: open, rounds, close. A bare end means abandoned: the cache stays for whoever takes the session over. In
grpc.aio a client's cancel or deadline looks like a bare end too, which is why `close` is a message.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from specdec import messages
from specdec.errors import FencedError, InvalidArgumentError
from specdec.types import SamplingParams
from specdec.v1 import types_pb2

MAX_SESSION_ID_CHARACTERS = 128
MAX_REMEMBERED_SESSIONS = 100_000  # some 20 MB; one that falls out has not been heard of for as many sessions


@dataclass(frozen=True, slots=True)
class Session:
    """What a worker is told of a session when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int

    @property
    def seed(self) -> int:
        """What keys every draw of the session."""
        seed = self.sampling.seed
        assert seed is not None, "checked when the stream opened"
        return seed


def session_from_proto(message: types_pb2.OpenSession, vocab_size: int | None) -> Session:
    """Check a stream's first message. Raises InvalidArgumentError."""
    sampling = check_open(message, vocab_size)
    return Session(message.session_id, message.epoch, sampling, message.num_prompt_tokens)


class EpochFence:
    """The highest epoch that each session came with; lower ones belong to owners who lost it."""

    def __init__(self, max_sessions: int = MAX_REMEMBERED_SESSIONS) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()  # least recently heard of first
        self._max_sessions = max_sessions

    def check(self, session: Session) -> None:
        """Take note of the session's epoch. Raises FencedError if a higher one has come."""
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
    """One stream's messages, in the only order that makes sense."""

    def __init__(self, requests: AsyncIterator[Any], round_field: str) -> None:
        self._requests = requests
        self._round_field = round_field
        self.closed = False  # by a message, not by a bare end

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
