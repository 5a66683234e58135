"""A client whose sessions are all in order: its texts stay what they were, and it never waits for long."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specdec import AsyncClient, SamplingParams, SpeculationParams
from tests.fuzz.services import HONEST_SEED, MAX_NEW_TOKENS, Services

PROMPT = [5, 17, 3, 200, 9]
SAMPLING = SamplingParams(temperature=0, seed=HONEST_SEED, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)
DRAFTED = SpeculationParams(num_draft_tokens=3, drafter="model")
PAUSE_S = 0.2  # between its sessions: it is a neighbour, not a load
MAX_CPU_GAP_S = 1.0
MAX_IDLE_GAP_S = 1.0
MAX_GAP_S = 60.0


@dataclass(slots=True)
class Neighbour:
    """What became of its sessions.

    How long it waits for a chunk is counted in two ways, neither of which depends on how busy the machine is with
    others. In processor time of the service that took most of it meanwhile: what blocks a service takes that. And in
    time in which no service had anything to do: a wait that nothing is gained by.
    """

    services: Services
    pause_s: float = PAUSE_S
    num_sessions: int = 0
    max_gap_s: float = 0.0
    max_cpu_gap_s: float = 0.0
    max_idle_gap_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _at_s: float = 0.0
    _cpu_s: dict[str, float] = field(default_factory=dict)
    _busy_s: float = 0.0

    async def run(self) -> None:
        """Complete one session after the other, until cancelled."""
        async with AsyncClient(self.services.address, timeout_s=MAX_GAP_S, max_retries=0) as client:
            expected: tuple[int, ...] | None = None
            while True:
                tokens = await self._complete(client)
                expected = expected or tokens
                if tokens and tokens != expected:
                    self.wrong.append(f"a neighbour's text was {tokens}, not {expected}")
                self.num_sessions += 1
                await asyncio.sleep(self.pause_s)

    async def _complete(self, client: AsyncClient) -> tuple[int, ...]:
        self._mark()
        tokens: tuple[int, ...] = ()
        try:
            async for chunk in client.generate(prompt_token_ids=PROMPT, sampling=SAMPLING, speculation=DRAFTED):
                self._progress()
                tokens += tuple(chunk.tokens)
        except Exception as error:
            self.wrong.append(f"a neighbour's session ended with {type(error).__name__}: {error}")
            return ()
        return tokens

    def describe(self) -> str:
        """Return what a person reads."""
        waits = f"waited {self.max_gap_s:.2f} s at most, {self.max_cpu_gap_s:.2f} s for a service at work"
        return f"{self.num_sessions} sessions, {waits}, {self.max_idle_gap_s:.2f} s for none"

    def _mark(self) -> None:
        self._at_s, self._cpu_s, self._busy_s = time.monotonic(), self.services.cpu_s(), self.services.busy_s()

    def _progress(self) -> None:
        before_s, before_cpu_s, before_busy_s = self._at_s, self._cpu_s, self._busy_s
        self._mark()
        gap_s, cpu_gap_s = self._at_s - before_s, max(self._cpu_s[name] - before_cpu_s[name] for name in before_cpu_s)
        idle_gap_s = max(0.0, gap_s - (self._busy_s - before_busy_s))
        self.gaps_s.append(gap_s)
        self.max_gap_s, self.max_cpu_gap_s = max(self.max_gap_s, gap_s), max(self.max_cpu_gap_s, cpu_gap_s)
        self.max_idle_gap_s = max(self.max_idle_gap_s, idle_gap_s)
        if cpu_gap_s > MAX_CPU_GAP_S or idle_gap_s > MAX_IDLE_GAP_S or gap_s > MAX_GAP_S:
            parts = f"{cpu_gap_s:.1f} s of them for a service at work, {idle_gap_s:.1f} s for none"
            self.wrong.append(f"a neighbour waited {gap_s:.1f} s, {parts}")


@asynccontextmanager
async def neighbouring(services: Services, pause_s: float = PAUSE_S) -> AsyncIterator[Neighbour]:
    """Run a neighbour while the context lasts; at least one of its sessions ends before it, and one in it."""
    neighbour = Neighbour(services, pause_s)
    running = asyncio.create_task(neighbour.run(), name="neighbour")

    async def until_ended(num_sessions: int) -> None:
        async with asyncio.timeout(2 * MAX_GAP_S):
            while neighbour.num_sessions < num_sessions and not running.done():  # noqa: ASYNC110  # another task counts
                await asyncio.sleep(0.01)

    try:
        await until_ended(1)  # what a worker first needs memory for is no growth
        yield neighbour
        await until_ended(neighbour.num_sessions + 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
