"""The draft worker's Prometheus metrics where it runs a model: `specdec_draft_...`.

draft-ahead  rate(specdec_draft_ahead_hits_total) / rate(specdec_draft_ahead_rounds_total)
"""

from prometheus_client import Counter

from specdec.serving.worker_metrics import WorkerMetrics

METRICS = WorkerMetrics("draft", "drafted_tokens")
_AHEAD_ROUNDS = Counter("specdec_draft_ahead_rounds", "Rounds drafted, or begun, before they were asked for")
_AHEAD_HITS = Counter("specdec_draft_ahead_hits", "Of these, rounds that were then asked for")


def count_ahead(hit: bool) -> None:
    """Count one round that was drafted ahead, and whether it was of use."""
    _AHEAD_ROUNDS.inc()
    _AHEAD_HITS.inc(hit)
