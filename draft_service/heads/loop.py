"""The thread that runs a head for all sessions: each step takes one forward of every round that is under way."""

import contextlib
import logging
import time
from queue import Empty

import torch

from specdec.engine import EngineError
from specdec.engine.worker_thread import WorkerThread
from specdec.exact.values import Proposal
from specdec.heads.drafting.rounds import HeadRound, SessionLost
from specdec.heads.drafting.runner import RoundT, Runner

logger = logging.getLogger(__name__)

ROUNDS_PER_EVICTION = 16  # memory is counted after so many


class HeadLoop(WorkerThread[RoundT]):
    """Runs rounds in batches on one thread of its own."""

    def __init__(self, runner: Runner[RoundT]) -> None:
        super().__init__("head")
        self._runner = runner
        self._rounds: list[RoundT] = []
        self._num_ended = 0  # since memory was last counted

    # --- called from anywhere

    async def run(self, asked: RoundT) -> Proposal:
        """Run a round to its end. Raises SessionLost, EngineError, or what the round failed with."""
        if self._stopping or not self._thread.is_alive():
            raise EngineError("the head is not running; ask another worker")
        future = asked.submit()
        self._inbox.put(asked)
        if self._stopping:  # the thread may have emptied the inbox for the last time
            raise EngineError("the head is stopping; ask another worker")
        return await future

    def forget(self, key: str) -> None:
        """Free a session. Returns at once."""
        self._call(lambda: self._forget(key))

    # --- called on the thread

    def _work(self) -> None:
        with torch.inference_mode():
            super()._work()

    def _take_arrivals(self) -> None:
        """Empty the inbox; while no round is under way, wait until there is something in it."""
        with contextlib.suppress(Empty):
            while True:
                arrival = self._inbox.get(block=not self._rounds and not self._stopping)
                if isinstance(arrival, HeadRound):
                    self._begin(arrival)
                else:
                    arrival()

    def _begin(self, arrived: RoundT) -> None:
        """Let a round begin; an older one of its session, which nobody awaits, ends."""
        key = arrived.session.key
        self._rounds = [under_way for under_way in self._rounds if under_way.session.key != key]
        arrived.begin()
        sessions, request = self._runner.sessions, arrived.request
        if (length := sessions.num_proved(key, request)) < request.start:
            arrived.fail(SessionLost(length))
            return self._deliver(arrived)
        arrived.held = held = sessions.open(key)
        held.update(request, self._runner.num_ahead)
        if held.answer and held.answer[0] == _asked(arrived):
            arrived.finish(held.answer[1])
            return self._deliver(arrived)
        self._rounds.append(arrived)
        try:
            self._runner.begin(arrived)
        except Exception as error:
            self._fail([arrived], error)
        return None

    def _step(self) -> None:
        """Take one step of all rounds; those that nobody awaits any more are dropped."""
        self._end_done()
        if not self._rounds:
            return
        began_s = time.perf_counter()
        try:
            self._runner.step(self._rounds)
            self._num_failed = 0
        except Exception as error:
            self._fail([under_way for under_way in self._rounds if not under_way.done], error)
        elapsed_s = time.perf_counter() - began_s
        for under_way in self._rounds:
            under_way.times.forward_s += elapsed_s
        self._end_done()

    def _end_done(self) -> None:
        for ended in [under_way for under_way in self._rounds if under_way.done]:
            if ended.proposal:
                ended.held.answer = _asked(ended), ended.proposal
            self._deliver(ended)
            self._num_ended += 1
        self._rounds = [under_way for under_way in self._rounds if not under_way.done]
        if self._num_ended >= ROUNDS_PER_EVICTION:
            self._num_ended = 0
            self._runner.sessions.evict({under_way.session.key for under_way in self._rounds})

    def _fail(self, rounds: list[RoundT], cause: Exception) -> None:
        self._num_failed += 1
        logger.error("head_rounds_failed", extra={"error": type(cause).__name__, "num_rounds": len(rounds)})
        for under_way in rounds:
            error = EngineError(f"the head failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            under_way.fail(error)
            self._runner.sessions.forget(under_way.session.key)  # its keys may be incomplete

    def _forget(self, key: str) -> None:
        if all(under_way.session.key != key for under_way in self._rounds):
            self._runner.sessions.forget(key)

    def _deliver(self, ended: HeadRound) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no coroutine awaits the round any more
            ended.event_loop.call_soon_threadsafe(ended.deliver)

    def _fail_everything(self) -> None:
        while not self._inbox.empty():
            arrival = self._inbox.get()
            if isinstance(arrival, HeadRound):
                self._rounds.append(arrival)
        for under_way in self._rounds:
            if not under_way.done:
                under_way.fail(EngineError("the head stopped before the round was done"))
            self._deliver(under_way)


def _asked(one: HeadRound) -> tuple[int, int, bool]:
    """Return what a round's answer depends on, beside the text."""
    return one.request.committed_length, one.num_draft_tokens, one.session.is_matched
