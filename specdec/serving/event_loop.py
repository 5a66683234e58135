"""The event loop of a service: new calls are heard while many sessions go on.

asyncio runs everything that is ready before it listens again. When the target answers a batch, that is a hundred steps
of sessions, some 10 to 40 ms, and grpc.aio needs several passes of the loop to accept one call. So a pass is short
here, and what has to be quick goes before what is ready (`Priority`): accepting a call, and admitting or refusing it.
Large messages go last until they are admitted: one takes some milliseconds, and many are looked at at once.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from enum import IntEnum
from typing import Any

PASS_STEPS = 8  # in one pass; each takes some 0.1 ms
IN_A_ROW = (8, 8)  # of one priority, then one of a lower one: no flood of some stops the others
MAX_SIGNALS = 4096  # a socket's buffer holds some hundred


class Priority(IntEnum):
    """Which steps go before which."""

    FIRST = 0
    IN_TURN = 1
    LAST = 2  # long ones that nobody waits for in the middle of a text


_PRIORITY = ContextVar("priority", default=Priority.IN_TURN)


def set_priority(priority: Priority) -> None:
    """Say when this task goes from its next step on, and the tasks that it starts."""
    _PRIORITY.set(priority)


class Steps:
    """What is ready to run, as much of a deque as asyncio's loop uses. Those of one priority keep their order.

    Its length is at most that of a pass: the loop asks for it to know how many it shall run before it listens again.
    """

    def __init__(self) -> None:
        self._queues = tuple(deque[Any]() for _ in Priority)
        self._num_in_a_row = [0 for _ in IN_A_ROW]

    def __len__(self) -> int:
        return min(PASS_STEPS, sum(map(len, self._queues)))

    def append(self, handle: Any) -> None:
        """Add a step, by the context in which it will run."""
        self._queues[handle._context.get(_PRIORITY, Priority.IN_TURN)].append(handle)

    def popleft(self) -> Any:
        """Return the next one."""
        for priority, most in enumerate(IN_A_ROW):
            queue, others_wait = self._queues[priority], any(self._queues[priority + 1 :])
            if queue and (self._num_in_a_row[priority] < most or not others_wait):
                # only those count that others wait for: grpc.aio needs to hear that a call has ended before its handler
                # goes on, so what goes first may be passed over in a flood, and not otherwise
                self._num_in_a_row[priority] = self._num_in_a_row[priority] + 1 if others_wait else 0
                return queue.popleft()
            self._num_in_a_row[priority] = 0
        return self._queues[-1].popleft()

    def clear(self) -> None:
        """Forget them."""
        for queue in self._queues:
            queue.clear()


class ServiceLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with short passes.

    Its `_ready` is not public; it is the same from Python 3.11 to 3.14, and a test notices a change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready = Steps()

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


def _once_for_all(signals: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Leave one byte of those that are there, and call back."""
    try:
        num_more = len(signals.recv(MAX_SIGNALS, socket.MSG_PEEK | socket.MSG_DONTWAIT)) - 1
        if num_more > 0:
            signals.recv(num_more, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return  # another loop of this process was sooner
    callback(*args)
