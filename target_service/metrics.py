"""The target worker's Prometheus metrics: `specdec_target_...`."""

from specdec.serving.worker_metrics import WorkerMetrics

METRICS = WorkerMetrics("target", "scored_tokens")
