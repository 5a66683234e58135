"""What a service says about its processes: state and metrics, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from specdec.v1 import status_pb2

Labels = tuple[tuple[str, str], ...]  # of a metric's value, sorted by name
Samples = Mapping[tuple[str, Labels], float]


class WorkerState(Enum):
    """Whether a coordinator asks a worker."""

    IN_SERVICE = 1
    ON_TRIAL = 2  # it failed rounds and answers: one session at a time, until a round succeeds
    OUT = 3  # its breaker is open: it failed a round, does not answer, loads or drains
    LEAVING = 4  # its name leads to it no more


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process: the one that answered, or a worker of it."""

    kind: str  # coordinator, target or draft
    address: str = ""  # empty: the one that answered
    state: WorkerState | None = None  # of a worker
    reason: str = ""  # why it is not in service
    num_streams: int = 0  # to it, of the coordinator's sessions
    samples: Samples = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """Return a metric's value with these labels, summed over the other labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for (own, pairs), value in self.samples.items() if own == name and wanted <= set(pairs))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's values by one of its labels, summed over the others."""
        found: dict[str, float] = {}
        for (own, pairs), value in self.samples.items():
            if own == name:
                key = dict(pairs).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found


def statuses_from_proto(message: status_pb2.GetStatusResponse) -> tuple[ProcessStatus, ...]:
    """Convert; a state that this client does not know is none."""
    return tuple(map(_status_from_proto, message.processes))


def _status_from_proto(message: status_pb2.ProcessStatus) -> ProcessStatus:
    known = {state.value: state for state in WorkerState}
    samples = {(each.name, tuple(sorted(each.labels.items()))): each.value for each in message.samples}
    state = known.get(message.state)
    return ProcessStatus(message.kind, message.address, state, message.reason, message.num_streams, samples)
