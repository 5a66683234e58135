"""A reading as lines of text."""

from collections.abc import Iterator, Sequence

from specdec.watching.readings import DrafterReading, Reading, WorkerReading

NOTHING = "-"
STATES = {"in_service": "in service", "on_trial": "on trial", "out": "out", "leaving": "leaving", "answers": "answers"}
COLOURS = {"in_service": "green", "answers": "green", "on_trial": "yellow", "leaving": "yellow", "out": "red"}
DRAINING = "loading or shutting down"  # as a worker that does either refuses


def page(reading: Reading) -> list[str]:
    """Return the page, without the line that says when and of what."""
    return [*_service(reading), "", *_drafters(reading.drafters), "", *_workers(reading.workers)]


def _service(reading: Reading) -> Iterator[str]:
    yield (
        f"sessions   {reading.num_running} running, {reading.num_waiting} waiting for a forward, "
        f"{reading.num_paused} parked by slow readers; {reading.num_continued} continued, "
        f"{reading.num_taken_over} taken over by others"
    )
    yield (
        f"speed      {reading.tokens_per_s:.1f} tokens/s, {reading.rounds_per_s:.1f} rounds/s of "
        f"{_number(reading.tokens_per_round, 2)} tokens, {_percent(reading.acceptance_rate)} of draft tokens accepted, "
        f"first token after {_number(reading.first_token_ms, 0)} ms"
    )
    refused = ", ".join(f"{count} {limit}" for limit, count in sorted(reading.refusals.items())) or "none"
    yield f"admission  predicted wait {reading.predicted_wait_s:.2f} s; refused: {refused}"
    yield (
        f"store      {_number(reading.store_ms, 2)} ms a call; {reading.num_store_retries} attempts repeated, "
        f"{reading.num_store_breaks} breaks, {reading.num_healed} sessions healed, {reading.num_lost} lost"
    )
    yield f"network    {reading.num_lost_pings} pings to workers lost"


def _drafters(drafters: Sequence[DrafterReading]) -> Iterator[str]:
    yield from _table(
        ("drafter", "rounds/s", "accepted", "tokens/round"),
        [
            (one.drafter, f"{one.rounds_per_s:.1f}", _percent(one.acceptance_rate), _number(one.tokens_per_round, 2))
            for one in drafters
        ],
    )


def _workers(workers: Sequence[WorkerReading]) -> Iterator[str]:
    heads = ("worker", "address", "state", "streams", "running", "waiting", "batch", "queue ms", "forward ms", "KV")
    yield from _table(heads, [_worker(worker) for worker in workers])
    for worker in workers:
        if worker.reason and worker.state != "in_service":
            yield f"{worker.address}: {worker.reason}"


def _worker(worker: WorkerReading) -> tuple[str, ...]:
    is_draining = worker.state == "out" and DRAINING in worker.reason
    return (
        worker.kind,
        worker.address or NOTHING,
        "loading or draining" if is_draining else STATES.get(worker.state, worker.state),
        str(worker.num_streams),
        _number(worker.num_running, 0),
        _number(worker.num_waiting, 0),
        _number(worker.batch_sessions, 1),
        _number(worker.queue_ms, 1),
        _number(worker.forward_ms, 1),
        _percent(worker.kv_cache_usage),
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"
