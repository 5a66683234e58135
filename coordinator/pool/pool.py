"""All workers at one address, and which of them a session goes to."""

import hashlib
from collections.abc import Callable, Set
from typing import Generic

from coordinator.pool.worker import DescriptionT, Worker

Fits = Callable[[DescriptionT], bool]


class WorkerPool(Generic[DescriptionT]):
    """The workers by address; `watching.py` keeps them up to date."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker[DescriptionT]] = {}
        self.was_resolved = False
        self.on_change: list[Callable[[], None]] = []  # called when a worker's state or description has changed

    @property
    def in_service(self) -> list[Worker[DescriptionT]]:
        """The workers that new sessions may go to."""
        return [worker for worker in self.workers.values() if worker.is_in_service]

    @property
    def descriptions(self) -> list[DescriptionT]:
        """What the workers in service say about themselves."""
        return [worker.description for worker in self.in_service if worker.description is not None]

    @property
    def is_available(self) -> bool:
        """Whether a session that opens a stream now has a fair chance."""
        return any(worker.is_in_service or worker.is_due for worker in self.workers.values())

    @property
    def was_asked(self) -> bool:
        """Whether all workers that the name leads to have been probed."""
        return self.was_resolved and all(worker.was_asked for worker in self.workers.values())

    def pick(
        self, key: str, avoided: Set[str] = frozenset(), fits: Fits[DescriptionT] = lambda description: True
    ) -> Worker[DescriptionT] | None:
        """Return the worker for a session: the same while the same workers are in service, as a hash ring does.

        Where it can be helped, one whose description fits, and none of the `avoided` addresses. A worker on trial is
        given the session if it is due, so that it can prove itself, or if no other suits. None: there is no worker.
        """

        def is_fit(worker: Worker[DescriptionT]) -> bool:
            return worker.description is None or fits(worker.description)

        def suits(worker: Worker[DescriptionT]) -> bool:
            return worker.address not in avoided and is_fit(worker)

        in_service, on_trial = self.in_service, [worker for worker in self.workers.values() if worker.is_on_trial]
        groups = [list(filter(suits, (worker for worker in on_trial if worker.is_due)))]  # the first that has any
        groups += [list(filter(judge, group)) for group in (in_service, on_trial) for judge in (suits, is_fit)]
        candidates = next(filter(None, [*groups, in_service, on_trial]), [])
        chosen = max(candidates, key=lambda worker: _rank(key, worker.address), default=None)
        if chosen:
            chosen.try_now()
        return chosen

    def has_other(self, avoided: Set[str]) -> bool:
        """Whether a worker is in service that is not avoided."""
        return any(worker.address not in avoided for worker in self.in_service)

    def has_other_answering(self, address: str) -> bool:
        """Whether another worker answers, if only on trial: better than one that does not."""
        answering = (worker for worker in self.workers.values() if worker.is_in_service or worker.is_on_trial)
        return any(worker.address != address for worker in answering)

    def changed(self) -> None:
        """Tell those who want to know of changes."""
        for tell in self.on_change:
            tell()


def _rank(key: str, address: str) -> bytes:
    return hashlib.blake2b(f"{key} {address}".encode(), digest_size=8).digest()
