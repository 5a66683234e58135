"""Measure speeds as ratios: every configuration in turn on every prompt, with plain decoding among them."""

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from specdec import AsyncClient, AsyncStream, Completion, SamplingParams, SpeculationParams, Statistics

PROMPT_LINES = 24  # of a held-out file: some 200 to 300 tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or a user's message to answer."""

    name: str
    text: str
    is_chat: bool = False

    def stream(self, client: AsyncClient, sampling: SamplingParams, speculation: SpeculationParams) -> AsyncStream:
        """Return the stream of a new session."""
        if self.is_chat:
            return client.stream_chat([("user", self.text)], sampling=sampling, speculation=speculation)
        return client.generate(self.text, sampling=sampling, speculation=speculation)

    async def complete(
        self, client: AsyncClient, sampling: SamplingParams, speculation: SpeculationParams
    ) -> Completion:
        """Return the completion of a new session."""
        async with self.stream(client, sampling, speculation) as stream:
            return await stream.result()


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way of serving the same target."""

    name: str
    speculation: SpeculationParams


PLAIN = Configuration("plain", SpeculationParams(num_draft_tokens=0))
CHOSEN = Configuration("chosen by the service", SpeculationParams())


def automatic(drafter: str) -> Configuration:
    """Return a drafter that a service offers, with the number of draft tokens left to the service."""
    return Configuration(f"{drafter}, K automatic", SpeculationParams(drafter=drafter))


def fixed(drafter: str, num_draft_tokens: int) -> Configuration:
    """Return a drafter that a service offers, with a number of draft tokens."""
    speculation = SpeculationParams(drafter=drafter, num_draft_tokens=num_draft_tokens)
    return Configuration(f"{drafter}, K = {num_draft_tokens}", speculation)


class Named(Protocol):
    """What is compared with others."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        ...


@dataclass(slots=True)
class Measured:
    """What one configuration did over all prompts and repetitions."""

    configuration: Named
    tokens_per_s: list[float] = field(default_factory=list)  # one a run
    statistics: list[Statistics] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)  # where they were kept

    @property
    def median_tokens_per_s(self) -> float:
        """The middle run."""
        return statistics.median(self.tokens_per_s)

    @property
    def has_drafted(self) -> bool:
        """Whether any round had a draft."""
        return self._sum("num_draft_tokens") > 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 where nothing was drafted."""
        drafted = self._sum("num_draft_tokens")
        return self._sum("num_accepted_tokens") / drafted if drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Committed over rounds, the closing token included."""
        return self._per_round("num_tokens")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the rounds that drafted a token at each depth, the fraction that accepted one there."""
        drafted = self._sum_by_depth("num_drafts_per_depth")
        return [
            accepted / total
            for accepted, total in zip(self._sum_by_depth("num_accepted_tokens_per_depth"), drafted, strict=True)
        ]

    def ms_per_round(self, phase: str) -> float:
        """Mean milliseconds of `draft_s`, `score_s`, `commit_s` or `total_s` in a round."""
        return 1000 * self._per_round(phase)

    @property
    def rest_ms_per_round(self) -> float:
        """Mean milliseconds of a round without drafting and scoring; commits run beside those of the next round."""
        return self.ms_per_round("total_s") - self.ms_per_round("draft_s") - self.ms_per_round("score_s")

    def _per_round(self, name: str) -> float:
        num_rounds = self._sum("num_rounds")
        return self._sum(name) / num_rounds if num_rounds else 0.0

    def _sum(self, name: str) -> float:
        return float(sum(getattr(entry, name) for entry in self.statistics))

    def _sum_by_depth(self, name: str) -> list[int]:
        counts = [getattr(entry, name) for entry in self.statistics]
        return [sum(column) for column in zip_longest(*counts, fillvalue=0)]

    @classmethod
    def together(cls, parts: "Sequence[Measured]") -> "Measured":
        """Join what one configuration did on several kinds of prompts."""
        return cls(
            parts[0].configuration,
            *(
                [each for part in parts for each in getattr(part, name)]
                for name in ("tokens_per_s", "statistics", "completions")
            ),
        )


def ratios(measured: Measured, plain: Measured) -> list[float]:
    """Return the speed-up over plain decoding, run by run."""
    return [fast / slow for fast, slow in zip(measured.tokens_per_s, plain.tokens_per_s, strict=True)]


def speed_up(measured: Measured, plain: Measured) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of the speed-up over plain decoding."""
    runs = ratios(measured, plain)
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else (runs[0],) * 3
    return low, middle, high


async def measure(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    sampling: SamplingParams,
    repetitions: int = 1,
) -> list[Measured]:
    """Run every configuration on every prompt, in turn, so that a slow minute of the machine slows all of them."""
    results = [Measured(configuration) for configuration in configurations]
    for _ in range(repetitions):
        for prompt in prompts:
            for configuration, result in zip(configurations, results, strict=True):
                begin = time.perf_counter()
                completion = await prompt.complete(client, sampling, configuration.speculation)
                elapsed_s = time.perf_counter() - begin
                result.tokens_per_s.append(len(completion.tokens) / elapsed_s)
                result.statistics.append(completion.statistics)
                result.completions.append(completion)
    return results


def held_out_prompts(folder: Path) -> dict[str, str]:
    """Return the beginnings of the files that the demo pair was not trained on, by name."""
    files = sorted(folder.glob("*.py"))
    return {file.name: "\n".join(file.read_text().split("\n")[:PROMPT_LINES]) + "\n" for file in files}


def busy_cores(load_average: float, num_cores: int) -> str | None:
    """Return a warning if other programs keep the cores busy before a measurement begins, else None."""
    if load_average <= num_cores:
        return None
    load = f"load average {load_average:.1f}, {num_cores} cores"
    return f"other programs use these cores ({load}); the figures are unreliable"


def hardware() -> str:
    """Return what this ran on, in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{len(names)} x {names[0]}" if names else model
    return f"{model}, {platform.system()}, Python {platform.python_version()}"
