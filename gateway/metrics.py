"""Metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

from specdec.serving.telemetry import LATENCY_BUCKETS_S

NUM_REQUESTS = Counter("specdec_gateway_requests", "HTTP requests answered", ["endpoint", "status"])
NUM_RUNNING = Gauge("specdec_gateway_num_requests_running", "HTTP requests being answered")
NUM_CLIENTS_LEFT = Counter("specdec_gateway_clients_left", "HTTP clients that left before their answer was complete")
NUM_RETRIES = Counter("specdec_gateway_retries", "Calls to coordinators that failed and were repeated or resumed")
FIRST_TOKEN_S = Histogram(
    "specdec_gateway_time_to_first_token_seconds", "From request to first token", buckets=LATENCY_BUCKETS_S
)
