"""Who owns a session at a worker: epochs, and the stream that is a session's claim on the worker's cache.

A stream is: open, rounds, close. A bare end means abandoned: the cache stays for the coordinator that takes the session
over. In grpc.aio a client's cancel or deadline looks like a bare end too, which is why `close` is a message.

A connection that broke at one end only may still deliver messages that its coordinator has given up and repeated on a
new stream. So a session's latest stream to a drafter, or to the target, is its only one, and has one round at a time.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import Message

from specdec import messages
from specdec.errors import FencedError, InvalidArgumentError, UnavailableError
from specdec.exact.race import Race
from specdec.exact.token_counts import TokenCounts
from specdec.serving.grammars import GrammarCompiler, SessionGrammar
from specdec.serving.telemetry import get_logger
from specdec.serving.tracing import spans
from specdec.types import SamplingParams
from specdec.v1 import types_pb2

MAX_SESSION_ID_CHARACTERS = 128
MAX_INCARNATION_CHARACTERS = 64
MAX_EPOCH = 1 << 32  # a store counts takeovers one by one: nobody comes here, and nobody is locked out by a higher one
IN_PROGRESS_S = 2.0  # between two messages that a round is still to be answered
MAX_REMEMBERED_SESSIONS = 100_000  # some 20 MB; the least recent is forgotten first


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """The session facts that a worker receives when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int
    target: str = ""  # fingerprint of the model that the text belongs to, as far as the worker is told
    incarnation: str = ""  # which session of that id; empty: not recorded
    is_matched: bool = False  # all its draft tokens are matched with what the target draws
    counts: TokenCounts = field(default_factory=TokenCounts, compare=False)  # of its text, on the thread of the model
    grammar: SessionGrammar = field(default_factory=SessionGrammar, compare=False)

    @property
    def key(self) -> str:
        """What the worker holds of the session goes by this name: two sessions of one id share nothing."""
        return f"{self.incarnation}/{self.session_id}" if self.incarnation else self.session_id

    @property
    def group(self) -> str:
        """What shares this worker as one: the tenant's hash in the session's id; empty where there are no tenants."""
        return self.session_id.rpartition(".")[0]

    @property
    def seed(self) -> int:
        """What keys every draw of the session."""
        seed = self.sampling.seed
        assert seed is not None, "checked when the stream opened"
        return seed

    def race(self, place: int) -> Race | None:
        """Return the race by which the target draws the token at a place; None where a draft may not run it too.

        Where draft tokens are tested by a rule, it may not depend on any draw of the target.
        """
        return Race(self.seed, place) if self.is_matched and self.sampling.temperature else None


def session_from_proto(
    message: types_pb2.OpenSession,
    vocab_size: int | None,
    target: str = "",
    grammars: GrammarCompiler | None = None,
) -> WorkerSession:
    """Check a stream's first message. Raises InvalidArgumentError."""
    return WorkerSession(
        session_id=message.session_id,
        epoch=message.epoch,
        sampling=check_open(message, vocab_size),
        num_prompt_tokens=message.num_prompt_tokens,
        target=target,
        incarnation=message.incarnation,
        is_matched=message.is_matched,
        grammar=SessionGrammar(grammars),
    )


Claimed = tuple[str, str]  # a session's key, and the drafter that a stream is for: each has a cache of its own


class EpochFence:
    """The highest epoch that each session came with, and its latest stream; all others are of former owners."""

    def __init__(self, max_sessions: int = MAX_REMEMBERED_SESSIONS) -> None:
        # epoch and stream; least recently heard of first
        self._latest: OrderedDict[Claimed, tuple[int, int]] = OrderedDict()
        self._turns: WeakValueDictionary[Claimed, asyncio.Lock] = WeakValueDictionary()
        self._stream_numbers = count(1)
        self._max_sessions = max_sessions

    def enter(self, session: WorkerSession, drafter: str = "") -> "Claim":
        """Return a new stream's claim on a session; older ones to the same drafter (target: empty) lose theirs.

        Raises FencedError as `Claim.check`.
        """
        claimed = session.key, drafter
        turn = self._turns.setdefault(claimed, asyncio.Lock())
        claim = Claim(self, claimed, session.epoch, next(self._stream_numbers), turn)
        claim.check()
        return claim

    def check(self, claim: "Claim") -> None:
        """Record a stream that has sent a message. Raises FencedError, UnavailableError as `Claim.check`."""
        epoch, latest = self._latest.get(claim.claimed, (0, 0))
        if claim.epoch < epoch:
            raise FencedError(f"the session is at epoch {epoch}, this stream at {claim.epoch}; its owner has changed")
        if claim.epoch == epoch and claim.stream_number < latest:
            raise UnavailableError("a newer stream of this session has come; open another one to continue")
        self._latest[claim.claimed] = claim.epoch, claim.stream_number
        self._latest.move_to_end(claim.claimed)
        if len(self._latest) > self._max_sessions:
            self._latest.popitem(last=False)

    def end(self, claim: "Claim") -> None:
        """Record that a session is over: what its owner sent on earlier streams and comes late is a former owner's."""
        if self.is_latest(claim):
            self._latest[claim.claimed] = claim.epoch + 1, 0

    def has_ended(self, claim: "Claim") -> bool:
        """Return whether a newer stream of the same epoch has ended the session."""
        return self._latest.get(claim.claimed) == (claim.epoch + 1, 0)

    def is_latest(self, claim: "Claim") -> bool:
        """Return whether no newer stream of the claim's session has come; also of one that was forgotten."""
        return self._latest.get(claim.claimed, (0, 0)) <= (claim.epoch, claim.stream_number)


@dataclass(frozen=True, slots=True)
class Claim:
    """One stream's claim on its session."""

    fence: EpochFence
    claimed: Claimed
    epoch: int
    stream_number: int
    turn: asyncio.Lock
    """Held while a round runs: a round of an older stream ends before one of a newer stream begins, or is refused."""

    def check(self) -> None:
        """Raise FencedError if a higher epoch was seen, UnavailableError if a newer stream of this epoch was."""
        self.fence.check(self)

    def end(self) -> None:
        """Record that the session is over, unless a newer stream has come."""
        self.fence.end(self)

    @property
    def has_ended(self) -> bool:
        """Whether the session is over."""
        return self.fence.has_ended(self)

    @property
    def is_latest(self) -> bool:
        """Whether no newer stream has come: what the worker holds of the session is this one's."""
        return self.fence.is_latest(self)


class SessionStream:
    """One stream's messages: open, rounds, close, in this order."""

    def __init__(self, requests: AsyncIterator[Any], round_field: str, method: str = "") -> None:
        """`round_field` has a round in its message; `method` names the rpc in traces."""
        self._requests = requests
        self._round_field = round_field
        self.method = method
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

    def __init__(self, session: WorkerSession, drafter: str = "") -> None:
        self.session = session
        self.drafter = drafter  # that the stream is for; empty: the target

    @abstractmethod
    async def answer(self, message: Any, is_first: bool) -> Message:
        """Return the answer to a round.

        Only a stream's first round may find tokens in the cache that the stream did not send: those of the one before.
        """

    def in_progress(self) -> Message | None:
        """Return what to send while a round takes long; None for nothing."""
        return None

    def answered(self) -> None:  # noqa: B027  # optional
        """Use the time until the next round. Returns at once."""

    @abstractmethod
    def forget(self) -> None:
        """Free what is held of the session: it is over."""

    def leave(self, is_latest: bool) -> None:  # noqa: B027  # optional
        """Stop what `answered` began: the stream has ended, however that came; `is_latest`: no newer one has come."""


async def serve_session(
    stream: SessionStream,
    write: Callable[[Message], Awaitable[None]],
    fence: EpochFence,
    begin: Callable[[Any], SessionRounds],
) -> None:
    """Answer one session's rounds until its stream ends; `begin` checks the first message.

    Raises FencedError as soon as a higher epoch has come, UnavailableError as soon as a newer stream has,
    InvalidArgumentError for messages out of order.
    """
    opening = await stream.opening()
    if opening is None:
        return
    rounds = begin(opening)
    claim = fence.enter(rounds.session, rounds.drafter)
    try:
        await _answer_rounds(stream, write, claim, rounds)
    finally:
        rounds.leave(is_latest=claim.is_latest)
        if stream.closed:
            claim.end()
        elif claim.has_ended:  # while a round of this stream ran, which may have made again what was freed
            rounds.forget()
        _log_end(stream, rounds)


async def _answer_rounds(
    stream: SessionStream, write: Callable[[Message], Awaitable[None]], claim: Claim, rounds: SessionRounds
) -> None:
    async for message in stream.rounds():
        with spans.answer(stream.method, message.trace_context) as answering:
            answering.set_session(rounds.session.session_id)
            async with claim.turn:
                claim.check()
                send = partial(_send, write, message.round)
                answer = await _answered(rounds, rounds.answer(message, is_first=stream.num_rounds == 0), send)
            answering.add_times(answer)
        await send(answer)
        stream.num_rounds += 1
        claim.check()  # a write to a coordinator that hangs may outlast its ownership
        rounds.answered()
    if stream.closed:
        claim.check()
        rounds.forget()


async def _send(write: Callable[[Message], Awaitable[None]], number: int, answer: Any) -> None:
    """Write an answer with the number of the round that it belongs to."""
    answer.round = number
    await write(answer)


async def _answered(
    rounds: SessionRounds, answer: Coroutine[Any, Any, Message], send: Callable[[Message], Awaitable[None]]
) -> Message:
    """Return the answer; until then tell the coordinator every few seconds that there will be one."""
    answering = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([answering], timeout=IN_PROGRESS_S))[0]:
            if (message := rounds.in_progress()) is not None:
                await send(message)
        return answering.result()
    finally:
        if not answering.done():
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        elif not answering.cancelled():
            answering.exception()  # looked at, so that nothing is logged where the stream ended in the same moment


def _log_end(stream: SessionStream, rounds: SessionRounds) -> None:
    get_logger().info(
        "session_left",
        session_id=rounds.session.session_id,
        epoch=rounds.session.epoch,
        rounds=stream.num_rounds,
        closed=stream.closed,
        **({"drafter": rounds.drafter} if rounds.drafter else {}),
    )


def open_session(
    session_id: str,
    epoch: int,
    sampling: SamplingParams,
    num_prompt_tokens: int,
    incarnation: str = "",
    is_matched: bool = False,
) -> types_pb2.OpenSession:
    """Return the first message of a worker's stream; `sampling` has its seed."""
    return types_pb2.OpenSession(
        session_id=session_id,
        epoch=epoch,
        sampling=messages.sampling_to_proto(sampling),
        num_prompt_tokens=num_prompt_tokens,
        incarnation=incarnation,
        is_matched=is_matched,
    )


def check_open(message: types_pb2.OpenSession, vocab_size: int | None) -> SamplingParams:
    """Check a stream's first message in a worker. Raises InvalidArgumentError."""
    if not 1 <= len(message.session_id) <= MAX_SESSION_ID_CHARACTERS or not 1 <= message.epoch <= MAX_EPOCH:
        needs = f"a session_id of 1 to {MAX_SESSION_ID_CHARACTERS} characters and an epoch from 1 to {MAX_EPOCH}"
        raise InvalidArgumentError({"open": f"needs {needs}"})
    messages.check_id("open.session.incarnation", message.incarnation, MAX_INCARNATION_CHARACTERS)
    if not message.sampling.HasField("seed"):
        raise InvalidArgumentError({"open.session.sampling.seed": "is unset; workers need the resolved seed"})
    return messages.sampling_from_proto(message.sampling, vocab_size)
