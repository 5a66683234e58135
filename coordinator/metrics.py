"""The coordinator's Prometheus metrics.

acceptance rate     rate(specdec_spec_decode_num_accepted_tokens_total) / rate(..._num_draft_tokens_total)
way to the target   rate(specdec_round_phase_seconds_sum{phase="score"}) - the same of "score_queue" and "score_forward"
                    (of rounds that draft: a plain one may have been scored before it was asked for)
tokens per round    1 + rate(..._num_accepted_tokens_total) / rate(..._num_drafts_total)

docs/operate.md has all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from coordinator.generation import Round
from specdec.serving.telemetry import LATENCY_BUCKETS_S
from specdec.serving.tracing import spans
from specdec.types import Statistics
from specdec.v1 import types_pb2

MAX_PHASE_S = 3600.0  # larger values that a worker reports are ignored

NUM_DRAFTS = Counter("specdec_spec_decode_num_drafts", "Rounds that drafted")
NUM_DRAFT_TOKENS = Counter("specdec_spec_decode_num_draft_tokens", "Tokens drafted")
NUM_ACCEPTED_TOKENS = Counter("specdec_spec_decode_num_accepted_tokens", "Draft tokens accepted")
NUM_ACCEPTED_PER_POS = Counter(
    "specdec_spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the round", ["position"]
)
NUM_ROUNDS = Counter("specdec_num_rounds", "Rounds committed, drafted or plain")
NUM_TOKENS = Counter("specdec_generation_tokens", "Tokens committed")
NUM_REQUESTS = Counter("specdec_requests", "Requests ended, by status code", ["method", "code"])
NUM_DRAFTER_ROUNDS = Counter("specdec_drafter_rounds", "Rounds committed, by drafter (none: plain)", ["drafter"])
NUM_DRAFTER_DRAFT_TOKENS = Counter("specdec_drafter_draft_tokens", "Tokens drafted, by drafter", ["drafter"])
NUM_DRAFTER_ACCEPTED_TOKENS = Counter("specdec_drafter_accepted_tokens", "Draft tokens accepted", ["drafter"])
NUM_DRAFTER_TOKENS = Counter("specdec_drafter_tokens", "Tokens committed in rounds of the drafter", ["drafter"])
NUM_REFUSALS = Counter("specdec_refusals", "Requests refused for want of room, by what was at its limit", ["limit"])
PREDICTED_WAIT_S = Gauge(
    "specdec_admission_predicted_wait_seconds", "What admission predicts: a new session's wait for its first token"
)
NUM_DRAFT_FAILURES = Counter("specdec_draft_failures", "Rounds that went on without their draft worker", ["reason"])
WORKER_STATE = Gauge(
    "specdec_worker_state", "Whether a worker is asked: 2 in service, 1 on trial, 0 out", ["kind", "worker"]
)
NUM_TIMED_OUT = Counter("specdec_worker_timeouts", "Rounds that a worker did not answer in time", ["kind"])
NUM_FAILED_ROUNDS = Counter("specdec_worker_failed_rounds", "Rounds that opened their worker's breaker", ["kind"])
NUM_LOST_STREAMS = Counter(
    "specdec_worker_lost_streams",
    "Streams that broke: a ping was not answered, or the connection ended",
    ["kind", "cause"],
)
NUM_PAUSED = Gauge("specdec_num_sessions_paused", "Sessions that wait until a client reads on")
NUM_PAUSES = Counter("specdec_slow_reader_pauses", "Times that a session waited until a client read on")
NUM_CONTINUED = Counter("specdec_sessions_continued", "Sessions claimed that had run before, here or elsewhere")
NUM_TAKEN_OVER = Counter("specdec_sessions_taken_over", "Sessions that another coordinator took from this one")
NUM_WENT_BACK = Counter(
    "specdec_store_went_back", "Sessions of which the store had lost what was shown: healed, or lost", ["session"]
)
STORE_S = Histogram(
    "specdec_store_seconds", "Calls to the store, repeated attempts included", ["call"], buckets=LATENCY_BUCKETS_S
)
NUM_STORE_RETRIES = Counter("specdec_store_retries", "Attempts of calls to the store that failed and were repeated")
NUM_STORE_BREAKS = Counter("specdec_store_breaks", "Times that a connection to the store broke, or its master changed")
NUM_RUNNING = Gauge("specdec_num_sessions_running", "Sessions being generated")
TIME_TO_FIRST_TOKEN_S = Histogram(
    "specdec_time_to_first_token_seconds", "From request to first token", buckets=LATENCY_BUCKETS_S
)
TIME_PER_OUTPUT_TOKEN_S = Histogram(
    "specdec_time_per_output_token_seconds", "Round time over tokens committed", buckets=LATENCY_BUCKETS_S
)
PHASE_S = Histogram("specdec_round_phase_seconds", "Phases of a round", ["phase"], buckets=LATENCY_BUCKETS_S)


def observe_round(before: Statistics, played: Round, commit_s: float) -> None:
    """Count a committed round, or some that were committed together; `before` are the session's statistics up to it."""
    for each in played.joined or (played,):
        _observe_one(before, each)
        before = each.statistics
    _phase("commit").observe(commit_s, spans.current().exemplar())


def _observe_one(before: Statistics, played: Round) -> None:
    after, exemplar = played.statistics, spans.current().exemplar()
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    draft_s, score_s = after.draft_s - before.draft_s, after.score_s - before.score_s
    if num_drafted:
        NUM_DRAFTS.inc()
        NUM_DRAFT_TOKENS.inc(num_drafted)
        NUM_ACCEPTED_TOKENS.inc(num_accepted)
        _phase("draft").observe(draft_s, exemplar)
    num_rounds, num_draft_tokens, num_accepted_tokens, num_tokens = _of_drafter(played.drafter)
    num_rounds.inc()
    num_draft_tokens.inc(num_drafted)
    num_accepted_tokens.inc(num_accepted)
    num_tokens.inc(len(played.emitted))
    for position in range(num_accepted):
        _accepted_at(position).inc()
    NUM_ROUNDS.inc()
    NUM_TOKENS.inc(len(played.emitted))
    _phase("score").observe(score_s, exemplar)
    TIME_PER_OUTPUT_TOKEN_S.observe((draft_s + score_s) / len(played.emitted), exemplar)


# a metric's child by its labels is looked up once: that takes longer than to count


@cache
def _phase(name: str) -> Histogram:
    return PHASE_S.labels(name)


@cache
def _of_drafter(drafter: str) -> tuple[Counter, Counter, Counter, Counter]:
    return (
        NUM_DRAFTER_ROUNDS.labels(drafter),
        NUM_DRAFTER_DRAFT_TOKENS.labels(drafter),
        NUM_DRAFTER_ACCEPTED_TOKENS.labels(drafter),
        NUM_DRAFTER_TOKENS.labels(drafter),
    )


@cache
def _accepted_at(position: int) -> Counter:
    return NUM_ACCEPTED_PER_POS.labels(str(position))


@cache
def _store_call(name: str) -> Histogram:
    return STORE_S.labels(name)


@contextmanager
def paused() -> Iterator[None]:
    """Count a session as paused while the context lasts."""
    NUM_PAUSES.inc()
    NUM_PAUSED.inc()
    try:
        yield
    finally:
        NUM_PAUSED.dec()


def observe_store_call(name: str, elapsed_s: float) -> None:
    """Observe a call to the store, however it ended."""
    _store_call(name).observe(elapsed_s, spans.current().exemplar())


def forget_worker(kind: str, address: str) -> None:
    """Drop the state of a worker that is gone."""
    with suppress(KeyError):
        WORKER_STATE.remove(kind, address)


def observe_worker(phase: str, timing: types_pb2.Timing) -> None:
    """Observe a worker's own phases of a round; the rest of a round is transport."""
    exemplar = spans.current().exemplar()
    for part, seconds in (("queue", timing.queue_s), ("forward", timing.forward_s)):
        if 0 <= seconds <= MAX_PHASE_S:  # also not NaN
            _phase(f"{phase}_{part}").observe(seconds, exemplar)
