"""An event loop in virtual time, and simulated processes whose tasks can be stopped, continued and killed.

Time stands still while anything is ready, then jumps to the next timer. Callbacks run in the order in which they became
ready, timers in the order of their times, then of their creation: nothing depends on the machine.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from operator import attrgetter
from typing import Any, TypeVar, TypeVarTuple

MAX_STEPS = 300_000  # of one world; more is a loop that does not end

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulationStuck(Exception):
    """Nothing is ready and no timer is set, or the world does not end."""


class Process:
    """One simulated operating-system process: what its tasks do is done in its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.went_on_at_s = 0.0  # after it was stopped last
        self.slowness = 1.0  # how many times longer its computations take
        self.on_death: list[Callable[[], None]] = []
        self._held: list[asyncio.Handle] = []  # became ready while it was stopped
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order of creation

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended."""
        return list(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> "asyncio.Task[T]":
        """Run a coroutine in this process."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def stop(self) -> None:
        """Hold everything that it would run, as SIGSTOP does."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Run what was held, as SIGCONT does."""
        if self.is_stopped:
            self.is_stopped, self.went_on_at_s = False, virtual_loop().time()
        held, self._held = self._held, []
        virtual_loop().ready.extend(held)

    def kill(self) -> None:
        """End it, as SIGKILL does: from here on nothing that it does reaches any other process or the store.

        Its tasks are cancelled, so that their coroutines end; network and store drop what their clean-up sends.
        """
        if not self.is_alive:
            return
        self.is_alive = False
        self.go_on()
        for notify in self.on_death:
            notify()
        asyncio.get_running_loop().call_soon(self._reap, context=contextvars.Context())

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep a callback until the process goes on."""
        self._held.append(handle)

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Count a task as this process's until it ends."""
        self._tasks[task] = None
        if not self.is_alive:
            asyncio.get_running_loop().call_soon(self._reap, context=contextvars.Context())
        task.add_done_callback(self._forget, context=contextvars.Context())

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()  # retrieved: what became of a killed process's tasks interests nobody

    def _reap(self) -> None:
        """Cancel what is left, until nothing is: clean-up may start tasks of its own."""
        for task in self.tasks:
            task.cancel()
        if self._tasks:
            asyncio.get_running_loop().call_later(0.001, self._reap, context=contextvars.Context())


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
"""The process in whose name the running code acts; None: the world itself."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files and threads, whose clock is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[asyncio.Handle] = deque()
        self.num_steps = 0
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.set_task_factory(_new_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback after those that are ready."""
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no threads

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]  # it only refuses
        """Refuse: a thread runs in real time."""
        raise SimulationStuck("the simulation has no threads; keep texts and prompts short")

    def _run_once(self) -> None:
        """Run callbacks until the loop is to stop; called by `run_forever`."""
        ready, timers = self.ready, self._timers
        while not self._stopping:  # type: ignore[attr-defined]
            if timers and timers[0][0] <= self._now_s:
                self._wake_due()
            if not ready:
                self._advance()
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                raise SimulationStuck(f"no end after {MAX_STEPS} steps")
            handle = ready.popleft()
            process = _context(handle).get(CURRENT)
            if process is not None and process.is_stopped:
                process.hold(handle)
            elif not _is_cancelled(handle):
                handle._run()

    def _wake_due(self) -> None:
        """Make the timers ready whose time has come."""
        while self._timers and self._timers[0][0] <= self._now_s:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self.ready.append(timer)

    def _advance(self) -> None:
        """Let time jump to the next timer."""
        while not self.ready:
            if not self._timers:
                raise SimulationStuck("nothing is ready, and no timer is set")
            when, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._now_s = max(self._now_s, when)
                self.ready.append(timer)
                self._wake_due()


# of a handle: the context that its callback runs in, which asyncio keeps to itself, and whether it was cancelled
_context: Callable[[asyncio.Handle], contextvars.Context] = attrgetter("_context")
_is_cancelled: Callable[[asyncio.Handle], bool] = attrgetter("_cancelled")


def virtual_loop() -> VirtualLoop:
    """Return the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def outside_of_processes() -> contextvars.Context:
    """Return a context for callbacks of the world itself, such as messages under way: no process can hold them."""
    return contextvars.Context()


def _new_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """Make a task that belongs to the process of its context."""
    context: contextvars.Context | None = options.get("context")
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    process = CURRENT.get() if context is None else context.get(CURRENT)
    if process is not None:
        process.adopt(task)
    return task
