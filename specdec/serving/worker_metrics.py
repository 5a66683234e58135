"""Prometheus metrics that both workers have, each under its own name: specdec_target_..., specdec_draft_...

queueing     specdec_target_num_sessions_waiting > 0 for long: more workers, or more memory for the KV cache
batching     rate(specdec_target_batch_sessions_sum) / rate(specdec_target_batch_sessions_count)
"""

from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

from specdec.engine import EngineLoop, TaskTimes
from specdec.serving.telemetry import LATENCY_BUCKETS_S

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """One worker's metrics; made once a process."""

    def __init__(self, worker: Literal["target", "draft"], tokens: str) -> None:
        prefix = f"specdec_{worker}"
        self._waiting = Gauge(f"{prefix}_num_sessions_waiting", "Sessions waiting for a forward")
        self._running = Gauge(f"{prefix}_num_sessions_running", "Sessions in the forward")
        self._resident = Gauge(f"{prefix}_num_sessions_resident", "Sessions with a place in the KV cache")
        self._placeless = Gauge(f"{prefix}_num_sessions_without_place", "Waiting sessions without such a place")
        self._prompt_tokens = Gauge(f"{prefix}_num_prompt_tokens_waiting", "Prompt tokens still to be read")
        self._prompt_s = Gauge(f"{prefix}_prompt_wait_seconds", "What reading them takes, by what reading took so far")
        self._kv_usage = Gauge(f"{prefix}_kv_cache_usage", "Fraction of the KV cache in use, 0 to 1")
        self._queue_s = Histogram(f"{prefix}_queue_seconds", "Wait for the first forward", buckets=LATENCY_BUCKETS_S)
        self._forward_s = Histogram(f"{prefix}_forward_seconds", "Forwards of a round", buckets=LATENCY_BUCKETS_S)
        self._batch = Histogram(f"{prefix}_batch_sessions", "Sessions processed together", buckets=BATCH_BUCKETS)
        self._tokens = Counter(f"{prefix}_{tokens}", f"{tokens.capitalize().replace('_', ' ')}")

    def watch(self, engine: EngineLoop[Any]) -> None:
        """Report this engine's load whenever metrics are read."""
        self._waiting.set_function(lambda: engine.load.num_waiting)
        self._running.set_function(lambda: engine.load.num_running)
        self._resident.set_function(lambda: engine.load.num_resident)
        self._placeless.set_function(lambda: engine.load.num_without_place)
        self._prompt_tokens.set_function(lambda: engine.load.num_prompt_tokens)
        self._prompt_s.set_function(lambda: engine.load.prompt_s)
        self._kv_usage.set_function(lambda: engine.load.kv_usage)

    def observe_batch(self, num_sessions: int) -> None:
        """Count one batch."""
        self._batch.observe(num_sessions)

    def observe_round(self, num_tokens: int, timings: TaskTimes) -> None:
        """Count one session's round."""
        self._tokens.inc(num_tokens)
        self._queue_s.observe(timings.queue_s)
        self._forward_s.observe(timings.forward_s)
