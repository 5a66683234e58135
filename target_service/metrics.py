"""The target worker's Prometheus metrics: `specdec_target_...`.

scoring ahead  rate(specdec_target_ahead_hits_total) / rate(specdec_target_ahead_rounds_total)
"""

from prometheus_client import Counter

from specdec.serving.worker_metrics import WorkerMetrics

METRICS = WorkerMetrics("target", "scored_tokens")
_AHEAD_ROUNDS = Counter("specdec_target_ahead_rounds", "Plain rounds that were begun before they were asked for")
_AHEAD_HITS = Counter("specdec_target_ahead_hits", "Of these, rounds that were then asked for")


def count_ahead(hit: bool) -> None:
    """Count one round that was begun ahead, and whether it was of use."""
    _AHEAD_ROUNDS.inc()
    _AHEAD_HITS.inc(hit)
