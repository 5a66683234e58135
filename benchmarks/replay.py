"""Replay the automatic choice on recorded texts: what it loses against the best fixed setting, without noise.

`record` serves a model, writes down its own texts and, after each token, what every drafter proposes there and what
that and scoring cost. `play` runs the coordinator's chooser over them, round by round, with those costs, and prints its
speed beside each drafter's alone: a change of the chooser is judged in seconds, and twice the same. It leaves out what
a real machine adds, such as drafters that slow the target down: a benchmark has the last word.

    python -m benchmarks.replay record texts.jsonl --model smollm2 --prompts 2 --tokens 96
    python -m benchmarks.replay play texts.jsonl
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks import tables
from benchmarks.served import SERVED, Served, sharing_nothing
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.comparisons import is_chosen
from coordinator.choosing.plans import PLAIN, RESTING, DraftPlan, RoundOutcome
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.draft import DraftLimits, DraftWorkers, SessionDrafter
from coordinator.joint_names import joint_names, parts_of
from coordinator.merging import merged, shares
from coordinator.observing import joined
from coordinator.streams import SessionOpening
from coordinator.target import SessionScorer, TargetWorkers
from specdec.channel import open_channel
from specdec.exact.tree import longest_path
from specdec.exact.values import Proposal, one_hot
from specdec.serving.child import print_errors
from specdec.serving.local import HEADS, running
from specdec.types import MAX_DRAFT_TOKENS, SamplingParams

ASKED = (4, 32)  # draft tokens: the cost in between is taken to be linear
STOP_BELOW = 0.08  # about what a draft token costs
SCORED = (0, 1, 2, 4, 8, 16, 32)  # draft tokens whose scoring is timed
TIMED_EVERY = 16  # tokens
AWAKE_S = 0.0008  # what looking at drafters adds to a round: observations, and weighing plans
TIMEOUT_S = 60.0
ORDER = (*HEADS, "recycle", "ngram", "suffix")  # in which workers offer them

Line = dict[str, Any]


# ---- recording


@dataclass(frozen=True, slots=True)
class Session:
    """A session's streams."""

    scorer: SessionScorer
    drafters: Mapping[str, SessionDrafter]


async def record(served: Served, temperature: float, file: Path) -> None:
    """Write a line a text: its tokens, the proposals after each of them, and seconds."""
    tokenizer = AutoTokenizer.from_pretrained(served.options.target)
    with sharing_nothing():
        async with running(served.options, print_errors) as stack:
            ports = {child.name: child.port.result() for child in stack.children}
            target, draft = (next(port for name, port in ports.items() if kind in name) for kind in ("target", "draft"))
            async with open_channel(f"127.0.0.1:{target}") as to_target, open_channel(f"127.0.0.1:{draft}") as to_draft:
                targets = TargetWorkers(to_target, TIMEOUT_S, TIMEOUT_S)
                drafts = DraftWorkers(to_draft, TIMEOUT_S)
                for kind, prompts in served.prompts.items():
                    for prompt in prompts[: served.num_prompts]:
                        tokens = encoded(tokenizer, prompt.text, prompt.is_chat)
                        sampling = SamplingParams(temperature=temperature, seed=1)
                        session = await opened(targets, drafts, f"{prompt.name} {temperature}", tokens, sampling)
                        line = await recorded(session, tokens, served.num_tokens, tokenizer.eos_token_id)
                        line |= {"kind": kind, "prompt": prompt.name, "temperature": temperature}
                        with file.open("a") as texts:
                            texts.write(json.dumps(line) + "\n")
                        print(f"replay: {prompt.name}, temperature {temperature:g}", file=sys.stderr, flush=True)


def encoded(tokenizer: Any, text: str, is_chat: bool) -> list[int]:
    """Return the tokens of a prompt."""
    if is_chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def opened(
    targets: TargetWorkers, drafts: DraftWorkers, name: str, tokens: Sequence[int], sampling: SamplingParams
) -> Session:
    """Open a session at all workers."""
    model, offered = await targets.describe(), await drafts.describe()
    observed = joined((drafter.observations for drafter in offered.values()), model.num_layers)
    opening = SessionOpening(name, 1, sampling, len(tokens), model.fingerprint)
    drafters = {
        each: drafts.open(
            opening,
            each,
            DraftLimits(model.vocab_size, drafter.model.context_length, drafter.observations, observed),
            partial(print, "replay:", each, file=sys.stderr),
        )
        for each, drafter in offered.items()
    }
    return Session(targets.open(opening, model.vocab_size, observed), drafters)


async def recorded(session: Session, prompt: Sequence[int], num_tokens: int, end: int) -> Line:
    """Generate plainly; ask every drafter after every token."""
    committed, steps, scoring = list(prompt), list[Line](), list[tuple[int, float]]()
    while len(committed) < len(prompt) + num_tokens and (len(committed) == len(prompt) or committed[-1] != end):
        scored = await session.scorer.score(committed, Proposal())
        committed.append(scored.scores.positions[-1].tail_token)
        for drafter in session.drafters.values():
            if scored.scores.observations:
                drafter.observe(scored.scores.observations)
        step: Line = {}
        for name, drafter in session.drafters.items():
            few, many = ASKED
            first, again = [(await drafter.propose(committed, few, STOP_BELOW)).elapsed_s for _ in range(2)]
            drafted = await drafter.propose(committed, many, STOP_BELOW)
            seconds = [first, drafted.elapsed_s + max(0.0, first - again)]  # the first reads the last token, too
            if is_chosen(drafted.proposal):
                tree = drafted.proposal
                step[name] = {"tokens": tree.tokens, "parents": tree.tree, "seconds": seconds}
        if len(steps) % TIMED_EVERY == TIMED_EVERY - 1:
            longest = Proposal((5,) * max(SCORED), (one_hot(5),) * max(SCORED))
            for count in SCORED:
                scoring.append((count, (await session.scorer.score(committed, cut(longest, count))).elapsed_s))
        steps.append(step)
    return {"num_prompt": len(prompt), "tokens": committed, "steps": steps, "scoring": scoring}


def cut(proposal: Proposal, count: int) -> Proposal:
    """Return its first tokens."""
    return Proposal(proposal.tokens[:count], proposal.distributions[:count], proposal.parents[:count])


# ---- playing


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as recorded: medians."""

    drafting: Mapping[str, tuple[float, float]]  # for ASKED
    scoring: Sequence[float]  # for SCORED

    def draft_s(self, drafter: str, count: int) -> float:
        """Return the seconds of a proposal; a joint one takes as long as its slowest part."""
        return max(float(np.interp(count, ASKED, self.drafting[part])) for part in parts_of(drafter))

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
    return [*ordered, *joint_names({name: name in HEADS for name in ordered})]


def tree(step: Line) -> Proposal:
    """Return a recorded proposal."""
    return Proposal(tuple(step["tokens"]), tuple(map(one_hot, step["tokens"])), tuple(step["parents"]))


def play(text: Text, chooser: PlanChooser, costs: Costs) -> float:
    """Return the seconds of a text's rounds, drafted as the chooser says."""
    length, elapsed_s = text.begin, 0.0
    while length < len(text.tokens):
        plan = chooser.choose(len(text.tokens) - length)
        proposal, draft_s = Proposal(), 0.0
        if plan.drafter:
            proposal = text.proposal(plan.drafter, length, plan.num_draft_tokens)
            draft_s = costs.draft_s(plan.drafter, plan.num_draft_tokens)
        compare(text, length, chooser, plan)
        path = longest_path(proposal.tree, proposal.tokens, 0, text.tokens[length:])[: len(text.tokens) - length - 1]
        score_s = costs.score_s(len(proposal))
        other_s = AWAKE_S if plan.observes else 0.0
        chooser.observe(RoundOutcome(plan, len(proposal), path, draft_s, score_s, other_s=other_s))
        length += len(path) + 1
        chooser.settle(text.tokens[:length])
        elapsed_s += draft_s + score_s + other_s
    return elapsed_s


def compare(text: Text, length: int, chooser: PlanChooser, chosen: DraftPlan) -> None:
    """Answer for the drafter that is asked while the target scores."""
    plan = chooser.choose_compared(chosen, text.names)
    if plan and plan.drafter:
        chooser.observe_unused(plan, text.proposal(plan.drafter, length, plan.num_draft_tokens), length)


class Fixed(PlanChooser):
    """Always the same plan."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__(SharedStatistics(), [], 0)
        self._plan = plan

    def choose(self, remaining_tokens: int, available: object = None) -> DraftPlan:
        """Return it, as far as there is room."""
        count = min(self._plan.num_draft_tokens, remaining_tokens - 1)
        return DraftPlan(self._plan.drafter, count, observes=False) if count > 0 else RESTING

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


def fixed_plans(names: Sequence[str]) -> Iterator[DraftPlan]:
    """Return the plans that the choice is compared with."""
    return (DraftPlan(name, count) for name in names for count in (1, 2, 4, 8, 16, 32))


def choices(names: Sequence[str]) -> Mapping[str, Callable[[SharedStatistics], PlanChooser]]:
    """Return the ways to choose: among all drafters, and each alone."""
    each = {name: (lambda shared, name=name: PlanChooser(shared, [name], MAX_DRAFT_TOKENS)) for name in names}
    return {"chosen": lambda shared: PlanChooser(shared, names, MAX_DRAFT_TOKENS), **each}


def played(texts: Sequence[Text], costs: Costs, names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Give rows of a table: kind, best fixed plan, and speed-ups over plain decoding by total time."""
    kinds = [*dict.fromkeys(text.kind for text in texts)]
    plain = [play(text, Fixed(PLAIN), costs) for text in texts]
    fixed = {plan: [play(text, Fixed(plan), costs) for text in texts] for plan in fixed_plans(names)}
    ways = {}
    for way, begun in choices(names).items():
        shared = SharedStatistics()
        for _ in range(rounds):  # the last one counts: a coordinator that has served for a while
            ways[way] = [play(text, begun(shared), costs) for text in texts]
    for kind in [*kinds, "all"]:
        at = [index for index, text in enumerate(texts) if kind in (text.kind, "all")]

        def gain(seconds: Sequence[float], at: Sequence[int] = at) -> float:
            return sum(plain[index] for index in at) / sum(seconds[index] for index in at)

        best = max(fixed, key=lambda plan: gain(fixed[plan]))
        best_gain = max(gain(fixed[best]), 1.0)
        worst = min(plain[index] / ways["chosen"][index] for index in at)
        chosen = gain(ways["chosen"])
        alone = " ".join(f"{way} {gain(seconds):.2f}" for way, seconds in ways.items() if way != "chosen")
        name = f"{best.drafter}, K = {best.num_draft_tokens}"
        yield kind, name, f"{best_gain:.2f}", f"{chosen:.2f}", f"{chosen / best_gain:.2f}", f"{worst:.2f}", alone


def print_played(file: Path, rounds: int) -> None:
    """Print a table a temperature."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    costs = Costs.of(lines)
    print("scoring, ms:", ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(SCORED, costs.scoring, strict=True)))
    print("drafting, ms:", ", ".join(f"{n}: {1e3 * a:.1f} to {1e3 * b:.1f}" for n, (a, b) in costs.drafting.items()))
    headings = ("", "best fixed", "speed-up", "chosen", "of the best", "worst text", "each alone, automatic")
    for temperature in dict.fromkeys(line["temperature"] for line in lines):
        texts = [Text(line) for line in lines if line["temperature"] == temperature]
        names = names_of(costs.drafting)
        print(
            f"\n### Temperature {temperature:g}\n",
            *tables.lines(headings, played(texts, costs, names, rounds)),
            sep="\n",
        )


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
    playing.add_argument("--rounds", type=int, default=3, help="over all texts; the last counts (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.command == "play":
        print_played(arguments.file, arguments.rounds)
        return
    torch.set_num_threads(1)
    served = replace(SERVED[arguments.model](), num_prompts=arguments.prompts, num_tokens=arguments.tokens)
    for temperature in (0.0, 1.0):
        asyncio.run(record(served, temperature, arguments.file))


if __name__ == "__main__":
    main()
