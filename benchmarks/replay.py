"""Replay the automatic choice on recorded texts: what it loses against the best fixed setting, without noise.

`record` serves a model and writes down its texts and all proposals (benchmarks/recording.py). `play` runs the
coordinator's chooser over them, round by round, with the recorded costs, and prints its speed beside each drafter's
alone: a change of the chooser is judged in seconds, and twice the same. It leaves out what a real machine adds, such as
drafters that slow the target down: a benchmark has the last word.

    python -m benchmarks.replay record texts.jsonl --model smollm2 --prompts 2 --tokens 96
    python -m benchmarks.replay play texts.jsonl
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import tables
from benchmarks.recording import ASKED, SCORED, Line, cut, record
from benchmarks.served import SERVED
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.comparisons import is_missed
from coordinator.choosing.plans import NOTHING, PLAIN, RESTING, DraftPlan, Found, Missed, RoundOutcome
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.joint_names import joint_names, parts_of
from coordinator.merging import merged, shares
from specdec.exact.tree import longest_path
from specdec.exact.values import Proposal, one_hot
from specdec.serving.local import HEADS, CannotRun
from specdec.types import MAX_DRAFT_TOKENS

OBSERVED_S = 0.0008  # what observations and trees add to a round, measured on SmolLM2
CHOSEN_S = 0.0005  # what weighing plans adds
WOKEN_S = 0.0015  # what a proposal takes longer where the worker was idle before; recordings ask one after the other
SLOWED = 0.4  # of the time that a compared drafter takes, the target is slower by so much: measured with two cores
ORDER = ("model", *HEADS, "recycle", "ngram", "suffix")  # in which workers offer them
TEMPERATURES = (0.0, 1.0)
CHOSEN, ALL = "chosen", "all"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as recorded: medians."""

    drafting: Mapping[str, tuple[float, float]]  # for ASKED
    scoring: Sequence[float]  # for SCORED

    def draft_s(self, drafter: str, count: int) -> float:
        """Return the seconds of a proposal; a joint one takes as long as its slowest part."""
        return WOKEN_S + max(float(np.interp(count, ASKED, self.drafting[part])) for part in parts_of(drafter))

    def score_s(self, count: int) -> float:
        """Return the seconds of a forward."""
        return float(np.interp(count, SCORED, self.scoring))

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "Costs":
        """Return the medians of all texts."""
        names = {name for line in lines for step in line["steps"] for name in step}
        seconds = {
            name: [step[name]["seconds"] for line in lines for step in line["steps"] if name in step] for name in names
        }
        timed = [pair for line in lines for pair in line["scoring"]]
        return cls(
            {
                name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
                for name, rows in seconds.items()
            },
            [statistics.median(elapsed for count, elapsed in timed if count == wanted) for wanted in SCORED],
        )


class Text:
    """A recorded text."""

    def __init__(self, line: Line) -> None:
        self.kind, self.temperature = line["kind"], line["temperature"]
        self.tokens: list[int] = line["tokens"]
        self.begin: int = line["num_prompt"] + 1  # the first token is the prefill's
        self._steps, self._num_prompt = line["steps"], line["num_prompt"]
        self.names = names_of({name for step in self._steps for name in step})

    def proposal(self, drafter: str, length: int, count: int) -> Proposal:
        """Return what a drafter proposes after so many committed tokens."""
        parts = parts_of(drafter)
        step = self._steps[length - self._num_prompt - 1]
        asked = zip(parts, shares(count, len(parts)), strict=True)
        return merged([cut(tree(step[part]), share) for part, share in asked if part in step] or [Proposal()])


def names_of(parts: Collection[str]) -> list[str]:
    """Return the names to choose among: each drafter, and the joint ones."""
    ordered = [name for name in ORDER if name in parts]
    return [*ordered, *joint_names({name: name in ("model", *HEADS) for name in ordered})]


def tree(step: Line) -> Proposal:
    """Return a recorded proposal."""
    return Proposal(tuple(step["tokens"]), tuple(map(one_hot, step["tokens"])), tuple(step["parents"]))


def play(text: Text, chooser: PlanChooser, costs: Costs) -> float:
    """Return the seconds of a text's rounds, drafted as the chooser says."""
    chooser_s = 0.0 if isinstance(chooser, Fixed) else CHOSEN_S
    length, elapsed_s = text.begin, 0.0
    while length < len(text.tokens):
        chosen = chooser.choose(len(text.tokens) - length)
        plan, missed = chosen, None
        proposal, draft_s = drafted(text, length, plan, costs)
        if plan.fallback and is_missed(proposal):
            chooser.observe_unused(plan, proposal, length)
            plan, missed = plan.fallback, Missed(plan, proposal, draft_s)
            proposal, draft_s = drafted(text, length, plan, costs)
        slowed_s = compare(text, length, chooser, chosen, costs)
        path = longest_path(proposal.tree, proposal.tokens, 0, text.tokens[length:])[: len(text.tokens) - length - 1]
        score_s = costs.score_s(len(proposal)) + slowed_s
        other_s = OBSERVED_S + chooser_s if plan.observes else 0.0
        chooser.observe(RoundOutcome(plan, len(proposal), path, draft_s, score_s, other_s=other_s, missed=missed))
        length += len(path) + 1
        chooser.settle(text.tokens[:length])
        elapsed_s += draft_s + score_s + other_s + (missed.elapsed_s if missed else 0.0)
    return elapsed_s


def drafted(text: Text, length: int, plan: DraftPlan, costs: Costs) -> tuple[Proposal, float]:
    """Return what a plan's drafter proposes, and how long it takes."""
    if plan.drafter is None:
        return Proposal(), 0.0
    proposal = text.proposal(plan.drafter, length, plan.num_draft_tokens)
    return proposal, costs.draft_s(plan.drafter, plan.num_draft_tokens)


def compare(text: Text, length: int, chooser: PlanChooser, chosen: DraftPlan, costs: Costs) -> float:
    """Answer for the drafter that is asked while the target scores; return how much slower the target is."""
    plan = chooser.choose_compared(chosen, text.names)
    if not plan or not plan.drafter:
        return 0.0
    chooser.observe_unused(plan, text.proposal(plan.drafter, length, plan.num_draft_tokens), length)
    return SLOWED * (costs.draft_s(plan.drafter, plan.num_draft_tokens) - WOKEN_S)


class Fixed(PlanChooser):
    """Always the same plan."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__(SharedStatistics(), [], 0)
        self._plan = plan

    def choose(self, remaining_tokens: int, available: object = None, found: Found = NOTHING) -> DraftPlan:
        """Return it, as far as there is room."""
        count = min(self._plan.num_draft_tokens, remaining_tokens - 1)
        return DraftPlan(self._plan.drafter, count) if count > 0 else RESTING

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


def fixed_plans(names: Sequence[str]) -> Iterator[DraftPlan]:
    """Return the plans that the choice is compared with."""
    return (DraftPlan(name, count) for name in names for count in (1, 2, 4, 8, 16, 32))


def in_some_order(texts: Sequence[Text], names: Sequence[str], costs: Costs, seed: int) -> list[float]:
    """Return each text's seconds where a service chooses that has served them all before, in other orders."""
    shared, source, seconds = SharedStatistics(), random.Random(seed), [0.0] * len(texts)
    for _ in range(2):
        for index in source.sample(range(len(texts)), len(texts)):
            seconds[index] = play(texts[index], PlanChooser(shared, names, MAX_DRAFT_TOKENS), costs)
    return seconds


@dataclass(frozen=True, slots=True)
class Played:
    """The seconds of each text in every way."""

    texts: Sequence[Text]
    plain: Sequence[float]
    fixed: Mapping[DraftPlan, Sequence[float]]
    automatic: Mapping[str, Sequence[float]]  # by drafter; CHOSEN: among all of them

    @classmethod
    def of(cls, texts: Sequence[Text], costs: Costs, names: Sequence[str], num_orders: int) -> "Played":
        """Play all texts; the automatic choice in so many orders."""

        def automatic(names: Sequence[str]) -> list[float]:
            played = [in_some_order(texts, names, costs, seed) for seed in range(num_orders)]
            return [statistics.mean(column) for column in zip(*played, strict=True)]

        return cls(
            texts,
            plain=[play(text, Fixed(PLAIN), costs) for text in texts],
            fixed={plan: [play(text, Fixed(plan), costs) for text in texts] for plan in fixed_plans(names)},
            automatic={CHOSEN: automatic(names), **{name: automatic([name]) for name in names}},
        )

    def row(self, kind: str) -> tuple[str, ...]:
        """Return a line of the table: speed-ups over plain decoding, by total time."""
        at = [index for index, text in enumerate(self.texts) if kind in (text.kind, ALL)]
        best = max(self.fixed, key=lambda plan: self._gain(self.fixed[plan], at))
        best_gain = max(self._gain(self.fixed[best], at), 1.0)
        chosen = self.automatic[CHOSEN]
        alone = [f"{name} {self._gain(self.automatic[name], at):.2f}" for name in self.automatic if name != CHOSEN]
        return (
            kind,
            f"{best.drafter}, K = {best.num_draft_tokens}",
            f"{best_gain:.2f}",
            f"{self._gain(chosen, at):.2f}",
            f"{self._gain(chosen, at) / best_gain:.2f}",
            f"{min(self.plain[index] / chosen[index] for index in at):.2f}",
            ", ".join(alone),
        )

    def _gain(self, seconds: Sequence[float], at: Sequence[int]) -> float:
        return sum(self.plain[index] for index in at) / sum(seconds[index] for index in at)


def lines_of(file: Path) -> list[Line]:
    """Return a recording. Raises CannotRun."""
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise CannotRun(f"{file} is no recording: {error}; make one with `record`") from None


def print_played(file: Path, num_orders: int) -> None:
    """Print a table a temperature."""
    lines = lines_of(file)
    costs = Costs.of(lines)
    print("scoring, ms:", ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(SCORED, costs.scoring, strict=True)))
    print("drafting, ms:", ", ".join(f"{n}: {1e3 * a:.1f} to {1e3 * b:.1f}" for n, (a, b) in costs.drafting.items()))
    headings = ("", "best fixed", "speed-up", "chosen", "of the best", "worst text", "each alone, automatic")
    for temperature in dict.fromkeys(line["temperature"] for line in lines):
        texts = [Text(line) for line in lines if line["temperature"] == temperature]
        all_ways = Played.of(texts, costs, names_of(costs.drafting), num_orders)
        kinds = [*dict.fromkeys(text.kind for text in texts), ALL]
        print(f"\n### Temperature {temperature:g}\n", *tables.lines(headings, map(all_ways.row, kinds)), sep="\n")


def main() -> None:
    """Record or play."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write down texts, proposals and costs")
    recording.add_argument("file", type=Path)
    recording.add_argument("--model", choices=SERVED, default="smollm2")
    recording.add_argument("--prompts", type=int, default=2, help="of each kind (default: %(default)s)")
    recording.add_argument("--tokens", type=int, default=96, help="of each text, at most (default: %(default)s)")
    playing = commands.add_parser("play", help="let the chooser run over them")
    playing.add_argument("file", type=Path)
    playing.add_argument("--orders", type=int, default=5, help="of the texts, averaged (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "play":
            print_played(arguments.file, arguments.orders)
            return
        torch.set_num_threads(1)
        served = replace(SERVED[arguments.model](), num_prompts=arguments.prompts, num_tokens=arguments.tokens)
        asyncio.run(record(served, TEMPERATURES, arguments.file))
    except CannotRun as error:
        sys.exit(f"replay: {error}")


if __name__ == "__main__":
    main()
