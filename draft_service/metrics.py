"""The draft worker's Prometheus metrics where it runs a model: `specdec_draft_...`.

draft-ahead  rate(specdec_draft_ahead_hits_total) / rate(specdec_draft_queue_seconds_count): requests answered by it
             rate(specdec_draft_ahead_hidden_seconds_total): seconds of drafting that nobody waited for
"""

from prometheus_client import Counter

from specdec.serving.worker_metrics import WorkerMetrics

METRICS = WorkerMetrics("draft", "drafted_tokens")
_AHEAD_ROUNDS = Counter("specdec_draft_ahead_rounds", "Rounds drafted, or begun, before they were asked for")
_AHEAD_HITS = Counter("specdec_draft_ahead_hits", "Of these, rounds that were then asked for")
_AHEAD_HIDDEN_S = Counter("specdec_draft_ahead_hidden_seconds", "Seconds that drafting these took")


def count_ahead(num_rounds: int, hit_s: float | None) -> None:
    """Count the rounds that were drafted ahead of a request; drafting the one that was asked for took `hit_s`."""
    _AHEAD_ROUNDS.inc(num_rounds)
    if hit_s is not None:
        _AHEAD_HITS.inc()
        _AHEAD_HIDDEN_S.inc(hit_s)
