"""The Grafana dashboard of specdec, as rows of panels."""

from deploy.observability.panels import DATASOURCE, Json, Panel, Query, Row, laid_out

OURS = 'namespace=~"$namespace"'
QUANTILES = (0.5, 0.99)


def rate(counter: str, by: str = "", matching: str = "") -> str:
    """Return the expression of a counter's rate a second, summed over pods."""
    selector = f"{OURS}, {matching}" if matching else OURS
    return f"sum{_by(by)} (rate({counter}{{{selector}}}[$__rate_interval]))"


def gauge(name: str, by: str = "pod", how: str = "sum") -> str:
    """Return the expression of a gauge."""
    return f"{how}{_by(by)} ({name}{{{OURS}}})"


def share(part: str, whole: str, by: str = "") -> str:
    """Return the expression of one counter's rate over another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(histogram: str, by: str = "", matching: str = "") -> tuple[Query, ...]:
    """Return the queries of a histogram's median and 99th percentile; its slow values lead to their traces."""
    buckets = rate(f"{histogram}_bucket", f"{by}, le" if by else "le", matching)
    suffix = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(f"histogram_quantile({each}, {buckets})", f"p{each * 100:g}{suffix}", has_exemplars=each == QUANTILES[-1])
        for each in QUANTILES
    )


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by status",
            "Requests that ended, by gRPC status. DATA_LOSS is text that was lost.",
            "reqps",
            (Query(rate("specdec_requests_total", "method, code"), "{{method}} {{code}}"),),
            is_stacked=True,
        ),
        Panel(
            "Tokens",
            "Tokens committed a second, by the drafter of their round. none: plain rounds.",
            "cps",
            (Query(rate("specdec_drafter_tokens_total", "drafter"), "{{drafter}}"),),
            is_stacked=True,
        ),
        Panel(
            "Sessions",
            "Sessions that are generated, by coordinator, and those of them that wait for a slow client.",
            "short",
            (
                Query(gauge("specdec_num_sessions_running"), "running {{pod}}"),
                Query(gauge("specdec_num_sessions_paused"), "paused {{pod}}"),
            ),
        ),
    ),
)
WAITING = Row(
    "Waiting",
    (
        Panel(
            "Time to the first token",
            "From request to first token, at the coordinators.",
            "s",
            quantiles("specdec_time_to_first_token_seconds"),
        ),
        Panel(
            "Time per token",
            "Time of a round over its committed tokens.",
            "s",
            quantiles("specdec_time_per_output_token_seconds"),
        ),
        Panel(
            "Predicted wait",
            "What admission predicts: how long a new session waits for its first token.",
            "s",
            (Query(gauge("specdec_admission_predicted_wait_seconds", how="max"), "{{pod}}"),),
        ),
        Panel(
            "Refusals",
            "Requests refused for want of room, by what was at its limit.",
            "reqps",
            (Query(rate("specdec_refusals_total", "limit"), "{{limit}}"),),
            is_stacked=True,
        ),
    ),
)
SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Acceptance by drafter",
            "Accepted tokens over drafted tokens.",
            "percentunit",
            (
                Query(
                    share("specdec_drafter_accepted_tokens_total", "specdec_drafter_draft_tokens_total", "drafter"),
                    "{{drafter}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Acceptance by depth",
            "Share of the rounds that drafted in which the token at this position (from 0) was accepted.",
            "percentunit",
            (
                Query(
                    f"{rate('specdec_spec_decode_num_accepted_tokens_per_pos_total', 'position')}"
                    f" / on () group_left {rate('specdec_spec_decode_num_drafts_total')}",
                    "{{position}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Draft length K",
            "Mean number of tokens drafted, in rounds that drafted.",
            "short",
            (
                Query(
                    share("specdec_spec_decode_num_draft_tokens_total", "specdec_spec_decode_num_drafts_total"),
                    "all",
                ),
                Query(
                    share("specdec_drafter_draft_tokens_total", "specdec_drafter_rounds_total", "drafter"),
                    "{{drafter}}",
                ),
            ),
        ),
        Panel(
            "Tokens per round",
            "Mean number of tokens committed in a round: what speculation gains, before its cost.",
            "short",
            (
                Query(share("specdec_generation_tokens_total", "specdec_num_rounds_total"), "all"),
                Query(share("specdec_drafter_tokens_total", "specdec_drafter_rounds_total", "drafter"), "{{drafter}}"),
            ),
        ),
    ),
)
ROUNDS = Row(
    "Rounds",
    (
        Panel(
            "Round phases",
            "draft, score and commit as the coordinator sees them. Rounds that read a prompt are among them.",
            "s",
            quantiles("specdec_round_phase_seconds", "phase", 'phase=~"draft|score|commit"'),
        ),
        Panel(
            "Workers' own phases",
            "Wait for the first forward, and the forwards, as workers report them.",
            "s",
            quantiles("specdec_round_phase_seconds", "phase", 'phase=~".*_(queue|forward)"'),
        ),
        Panel(
            "Mean time of a phase",
            "score less score_queue and score_forward is the way to the target worker and back, where rounds draft; "
            "plain rounds may be scored before they are asked for.",
            "s",
            (
                Query(
                    share("specdec_round_phase_seconds_sum", "specdec_round_phase_seconds_count", "phase"), "{{phase}}"
                ),
            ),
        ),
        Panel(
            "Ahead of the round",
            "Rounds that workers drafted, or scored without a draft, before they were asked for; of these, those used.",
            "ops",
            (
                Query(rate("specdec_draft_ahead_rounds_total"), "drafted ahead"),
                Query(rate("specdec_draft_ahead_hits_total"), "drafts used"),
                Query(rate("specdec_target_ahead_rounds_total"), "scored ahead"),
                Query(rate("specdec_target_ahead_hits_total"), "scores used"),
            ),
        ),
    ),
)
WORKERS = Row(
    "Workers",
    (
        Panel(
            "Waiting for a forward",
            "Sessions that wait for a forward, by worker. More than a few for long: too few workers.",
            "short",
            (
                Query(gauge("specdec_target_num_sessions_waiting"), "target {{pod}}"),
                Query(gauge("specdec_draft_num_sessions_waiting"), "draft {{pod}}"),
            ),
        ),
        Panel(
            "KV cache in use",
            "Fraction of each worker's KV cache that sessions hold. When it is full they evict each other.",
            "percentunit",
            (
                Query(gauge("specdec_target_kv_cache_usage"), "target {{pod}}"),
                Query(gauge("specdec_draft_kv_cache_usage"), "draft {{pod}}"),
            ),
            maximum=1,
        ),
        Panel(
            "Without a place in the cache",
            "Waiting sessions that no worker has room for yet.",
            "short",
            (
                Query(gauge("specdec_target_num_sessions_without_place"), "target {{pod}}"),
                Query(gauge("specdec_draft_num_sessions_without_place"), "draft {{pod}}"),
            ),
        ),
        Panel(
            "Sessions in a forward",
            "Mean number of sessions that are processed together.",
            "short",
            (
                Query(
                    share("specdec_target_batch_sessions_sum", "specdec_target_batch_sessions_count", "pod"), "{{pod}}"
                ),
                Query(
                    share("specdec_draft_batch_sessions_sum", "specdec_draft_batch_sessions_count", "pod"), "{{pod}}"
                ),
            ),
        ),
    ),
)
FAULTS = Row(
    "Faults",
    (
        Panel(
            "Worker breakers",
            "2: in service, 1: on trial, 0: out; the best that any coordinator says of a worker.",
            "short",
            (Query(gauge("specdec_worker_state", "kind, worker", "max"), "{{kind}} {{worker}}"),),
            maximum=2,
        ),
        Panel(
            "Failed rounds and lost streams",
            "Rounds that opened a breaker, those of them that were late, streams that broke, rounds without drafts.",
            "ops",
            (
                Query(rate("specdec_worker_failed_rounds_total", "kind"), "failed rounds, {{kind}}"),
                Query(rate("specdec_worker_timeouts_total", "kind"), "timeouts, {{kind}}"),
                Query(rate("specdec_worker_lost_streams_total", "kind, cause"), "lost streams, {{kind}} {{cause}}"),
                Query(rate("specdec_draft_failures_total", "reason"), "no draft, {{reason}}"),
            ),
        ),
        Panel(
            "Sessions that move",
            "Sessions claimed again after a pause or from another coordinator, and those that another one took.",
            "ops",
            (
                Query(rate("specdec_sessions_continued_total"), "continued"),
                Query(rate("specdec_sessions_taken_over_total"), "taken over"),
                Query(rate("specdec_store_went_back_total", "session"), "store went back: {{session}}"),
            ),
        ),
        Panel(
            "Slow readers",
            "Times that a session paused until a client read on.",
            "ops",
            (Query(rate("specdec_slow_reader_pauses_total"), "pauses"),),
        ),
    ),
)
STORE = Row(
    "Store",
    (
        Panel(
            "Store calls",
            "Calls to Redis by kind.",
            "ops",
            (Query(rate("specdec_store_seconds_count", "call"), "{{call}}"),),
        ),
        Panel(
            "Time of store calls",
            "Repeated attempts are included.",
            "s",
            quantiles("specdec_store_seconds", "call"),
        ),
        Panel(
            "Store retries",
            "Attempts that failed and were repeated; connections that broke, or a new master.",
            "ops",
            (
                Query(rate("specdec_store_retries_total"), "retries"),
                Query(rate("specdec_store_breaks_total"), "breaks"),
            ),
        ),
    ),
)
GATEWAY = Row(
    "Gateway",
    (
        Panel(
            "HTTP requests by status",
            "Answered requests. 499: the client left before the end of its answer.",
            "reqps",
            (
                Query(
                    rate("specdec_gateway_requests_total", "endpoint, status", 'endpoint!~"/healthz|/readyz"'),
                    "{{endpoint}} {{status}}",
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            "HTTP requests running",
            "Requests being answered, by gateway.",
            "short",
            (Query(gauge("specdec_gateway_num_requests_running"), "{{pod}}"),),
        ),
        Panel(
            "Time to the first token over HTTP",
            "From request to first token, as HTTP clients wait for it.",
            "s",
            quantiles("specdec_gateway_time_to_first_token_seconds"),
        ),
        Panel(
            "Retries and clients that left",
            "Calls to coordinators that were repeated or resumed; clients that left before their answer was complete.",
            "ops",
            (
                Query(rate("specdec_gateway_retries_total"), "retries"),
                Query(rate("specdec_gateway_clients_left_total"), "clients left"),
            ),
        ),
    ),
)
ROWS = (TRAFFIC, WAITING, SPECULATION, ROUNDS, WORKERS, FAULTS, STORE, GATEWAY)


def dashboard() -> Json:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "specdec",
        "title": "specdec",
        "description": "Speculative decoding: traffic, acceptance, rounds, workers, store and gateway.",
        "tags": ["specdec"],
        "schemaVersion": 38,  # Grafana 10's; later versions migrate it when they load it
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource_variable(), _namespace_variable()]},
        "panels": list(laid_out(ROWS)),
    }


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _namespace_variable() -> Json:
    """Return the choice of namespaces; all of them also shows series that have no such label."""
    query = "label_values(specdec_num_sessions_running, namespace)"
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "namespaces"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }
