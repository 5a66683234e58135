"""What tracing costs a round: `python -m benchmarks.tracing_cost [--against CHECKOUT]`.

Rounds of the production loop with toy drafters and scorers that cost next to nothing: there is only what a coordinator
does itself. Each measurement is a process of its own; kinds take turns, and each is compared with the one beside it:

off      no endpoint                    compared with the loop of another checkout (`--against`), or with itself
rounds   the first 8 rounds of a request and one in 16 are traced
all      every round is traced
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_TOKENS = 4_000  # in one generation: some 1,300 rounds
EVERY = {"rounds": 16, "all": 1}


class NoText:
    """A detokenizer without text."""

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""


async def measured_us(kind: str) -> float:
    """Return microseconds of processor time a round; imports here, as another checkout may be measured."""
    from coordinator.choosing.chooser import PlanChooser
    from coordinator.choosing.shared_statistics import SharedStatistics
    from coordinator.generation import Generation, Limits, Round
    from coordinator.rounds import DEFAULT_OPTIONS, Drafted, RoundParts, Scored, ScoreOptions, run_rounds
    from specdec.exact.acceptance import TokenRule
    from specdec.exact.values import Observations, Proposal, Scores, SparseDistribution, TargetDistribution
    from specdec.types import SamplingParams

    class Drafter:
        """Drafts token 1, three times."""

        available = True
        distribution = SparseDistribution((1, 2), (0.75, 0.25))

        async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
            """Return the proposal."""
            return Drafted(Proposal((1,) * num_draft_tokens, (self.distribution,) * num_draft_tokens), 0.001)

        def observe(self, observations: Observations) -> None:
            """Ignore observations."""

    class Scorer:
        """Finds token 1 a little less probable."""

        async def score(
            self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS
        ) -> Scored:
            """Return the answers."""
            before = TargetDistribution((0.6, 0.3), 0.1, 3)
            after = TargetDistribution((), 1.0, 4)
            return Scored(Scores((*[before] * len(proposal), after)), 0.001)

        def known(self, committed: Sequence[int], proposal: Proposal) -> None:
            """Return nothing: each round is asked for."""

    async def commit(played: Round) -> None:
        """Commit at once."""

    sampling = SamplingParams(seed=1)
    generation = Generation((0, 1), sampling, Limits(NUM_TOKENS, NUM_TOKENS + 10), NoText())
    chooser = PlanChooser(SharedStatistics(), ["toy"], 5, 3)
    parts = RoundParts({"toy": Drafter()}, Scorer(), TokenRule(), chooser)
    with ExitStack() as stack:
        if kind in EVERY:
            from specdec.serving.tracing.otlp import OtlpTracer

            tracer = OtlpTracer("benchmark", "http://127.0.0.1:1", EVERY[kind])
            stack.enter_context(tracer.request("Generate", {}))
        begin_s = time.process_time()
        await run_rounds(generation, parts, commit)
    return 1e6 * (time.process_time() - begin_s) / generation.statistics.num_rounds


def run_once(kind: str, checkout: Path) -> float:
    """Return what a process of this checkout measures."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    words = [sys.executable, str(Path(__file__).resolve()), "--measure", kind]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def compare(kind: str, checkout: Path, against: Path, num_pairs: int) -> str:
    """Return one line: both medians, and the median and spread of the pairs' ratios."""
    pairs = []
    for number in range(num_pairs):
        order = [(kind, checkout), ("off", against)]
        times = {each: run_once(*each) for each in (order if number % 2 else order[::-1])}
        pairs.append((times.get((kind, checkout), 0.0), times.get(("off", against), 0.0)))
    ratios = sorted(one / other for one, other in pairs)
    low, high = ratios[num_pairs // 4], ratios[-1 - num_pairs // 4]
    one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{kind:<8}{one:8.1f} us{other:8.1f} us   {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=ROOT, help="a checkout without tracing")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(asyncio.run(measured_us(flags.measure)))
        return
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {flags.pairs} pairs")
    print(f"{'kind':<8}{'a round':>11}{'compared':>11}   ratio (quartiles)")
    print(compare("off", ROOT, flags.against.resolve(), flags.pairs))
    for kind in EVERY:
        print(compare(kind, ROOT, ROOT, flags.pairs), flush=True)


if __name__ == "__main__":
    main()
