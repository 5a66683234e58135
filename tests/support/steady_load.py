"""Sessions of gRPC clients and of OpenAI's HTTP client that run all the time, and what became of each.

Texts are greedy with drafts, or of a seed without drafts: these are the same each time, whatever fails in between. (A
seed with drafts gives another text of the same distribution once a draft is lost.)
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai

from specdec import AsyncClient, SamplingParams, SpeculationParams

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, by gRPC or HTTP."""

    prompt: str
    sampling: SamplingParams
    speculation: SpeculationParams


@dataclass(slots=True)
class Outcome:
    """What one session gave, against what it gives when nothing happens."""

    way: str
    expected: str
    text: str = ""
    error: str = ""
    begin_s: float = field(default_factory=time.monotonic)
    end_s: float = float("inf")
    longest_wait_s: float = 0.0

    def ran_at(self, time_s: float) -> bool:
        """Return whether the session ran at a moment."""
        return self.begin_s < time_s < self.end_s

    @property
    def verdict(self) -> str:
        """Return `error`, `lost` for a text that lacks its end, `changed`, or `same`."""
        if self.error:
            return "error"
        if self.text == self.expected:
            return "same"
        return "lost" if self.expected.startswith(self.text) else "changed"


@dataclass
class SteadyLoad:
    """So many sessions at once, until it is told to stop and enough have run."""

    coordinators: str
    gateways: str
    num_sessions: int
    at_once: int
    requests: tuple[Request, ...]
    outcomes: list[Outcome] = field(default_factory=list)
    num_running: int = 0
    num_http_requests: int = 0  # also those that OpenAI's client repeated
    expected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = asyncio.Event()
        self._numbers = itertools.count()

    async def learn(self) -> None:
        """Ask for each text while nothing happens."""
        async with AsyncClient(self.coordinators, insecure=True, timeout_s=TIMEOUT_S) as client:
            for each in self.requests:
                asked = client.complete(each.prompt, sampling=each.sampling, speculation=each.speculation)
                self.expected.append((await asked).text)

    async def run(self) -> None:
        """Run sessions until `stop`, and at least `num_sessions`."""
        hooks: Any = {"request": [self._count]}
        async with openai.AsyncOpenAI(
            base_url=f"http://{self.gateways}/v1",
            api_key="none",
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
        ) as client:
            await asyncio.gather(*(self._one_after_another(client) for _ in range(self.at_once)))

    def stop(self) -> None:
        """Begin no more sessions than are needed."""
        self._stopping.set()

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(each.verdict for each in self.outcomes)

    async def _count(self, _: object) -> None:
        self.num_http_requests += 1

    async def _one_after_another(self, client: openai.AsyncOpenAI) -> None:
        while not (self._stopping.is_set() and len(self.outcomes) + self.num_running >= self.num_sessions):
            await self._follow(next(self._numbers), client)

    async def _follow(self, number: int, client: openai.AsyncOpenAI) -> None:
        which = number // 2 % len(self.requests)
        request, outcome = self.requests[which], Outcome(("gRPC", "HTTP")[number % 2], self.expected[which])
        pieces = self._by_http(client, request) if outcome.way == "HTTP" else self._by_grpc(request)
        self.num_running += 1
        last_s = outcome.begin_s
        try:
            async for piece in pieces:
                outcome.text += piece
                outcome.longest_wait_s = max(outcome.longest_wait_s, time.monotonic() - last_s)
                last_s = time.monotonic()
        except Exception as error:  # whatever a client raises is what its user sees
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            self.num_running -= 1
            outcome.end_s = time.monotonic()
            self.outcomes.append(outcome)

    async def _by_grpc(self, request: Request) -> AsyncIterator[str]:
        async with (
            AsyncClient(self.coordinators, insecure=True, timeout_s=TIMEOUT_S) as client,
            client.generate(request.prompt, sampling=request.sampling, speculation=request.speculation) as chunks,
        ):
            async for chunk in chunks:
                yield chunk.text

    async def _by_http(self, client: openai.AsyncOpenAI, request: Request) -> AsyncIterator[str]:
        more = {"ignore_eos": request.sampling.ignore_eos, "num_draft_tokens": request.speculation.num_draft_tokens}
        stream = await client.completions.create(
            model="target",
            prompt=request.prompt,
            max_tokens=request.sampling.max_new_tokens,
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
            stream=True,
            extra_body={"specdec": {name: value for name, value in more.items() if value is not None}},
        )
        async for event in stream:
            yield event.choices[0].text
