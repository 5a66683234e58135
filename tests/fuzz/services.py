"""The services under test: processes of their own, so that a crash is one, and what they take can be read."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.serving.child import Child, LogLine, format_event
from specdec.v1 import draft_pb2, target_pb2
from tests.fuzz.liars import Liar, lying
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.redis_server import running_redis

DRAFTERS = ("model", "ngram", "suffix", "recycle")
NUM_WARM_UPS = 5
HONEST_SEED = 4_242_424_242  # workers do not lie to sessions with this seed
MAX_NEW_TOKENS = 24
START_S = 120.0
SCHEDULED = Path("/proc/self/schedstat")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# what a coordinator logs of a worker that lies, which is no fault of its own
EXPECTED_ERRORS = ("malformed_description", "Exception deserializing message!")


@dataclass(slots=True)
class Services:
    """The three services, and the liars in front of the workers."""

    address: str
    target_address: str
    draft_address: str
    target_liar: Liar
    draft_liar: Liar
    children: Sequence[Child]
    errors: list[str] = field(default_factory=list)  # that services logged
    # Linux' /proc/PID/task/TID/schedstat: on a processor, and in a queue for one; of threads that have ended, too
    _scheduled_ns: dict[Path, int] = field(default_factory=dict)

    def crashed(self) -> list[str]:
        """Return a sentence for each service that ended."""
        return [child.describe_end() for child in self.children if child.ended.done()]

    def rss_bytes(self) -> dict[str, int]:
        """Return the resident memory of each service."""
        return {child.name: _status_kb(child.pid, "VmRSS") << 10 for child in self.children}

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time that each service has taken."""
        return {child.name: _cpu_s(child.pid) for child in self.children}

    def busy_s(self) -> float:
        """Return the time in which the services, and this process with the liars, ran or waited for a processor.

        Where Linux does not count it, that is all of the time.
        """
        if not SCHEDULED.exists():
            return time.monotonic()
        for pid in (os.getpid(), *(child.pid for child in self.children)):
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError):  # a thread may end meanwhile
                    self._scheduled_ns[path] = sum(map(int, path.read_text().split()[:2]))
        return sum(self._scheduled_ns.values()) / 1e9


class Starting:
    """Starts services as processes, which end with the context; collects the errors that they log."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.children: list[Child] = []
        self.errors: list[str] = []

    async def start(self, name: str, module: str, **flags: object) -> str:
        """Start a service; return its address."""
        words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        child = await Child.start(name, module, [*words, "--port=0"], _environment(), self._on_line)
        self._stack.push_async_callback(child.stop, 5.0)
        self.children.append(child)
        async with asyncio.timeout(START_S):
            return f"127.0.0.1:{await child.port}"

    def _on_line(self, name: str, entry: LogLine) -> None:
        if entry.get("level") in ("error", "critical") and entry["event"] not in EXPECTED_ERRORS:
            self.errors.append(f"{name} logged {format_event(entry)} {' '.join(entry.get('frames', ()))}")
        elif "Traceback" in entry.get("text", ""):
            self.errors.append(f"{name} printed a traceback")


@asynccontextmanager
async def running_services(folder: Path, seed: int) -> AsyncIterator[Services]:
    """Run a redis-server, a target, a draft worker with every model-free drafter, and a coordinator."""
    model = save_tokenizer(build("llama", folder / "model"), VOCAB_SIZE)
    worker = {"model": model, "dtype": "float32", "kv_cache_bytes": 8 << 20}
    async with AsyncExitStack() as stack:
        starting, redis = Starting(stack), stack.enter_context(running_redis())
        target = await starting.start("target", "target_service", **worker)
        draft = await starting.start("draft", "draft_service", **worker, drafters=",".join(DRAFTERS))
        target_liar, through_target = await stack.enter_async_context(lying(target, seed, _is_honest_target))
        draft_liar, through_draft = await stack.enter_async_context(lying(draft, seed, _is_honest_draft))
        own = {"tokenizer": model, "store": redis.url, "target": through_target, "draft": through_draft}
        limits = {"max_new_tokens": MAX_NEW_TOKENS, "session_ttl_s": 30, "target_patience_s": 10}
        address = await starting.start("coordinator", "tests.fuzz.coordinator_process", **own, **limits)
        services = Services(address, target, draft, target_liar, draft_liar, starting.children, starting.errors)
        await _until_ready(services)
        yield services


async def _until_ready(services: Services) -> None:
    """Return once every drafter has drafted: what loads late must not look like a leak."""
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    async with AsyncClient(services.address, timeout_s=START_S, connect_timeout_s=START_S) as client:
        for drafter in (None, *DRAFTERS):
            speculation = SpeculationParams(num_draft_tokens=4, drafter=drafter)
            for _ in range(NUM_WARM_UPS):
                await client.complete(prompt_token_ids=[1], sampling=sampling, speculation=speculation)
    services.errors.clear()


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _is_honest_target(opening: bytes) -> bool:
    request = target_pb2.ScoreRequest.FromString(opening)
    return request.open.session.sampling.seed == HONEST_SEED


def _is_honest_draft(opening: bytes) -> bool:
    request = draft_pb2.ProposeRequest.FromString(opening)
    return request.open.session.sampling.seed == HONEST_SEED


def _status_kb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
