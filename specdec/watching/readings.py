"""Two looks at a service's metrics, as what an operator wants to know: states of this moment, and rates in between."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.process_status import ProcessStatus

COORDINATOR = "coordinator"
DRAFTER_METRICS = "specdec_drafter_"


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker; what it did not tell is None."""

    kind: str
    address: str
    state: str
    reason: str
    num_streams: int
    num_running: int | None = None
    num_waiting: int | None = None
    num_resident: int | None = None
    num_without_place: int | None = None
    num_prompt_tokens_waiting: int | None = None
    kv_cache_usage: float | None = None
    batch_sessions: float | None = None  # mean of the forwards in between
    queue_ms: float | None = None  # mean of the rounds in between
    forward_ms: float | None = None


@dataclass(frozen=True, slots=True)
class DrafterReading:
    """One drafter, over the time in between."""

    drafter: str
    rounds_per_s: float
    acceptance_rate: float | None
    tokens_per_round: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """A service; `..._per_s` and means are of the time in between, counts are since its start."""

    elapsed_s: float
    num_running: int
    num_waiting: int
    num_paused: int
    tokens_per_s: float
    rounds_per_s: float
    tokens_per_round: float | None
    acceptance_rate: float | None
    first_token_ms: float | None
    predicted_wait_s: float
    store_ms: float | None
    num_store_retries: int
    num_store_breaks: int
    num_healed: int
    num_lost: int
    num_taken_over: int
    num_continued: int
    num_lost_pings: int
    refusals: dict[str, int]
    drafters: tuple[DrafterReading, ...]
    workers: tuple[WorkerReading, ...]


@dataclass(frozen=True, slots=True)
class _Between:
    """One process at two moments; `before` has no samples where it was not there, or began again."""

    before: ProcessStatus
    after: ProcessStatus
    elapsed_s: float

    def more(self, name: str, **labels: str) -> float:
        """Return by how much a counter has grown."""
        after, before = self.after.value(name, **labels), self.before.value(name, **labels)
        return after if after < before else after - before  # it began again

    def per_s(self, name: str, **labels: str) -> float:
        """Return how fast a counter grows."""
        return self.more(name, **labels) / self.elapsed_s

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of a histogram's new observations."""
        return _over(self.more(f"{name}_sum", **labels), self.more(f"{name}_count", **labels))

    def mean_ms(self, name: str, **labels: str) -> float | None:
        """Return the mean of a histogram of seconds, in milliseconds."""
        mean = self.mean(name, **labels)
        return None if mean is None else 1000 * mean


def reading(before: Sequence[ProcessStatus], after: Sequence[ProcessStatus], elapsed_s: float) -> Reading:
    """Return what two looks at a service, so many seconds apart, say about it."""
    own = _Between(_same(after[0], before), after[0], elapsed_s)
    processes = [each for each in after if each.kind != COORDINATOR]
    workers = tuple(_worker(_Between(_same(each, before), each, elapsed_s)) for each in processes)
    accepted = own.more("specdec_spec_decode_num_accepted_tokens_total")
    return Reading(
        elapsed_s=elapsed_s,
        num_running=int(own.after.value("specdec_num_sessions_running")),
        num_waiting=sum(worker.num_waiting or 0 for worker in workers if worker.kind == "target"),
        num_paused=int(own.after.value("specdec_num_sessions_paused")),
        tokens_per_s=own.per_s("specdec_generation_tokens_total"),
        rounds_per_s=own.per_s("specdec_num_rounds_total"),
        tokens_per_round=_over(own.more("specdec_generation_tokens_total"), own.more("specdec_num_rounds_total")),
        acceptance_rate=_over(accepted, own.more("specdec_spec_decode_num_draft_tokens_total")),
        first_token_ms=own.mean_ms("specdec_time_to_first_token_seconds"),
        predicted_wait_s=own.after.value("specdec_admission_predicted_wait_seconds"),
        store_ms=own.mean_ms("specdec_store_seconds"),
        num_store_retries=int(own.after.value("specdec_store_retries_total")),
        num_store_breaks=int(own.after.value("specdec_store_breaks_total")),
        num_healed=int(own.after.value("specdec_store_went_back_total", session="healed")),
        num_lost=int(own.after.value("specdec_store_went_back_total", session="lost")),
        num_taken_over=int(own.after.value("specdec_sessions_taken_over_total")),
        num_continued=int(own.after.value("specdec_sessions_continued_total")),
        num_lost_pings=int(own.after.value("specdec_worker_lost_streams_total", cause="ping")),
        refusals={limit: int(count) for limit, count in own.after.by_label("specdec_refusals_total", "limit").items()},
        drafters=tuple(_drafters(own)),
        workers=workers,
    )


def _same(process: ProcessStatus, others: Sequence[ProcessStatus]) -> ProcessStatus:
    """Return the process at the other moment, without samples if it was not there."""
    same = [each for each in others if (each.kind, each.address) == (process.kind, process.address)]
    return same[0] if same else ProcessStatus(process.kind, process.address)


def _drafters(own: _Between) -> list[DrafterReading]:
    names = own.after.by_label(f"{DRAFTER_METRICS}rounds_total", "drafter")
    return [_drafter(own, name) for name in sorted(names, key=lambda name: -names[name])]


def _drafter(own: _Between, name: str) -> DrafterReading:
    num_rounds = own.more(f"{DRAFTER_METRICS}rounds_total", drafter=name)
    num_drafted = own.more(f"{DRAFTER_METRICS}draft_tokens_total", drafter=name)
    return DrafterReading(
        drafter=name,
        rounds_per_s=num_rounds / own.elapsed_s,
        acceptance_rate=_over(own.more(f"{DRAFTER_METRICS}accepted_tokens_total", drafter=name), num_drafted),
        tokens_per_round=_over(own.more(f"{DRAFTER_METRICS}tokens_total", drafter=name), num_rounds),
    )


def _worker(one: _Between) -> WorkerReading:
    process, prefix = one.after, f"specdec_{one.after.kind}"
    state = process.state.name.lower() if process.state else "answers"
    known = WorkerReading(process.kind, process.address, state, process.reason, process.num_streams)
    if (f"{prefix}_kv_cache_usage", ()) not in process.samples:
        return known
    counts = {
        name: int(process.value(f"{prefix}_{metric}"))
        for name, metric in (
            ("num_running", "num_sessions_running"),
            ("num_waiting", "num_sessions_waiting"),
            ("num_resident", "num_sessions_resident"),
            ("num_without_place", "num_sessions_without_place"),
            ("num_prompt_tokens_waiting", "num_prompt_tokens_waiting"),
        )
    }
    return WorkerReading(
        process.kind,
        process.address,
        state,
        process.reason,
        process.num_streams,
        **counts,
        kv_cache_usage=process.value(f"{prefix}_kv_cache_usage"),
        batch_sessions=one.mean(f"{prefix}_batch_sessions"),
        queue_ms=one.mean_ms(f"{prefix}_queue_seconds"),
        forward_ms=one.mean_ms(f"{prefix}_forward_seconds"),
    )


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
