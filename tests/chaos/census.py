"""What is left when all is quiet: nothing that runs, no cache but of sessions that were left, no key without an end."""

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator

from tests.chaos.processes import Part
from tests.chaos.service import KV_CACHE_BYTES, Service

QUIET_TIMEOUT_S = 30.0
LOOK_S = 0.2
SESSION_KEYS = "specdec:{*"
GONE = -2  # what Redis answers for a key that has expired
AGE_S = 2.5  # a coordinator compares what it has shown at ages of 1 and 2 s, which must not keep it alive
GAUGE = re.compile(r"^(\w+) ([\d.e+-]+)$", re.MULTILINE)
# gauges that are 0 when nothing runs
BUSY = {
    "coordinator": ("specdec_num_sessions_running",),
    "target": ("specdec_target_num_sessions_waiting", "specdec_target_num_sessions_running"),
    "draft": ("specdec_draft_num_sessions_waiting", "specdec_draft_num_sessions_running"),
}
KV_USAGE = {"target": "specdec_target_kv_cache_usage", "draft": "specdec_draft_kv_cache_usage"}
TOKEN_BYTES = 2 * 3 * 2 * 12 * 4  # keys and values of 3 layers of 2 heads of 12 float32
BLOCK_TOKENS = 32
MAX_SESSION_TOKENS = 160  # prompt and completion of a session here
BUGS = ("call_failed", "task_failed", "task_ended", "heartbeat_failed", "unhandled")  # events that say so of themselves


async def census(service: Service, ttl_s: float) -> list[str]:
    """Return what is left that should not be, once all is quiet or after half a minute."""
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    while left := await asyncio.to_thread(_left, service):
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(LOOK_S)
    return [*left, *await _keys_left(service, ttl_s), *bugs(service)]


def bugs(service: Service) -> Iterator[str]:
    """Give what the parts logged that can only be a bug of ours."""
    for part in service.all_parts:
        for entry in part.entries(all_processes=True):
            if entry.get("event") in BUGS:
                yield f"{part.name} logged {entry}"


def _left(service: Service) -> list[str]:
    return [problem for kind, parts in service.parts.items() for part in parts for problem in _left_in(kind, part)]


def _left_in(kind: str, part: Part) -> Iterator[str]:
    gauges = read_gauges(part)
    for name in BUSY[kind]:
        if gauges[name]:
            yield f"{part.name}: {name} is {gauges[name]:g}"
    if kind in KV_USAGE:
        num_tokens = gauges[KV_USAGE[kind]] * KV_CACHE_BYTES / TOKEN_BYTES
        num_left = len(sessions_left(part))
        most = num_left * (MAX_SESSION_TOKENS + BLOCK_TOKENS)
        if num_tokens > most:
            yield f"{part.name}: its cache holds {num_tokens:.0f} tokens, and {num_left} sessions that were left"


def read_gauges(part: Part) -> dict[str, float]:
    """Return a part's metrics without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{part.metrics_port}/metrics") as answer:
        return {name: float(value) for name, value in GAUGE.findall(answer.read().decode())}


def sessions_left(part: Part) -> set[str]:
    """Return the sessions that a worker's present process keeps a cache of, as their streams ended without a close.

    They are evicted when others need the room.
    """
    left = set[str]()
    for entry in part.entries():
        if entry.get("event") == "session_left":
            (left.discard if entry["closed"] else left.add)(entry["session_id"] + entry.get("drafter", ""))
    return left


async def _keys_left(service: Service, ttl_s: float) -> list[str]:
    """Return a key of a session that does not expire, or that is kept for longer although nobody follows it."""
    with service.store.master.client() as client:
        before = {key: client.pttl(key) for key in client.scan_iter(SESSION_KEYS)}
        await asyncio.sleep(AGE_S)
        for key, then_ms in before.items():
            now_ms = client.pttl(key)
            if now_ms != GONE and not 0 < now_ms <= min(1000 * ttl_s, then_ms - 500 * AGE_S):
                return [f"the key {key.decode()} was to expire in {then_ms} ms, and after {AGE_S:g} s in {now_ms} ms"]
    return []
