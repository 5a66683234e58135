"""Record a model's own texts, and after each token what every drafter proposes there and what that and scoring cost.

The coordinator's own clients of the workers ask; `benchmarks.replay` plays the recording.
"""

import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.measure import Prompt
from benchmarks.served import Served, sharing_nothing
from coordinator.draft import DraftLimits, DraftWorkers, SessionDrafter, draft_watch
from coordinator.observing import joined
from coordinator.pool.resolving import resolver
from coordinator.pool.watching import watching
from coordinator.streams import SessionOpening
from coordinator.target import SessionScorer, TargetWorkers, target_watch
from specdec.exact.prefix import PrefixChain
from specdec.exact.values import Observations, Proposal, one_hot
from specdec.serving.channels import open_worker_channel
from specdec.serving.child import print_errors
from specdec.serving.local import running
from specdec.types import SamplingParams

ASKED = (4, 32)  # draft tokens: the cost in between is taken to be linear
STOP_BELOW = 0.08  # about what a draft token costs
SCORED = (0, 1, 2, 4, 8, 16, 32)  # draft tokens whose scoring is timed
TIMED_EVERY = 16  # tokens
TIMEOUT_S = 60.0

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of both kinds."""

    targets: TargetWorkers
    drafts: DraftWorkers


@dataclass(frozen=True, slots=True)
class Session:
    """A session's streams."""

    scorer: SessionScorer
    drafters: Mapping[str, SessionDrafter]

    async def next_token(self, committed: Sequence[int]) -> int:
        """Return the target's token; all drafters receive what it observed."""
        scores = (await self.scorer.score(committed, Proposal())).scores
        for drafter in self.drafters.values():
            drafter.observe(scores.observations or Observations(len(committed)))
        return scores.positions[-1].tail_token

    async def proposals(self, committed: Sequence[int]) -> Line:
        """Return what each drafter proposes, and what it costs; those that draw are left out."""
        step: Line = {}
        for name, drafter in self.drafters.items():
            few, many = ASKED
            first, again = [(await drafter.propose(committed, few, STOP_BELOW)).elapsed_s for _ in range(2)]
            drafted = await drafter.propose(committed, many, STOP_BELOW)
            seconds = [first, drafted.elapsed_s + max(0.0, first - again)]  # the first one reads the last token, too
            if drafted.proposal.is_chosen:
                step[name] = {
                    "tokens": drafted.proposal.tokens,
                    "parents": drafted.proposal.tree,
                    "seconds": seconds,
                }
        return step

    async def scoring(self, committed: Sequence[int]) -> list[tuple[int, float]]:
        """Return what scoring costs by draft tokens."""
        any_token = committed[-1]
        longest = Proposal((any_token,) * max(SCORED), (one_hot(any_token),) * max(SCORED))
        return [(count, (await self.scorer.score(committed, cut(longest, count))).elapsed_s) for count in SCORED]


async def record(served: Served, temperatures: Sequence[float], file: Path) -> None:
    """Write a line a text. Raises CannotRun."""
    tokenizer = AutoTokenizer.from_pretrained(served.options.target)
    with sharing_nothing():
        async with connected(served) as workers:
            for temperature, kind, prompt in asked(served, temperatures):
                committed = encoded(tokenizer, prompt)
                sampling = SamplingParams(temperature=temperature, seed=1)
                session = await opened(workers, f"{prompt.name} {temperature}", committed, sampling)
                text = await recorded(session, committed, served.num_tokens, tokenizer.eos_token_id)
                line = {"kind": kind, "prompt": prompt.name, "temperature": temperature} | text
                with file.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
                print(f"replay: {prompt.name}, temperature {temperature:g}", file=sys.stderr, flush=True)


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Workers]:
    """Run the services, and connect to their workers."""
    async with running(served.options, print_errors) as stack:
        ports = {child.name: child.port.result() for child in stack.children}
        target, draft = (next(port for name, port in ports.items() if kind in name) for kind in ("target", "draft"))
        async with (
            watching(target_watch(resolver(f"127.0.0.1:{target}"), open_worker_channel)) as targets,
            watching(draft_watch(resolver(f"127.0.0.1:{draft}"), open_worker_channel)) as drafts,
        ):
            yield Workers(TargetWorkers(targets, TIMEOUT_S, TIMEOUT_S), DraftWorkers(drafts, TIMEOUT_S))


def asked(served: Served, temperatures: Sequence[float]) -> Iterator[tuple[float, str, Prompt]]:
    """Give all texts to record: temperature, kind and prompt."""
    return (
        (temperature, kind, prompt)
        for temperature in temperatures
        for kind, prompts in served.prompts.items()
        for prompt in prompts[: served.num_prompts]
    )


def encoded(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt."""
    text = prompt.text
    if prompt.is_chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def opened(workers: Workers, name: str, committed: list[int], sampling: SamplingParams) -> Session:
    """Open a session at all workers; its prompt is in `committed`, which grows with its text."""
    (model,), (offered,) = workers.targets.pool.descriptions, workers.drafts.pool.descriptions
    observed = joined((drafter.observations for drafter in offered.values()), model.num_layers)
    prefix_digest = partial(PrefixChain().digest, committed)
    opening = SessionOpening(name, 1, sampling, len(committed), prefix_digest, model.fingerprint)
    drafters = {
        each: workers.drafts.open(
            opening,
            each,
            DraftLimits(model.vocab_size, drafter.model.context_length, drafter.observations, observed),
            partial(print, "replay:", each, file=sys.stderr),
        )
        for each, drafter in offered.items()
    }
    return Session(workers.targets.open(opening, model.vocab_size, observed), drafters)


async def recorded(session: Session, committed: list[int], num_tokens: int, end: int | None) -> Line:
    """Generate plainly after the prompt in `committed`; ask every drafter after every token."""
    num_prompt, steps, scoring = len(committed), list[Line](), list[tuple[int, float]]()
    while len(steps) < num_tokens and not (steps and committed[-1] == end):
        committed.append(await session.next_token(committed))
        steps.append(await session.proposals(committed))
        if len(steps) % TIMED_EVERY == 0:
            scoring += await session.scoring(committed)
    return {"num_prompt": num_prompt, "tokens": committed, "steps": steps, "scoring": scoring}


def cut(proposal: Proposal, count: int) -> Proposal:
    """Return its first tokens."""
    return Proposal(proposal.tokens[:count], proposal.distributions[:count], proposal.parents[:count])
