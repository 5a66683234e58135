"""A thread that works step by step on what others hand it, and what they can see of its progress."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from specdec.engine.errors import where_raised

ArrivalT = TypeVar("ArrivalT")

logger = logging.getLogger(__name__)


class WorkerThread(ABC, Generic[ArrivalT]):
    """Steps until it is stopped; what arrives, work or a call, waits in an inbox between steps."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[ArrivalT | Callable[[], None]] = SimpleQueue()
        self._name = name
        self._stopping = False
        self._num_failed = 0  # steps since the last one that succeeded
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    # --- called from anywhere

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in progress; what is not done fails with EngineError. Blocks until then."""
        self._call(self._set_stopping)
        self._thread.join()

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the step in progress began; 0 when the thread is idle."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.perf_counter() - began_s

    @property
    def num_failed_forwards(self) -> int:
        """How many forwards have failed since the last one that succeeded."""
        return self._num_failed

    async def check(self) -> None:
        """Do a little work, to see whether it still fails."""

    def is_stalled(self, max_age_s: float) -> bool:
        """Whether work makes no progress: a step takes longer than `max_age_s`, or the thread has ended."""
        return self.last_step_age_s > max_age_s or not self._thread.is_alive()

    def _call(self, function: Callable[[], None]) -> None:
        """Run a function on the thread, between steps."""
        self._inbox.put(function)

    # --- called on the thread

    def _set_stopping(self) -> None:
        self._stopping = True

    def _work(self) -> None:
        try:
            while True:
                self._take_arrivals()
                if self._stopping:
                    break
                self._step_began_s = time.perf_counter()
                self._step()
                self._step_began_s = None
        except BaseException as error:
            facts = {"thread": self._name, "error": type(error).__name__, "where": where_raised(error)}
            logger.critical("thread_ended", extra=facts)
            raise
        finally:
            self._stopping = True
            self._fail_everything()

    @abstractmethod
    def _take_arrivals(self) -> None:
        """Empty the inbox; wait until there is something in it where there is nothing else to do."""

    @abstractmethod
    def _step(self) -> None:
        """Do some work."""

    @abstractmethod
    def _fail_everything(self) -> None:
        """Fail all that is not done, in the inbox too."""
