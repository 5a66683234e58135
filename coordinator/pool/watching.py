"""Keeps a pool up to date: looks its name up every two seconds, and probes each worker in the background."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic

from coordinator import metrics
from coordinator.pool.pool import WorkerPool
from coordinator.pool.resolving import Resolve
from coordinator.pool.worker import Describe, DescriptionT, Worker
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy
from specdec.serving.telemetry import get_logger
from specdec.tls import handshake_problem

RESOLVE_S = 2.0  # between two look-ups of the name
PROBE_S = 5.0  # between two probes of a worker that answers
RETRY = RetryPolicy(first_s=0.1, maximum_s=1.0)  # between two of one that does not


@asynccontextmanager
async def watching(watch: "PoolWatch[DescriptionT]") -> AsyncIterator[WorkerPool[DescriptionT]]:
    """Run a watch while the context lasts; give its pool once all workers were asked."""
    task, asked = asyncio.create_task(watch.run()), asyncio.Event()
    watch.pool.on_change.append(lambda: asked.set() if watch.pool.was_asked else None)
    try:
        await asked.wait()
        yield watch.pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class PoolWatch(Generic[DescriptionT]):
    """Finds the workers of one kind, and probes them.

    `open_channel` opens a channel to one address. The channel to a worker that the name has left closes after its last
    stream.
    """

    def __init__(
        self,
        kind: str,
        resolve: Resolve,
        open_channel: Callable[[str], Any],
        describe: Describe[DescriptionT],
        outside: Outside = REAL,
    ) -> None:
        self.pool: WorkerPool[DescriptionT] = WorkerPool()
        self._kind, self._resolve, self._open_channel = kind, resolve, open_channel
        self._describe, self._outside = describe, outside
        self._began_s = outside.now_s()
        self._out_since_s: float | None = None

    async def run(self) -> None:
        """Watch, forever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for worker in await self._find():
                    group.create_task(self._watch(worker), name=f"{self._kind} pool")
                await asyncio.sleep(RESOLVE_S)

    async def _find(self) -> list[Worker[DescriptionT]]:
        """Look the name up; return the workers that are new."""
        workers = self.pool.workers
        try:
            found = await self._resolve()
        except OSError:
            found = [worker.address for worker in workers.values() if worker.is_listed]  # they may well be there
        new = [self._opened(address) for address in found if address not in workers]
        workers |= {worker.address: worker for worker in new}
        for worker in workers.values():
            worker.is_listed = worker.address in found
        if not self.pool.was_resolved or new:
            self.pool.was_resolved = True
            self.pool.changed()
        return new

    def _opened(self, address: str) -> Worker[DescriptionT]:
        return Worker(address, self._open_channel(address), self._describe, self._note, self._outside)

    async def _watch(self, worker: Worker[DescriptionT]) -> None:
        """Probe one worker until its name is gone and its last stream has ended."""
        num_failures = 0
        try:
            while worker.is_listed or worker.num_streams:
                worker.suspected.clear()
                num_failures = 0 if await worker.probe() else num_failures + 1
                pause_s = RETRY.pause_s(num_failures, 0.0, self._outside.uniform()) if num_failures else PROBE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await worker.suspected.wait()
        finally:
            del self.pool.workers[worker.address]
            metrics.forget_worker(self._kind, worker.address)
            await worker.channel.close()

    def _note(self, worker: Worker[DescriptionT]) -> None:
        """Report a worker's state, and an outage of all once."""
        metrics.WORKER_STATE.labels(self._kind, worker.address).set(worker.state.value)
        reason = {"reason": worker.failure.reason} if worker.failure else {}
        get_logger().info("worker_state", kind=self._kind, worker=worker.address, state=worker.state.name, **reason)
        if self.pool.was_asked:
            self._note_outage()
        self.pool.changed()

    def _note_outage(self) -> None:
        now_s = self._outside.now_s()
        if self.pool.is_available:
            if self._out_since_s is not None:
                get_logger().info("workers_available", kind=self._kind, outage_s=round(now_s - self._out_since_s, 1))
            self._out_since_s = None
        elif self._out_since_s is None:
            self._out_since_s = now_s
            failures = [worker.failure for worker in self.pool.workers.values() if worker.failure]
            causes = [cause.meaning for failure in failures if (cause := handshake_problem(failure.message))]
            facts = {
                "reasons": sorted({failure.reason for failure in failures}),
                **({"cause": causes[0]} if causes else {}),
            }
            get_logger().warning("workers_unavailable", kind=self._kind, num_workers=len(self.pool.workers), **facts)
