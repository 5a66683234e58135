"""The event loop of a service: new calls are heard while many sessions go on.

asyncio runs everything that is ready before it listens again. When the target answers a batch, that is a hundred steps
of sessions, some 10 to 40 ms, and grpc.aio needs several passes of the loop to accept one call. So a pass is short
here, and what has to be quick goes before what is ready (`Priority`): accepting a call, and admitting or refusing it.

Other threads wake the loop through an eventfd, where there is one. asyncio's own socket wakes it as somebody for whom
the caller is going to wait (Linux's "sync" wake-ups): on the caller's processor, which it takes from the caller.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from enum import Enum, auto
from io import FileIO
from typing import Any

PASS_STEPS = 8  # in one pass; each takes some 0.1 ms
FIRST_IN_A_ROW = 8  # then one of the others: no flood of calls stops them
MAX_SIGNALS = 4096  # a socket's buffer holds some hundred
ONE_WAKE = (1).to_bytes(8, sys.byteorder)  # as an eventfd counts


class Priority(Enum):
    """Which steps go before which."""

    FIRST = auto()
    IN_TURN = auto()


_PRIORITY = ContextVar("priority", default=Priority.IN_TURN)


def set_priority(priority: Priority) -> None:
    """Say when this task goes from its next step on, and the tasks that it starts."""
    _PRIORITY.set(priority)


class Steps:
    """What is ready to run, as much of a deque as asyncio's loop uses. Those of one priority keep their order.

    Its length is at most that of a pass: the loop asks for it to know how many it shall run before it listens again.
    """

    def __init__(self) -> None:
        self._first = deque[Any]()
        self._in_turn = deque[tuple[Any, int]]()  # each with the number of those that it must not overtake
        self._num_first, self._num_first_run = 0, 0
        self._num_in_a_row = 0

    def __len__(self) -> int:
        return min(PASS_STEPS, len(self._first) + len(self._in_turn))

    def append(self, handle: Any) -> None:
        """Add a step, by the context in which it will run."""
        if handle._context.get(_PRIORITY) is Priority.FIRST:
            self._num_first += 1
            self._first.append(handle)
        else:
            self._in_turn.append((handle, self._num_first))

    def popleft(self) -> Any:
        """Return the next one.

        No step overtakes one that goes first and was there before: grpc.aio needs to hear that a call has ended before
        its handler goes on.
        """
        if self._first and (self._num_in_a_row < FIRST_IN_A_ROW or not self._may_overtake()):
            self._num_in_a_row += 1
            self._num_first_run += 1
            return self._first.popleft()
        self._num_in_a_row = 0
        return self._in_turn.popleft()[0]

    def _may_overtake(self) -> bool:
        return bool(self._in_turn) and self._in_turn[0][1] <= self._num_first_run

    def clear(self) -> None:
        """Forget them."""
        self._first.clear()
        self._in_turn.clear()
        self._num_first_run = self._num_first


class ServiceLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with short passes.

    Its `_ready` is not public. It is the same in Python 3.11, 3.12 and 3.13, and a test notices a change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready = Steps()
        self._is_woken = False  # by another thread, since it last looked
        self._wakes = _eventfd()
        if self._wakes is not None:
            super().add_reader(self._wakes.fileno(), self._note_woken, self._wakes)

    def close(self) -> None:
        """Close it for good."""
        super().close()
        if self._wakes is not None:
            self._wakes.close()

    def _write_to_self(self) -> None:
        """Wake the loop, which has something new in `_ready`."""
        if self._wakes is None:
            super()._write_to_self()  # type: ignore[misc]  # not public
        elif not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(ValueError, OSError):  # it is closed, or just being: nothing will run any more
                self._wakes.write(ONE_WAKE)

    def _note_woken(self, wakes: FileIO) -> None:
        wakes.read(len(ONE_WAKE))
        self._is_woken = False  # after reading: who wakes meanwhile has something in `_ready`, which the next pass sees

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]  # wider
        """Call back when a file can be read; for the socket of grpc.aio's signals, once for all that are there.

        grpc.aio's thread writes a byte for each event; its callback reads one byte and handles all events. In a busy
        loop some hundred bytes fill the socket, and that thread waits: then events come one in a pass. (asyncio itself
        does not come here with its sockets; grpc.aio comes with the only one.)
        """
        if isinstance(fd, socket.socket):
            context = copy_context()
            context.run(set_priority, Priority.FIRST)  # what waits for these events goes in its own turn
            context.run(super().add_reader, fd, _once_for_all, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _eventfd() -> FileIO | None:
    """Return a new one as a file: once closed it is not mistaken for what gets its number next."""
    if not hasattr(os, "eventfd"):
        return None
    return FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")


def _once_for_all(signals: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Call back, which reads one byte, and take the others that were there.

    Where it fails, as an event is another loop's that is closed, they stay: events are left for the next pass.
    """
    try:
        num_more = len(signals.recv(MAX_SIGNALS, socket.MSG_PEEK | socket.MSG_DONTWAIT)) - 1
    except BlockingIOError:
        return  # another loop of this process was sooner
    callback(*args)
    if num_more > 0:
        with contextlib.suppress(BlockingIOError):
            signals.recv(num_more, socket.MSG_DONTWAIT)
