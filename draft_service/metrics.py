"""The draft worker's Prometheus metrics where it runs a model: `specdec_draft_...`."""

from specdec.worker_metrics import WorkerMetrics

METRICS = WorkerMetrics("draft", "drafted_tokens")
