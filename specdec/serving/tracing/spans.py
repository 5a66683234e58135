"""The spans of the request that the task of the moment serves: where its time goes, and nothing of what it is about.

    POST /v1/chat/completions                  a client's request to the gateway, where it comes by HTTP
    GenerationService/Generate                 a client's request; continues the trace of its `traceparent`
    ├── admission, create, claim
    └── round                                  from the choice of its plan to its commit
        ├── propose ──▶ DraftService/Propose   ── queue, forward, sampling     (the worker's process)
        ├── score ──▶ TargetService/Score      ── queue, forward, sampling     (the worker's process)
        ├── accept, commit
        └── emit                               one for each client that follows

Where nothing is traced all of them are NOTHING, whose methods do nothing. A task inherits the span of the task that
made it, so nobody hands spans on. Attributes are counts, names of drafters, addresses of workers and hashes of ids.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self

from specdec.trace_context import Pairs, trace_of

Attribute = str | int | float | bool
CONTEXT_BYTES = 24  # of a traced round in a message to a worker: the trace's id (16) and the span's (8)


class Span:
    """Nothing: the span where nothing is traced. A span that is recorded is in `otlp.py`."""

    __slots__ = ()

    def __enter__(self) -> Self:
        """Be the current span; `__exit__` ends it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""

    def set(self, **attributes: Attribute) -> None:
        """Add facts."""

    def set_session(self, session_id: str) -> None:
        """Add which session it is about, as a hash."""

    def begin(self, name: str, **attributes: Attribute) -> "Span":
        """Return a span within this one that has begun."""
        return self

    def begin_round(self, number: int) -> "Span":
        """Return the span of a session's round, or one that hides what is in it: not all rounds are traced."""
        return self

    def end(self) -> None:
        """End it now."""

    def fail(self, code: str) -> None:
        """Mark it as failed, by a status code."""

    def end_after(self, future: "asyncio.Future[Any]") -> None:
        """End it when a future is done."""

    def add_times(self, answer: Any) -> None:
        """Add what a worker measured of the answer that this span is about: its `timing`, in seconds."""

    def context(self) -> bytes:
        """Return what another process needs to begin a span within this one; empty: nothing is traced."""
        return b""

    def metadata(self) -> Pairs:
        """Return the same as W3C Trace Context has it, as metadata of a call."""
        return ()

    def exemplar(self) -> dict[str, str] | None:
        """Return what leads from a value of a metric to its trace, as OpenMetrics has it; None: nothing is traced."""
        return None


NOTHING = Span()


class Tracer(Protocol):
    """Begins the first spans of this process."""

    def request(self, name: str, metadata: Mapping[str, str]) -> Span:
        """Return the span of a client's request with this metadata."""
        ...

    def answer(self, name: str, context: bytes) -> Span:
        """Return the span of an answer to another process, within its span."""
        ...


_tracer: Tracer | None = None
_current: ContextVar[Span] = ContextVar("span", default=NOTHING)


def turn_on(tracer: Tracer | None) -> None:
    """Trace with this tracer from now on; None: not at all."""
    global _tracer
    _tracer = tracer


def current() -> Span:
    """Return the span that this task is in."""
    return _current.get()


def span(name: str, **attributes: Attribute) -> Span:
    """Return a span within the current one."""
    return _current.get().begin(name, **attributes)


def request(name: str, context: Any) -> Span:
    """Return the span of a client's request, by its call's context."""
    if _tracer is None:
        return NOTHING
    return _tracer.request(name, {key: value for key, value in context.invocation_metadata() if isinstance(value, str)})


def http_request(name: str, headers: Mapping[str, str]) -> Span:
    """Return the span of a client's request over HTTP, by its headers in lower case."""
    return NOTHING if _tracer is None else _tracer.request(name, dict(trace_of(headers)))


def answer(name: str, context: bytes) -> Span:
    """Return the span of an answer to a message with this context; a context that cannot be one is none."""
    if _tracer is None or len(context) != CONTEXT_BYTES:
        return NOTHING
    return _tracer.answer(name, context)


class Current:
    """Makes a span the current one, and gives the place back."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def enter(self) -> None:
        """Be in the span from now on."""
        self._token = _current.set(self._span)

    def leave(self) -> None:
        """Be where this task was before."""
        _current.reset(self._token)


def hashed(session_id: str) -> str:
    """Return a session's id as traces name it: it tells sessions apart, and opens none."""
    return hashlib.blake2b(session_id.encode(), digest_size=8).hexdigest()
