"""`make bench`: speed over drafters, draft lengths, kinds of prompts and temperatures, always against plain decoding.

Plain decoding of the same target runs in the same run, in turn with the others on each prompt, and so does
transformers' own `generate` in this process. Prints Markdown: docs/benchmarks.md is this program's output with a
paragraph around it. `--model smollm2` (`make bench MODEL=smollm2`) asks a real model held-out instructions of several
kinds. With all drafters that takes hours; `--json FILE` keeps every turn as soon as it is over, and the same command
goes on where it was. A run of some minutes:

    python -m benchmarks.bench --model smollm2 --prompts 1 --tokens 32 --kinds code,extraction --temperatures 0
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

from benchmarks import tables
from benchmarks.in_process import in_process
from benchmarks.loads import LOAD_TOKENS, loads
from benchmarks.measure import CHOSEN, PLAIN, Configuration, Prompt, automatic, fixed, hardware
from benchmarks.served import SERVED, Served, sharing_nothing, with_options
from benchmarks.turns import OtherMeasurement, Place, Record, ServiceWay, Turn, Way, measured, take_turn
from specdec import AsyncClient
from specdec.serving.child import print_errors
from specdec.serving.local import MODEL_FREE, NO_DRAFT, CannotRun, Options, default_threads, running
from specdec.serving.settings import Dtype

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Selection:
    """What of all that could be measured is measured."""

    drafters: tuple[str, ...] | None = None  # None: all on offer
    temperatures: tuple[float, ...] = TEMPERATURES
    with_transformers: bool = True
    file: Path | None = None  # that keeps the turns

    def drafters_of(self, on_offer: Sequence[str]) -> list[str]:
        """Return the drafters to measure. Raises CannotRun for one that the workers do not offer."""
        missing = sorted(set(self.drafters or ()) - set(on_offer))
        if missing:
            raise CannotRun(f"the draft workers do not offer {', '.join(missing)}; they offer {', '.join(on_offer)}")
        return [name for name in on_offer if self.drafters is None or name in self.drafters]


def configurations(drafters: Sequence[str], draft_lengths: Sequence[int]) -> list[Configuration]:
    """Return plain decoding, the service's choice, and every drafter with K automatic and with each draft length."""
    each = [[automatic(name), *(fixed(name, count) for count in draft_lengths)] for name in drafters]
    return [PLAIN, CHOSEN, *(configuration for group in each for configuration in group)]


def transformers_ways(options: Options, dtype: str) -> Sequence[Way]:
    """Return transformers' own ways with the same models, on as many threads as a target worker has."""
    num_threads, _ = default_threads(os.cpu_count() or 1)
    draft = None if options.draft in (*MODEL_FREE, NO_DRAFT) else options.draft
    return in_process(options.target, draft, dtype, options.target_threads or num_threads)


async def turns_of(
    served: Served, ways: Sequence[Way], record: Record, temperature: float
) -> Mapping[str, Sequence[Turn]]:
    """Take all turns of a temperature that were not taken before; return them by kind of prompts."""
    sampling = served.sampling(temperature, served.num_tokens)
    places = [
        (Place(temperature, kind, prompt.name, repetition), prompt)
        for repetition in range(served.num_repetitions)
        for kind, prompts in served.prompts.items()
        for prompt in prompts[: served.num_prompts]
    ]
    missing = [(place, prompt) for place, prompt in places if record.turn(place, ways) is None]
    for number, (place, prompt) in enumerate(missing):
        if not number:
            await take_turn(ways, prompt, sampling)  # caches warm up
            for other in islice(cycle(served.others()), served.num_warm_up):  # and the choice learns
                await take_turn(ways[1:2], other, sampling)
        record.add(place, await take_turn(ways, prompt, sampling))
        say(f"temperature {temperature:g}: {number + 1} of {len(missing)} turns, {prompt.name}")
    by_kind: dict[str, list[Turn]] = {kind: [] for kind in served.prompts}
    for place, _ in places:
        by_kind[place.kind].append(record.turn(place, ways) or {})
    return by_kind


def say(sentence: str) -> None:
    """Print progress beside the tables."""
    print(f"bench: {sentence}", file=sys.stderr, flush=True)


def print_table(title: str, lines: Iterable[str]) -> None:
    """Print a table under its title."""
    print(f"\n### {title}\n", *lines, sep="\n", flush=True)


async def print_temperature(served: Served, ways: Sequence[Way], record: Record, temperature: float) -> None:
    """Print the tables of a temperature."""
    by_kind = {
        kind: measured(ways, turns) for kind, turns in (await turns_of(served, ways, record, temperature)).items()
    }
    print_table(f"One session, temperature {temperature:g}", tables.speeds(by_kind))
    print_table(f"The service's own choice, temperature {temperature:g}", tables.choices(by_kind))


async def print_loads(client: AsyncClient, served: Served, record: Record, temperature: float) -> None:
    """Print total tokens a second of many sessions at once."""
    prompts: Sequence[Prompt] = served.in_turn(served.num_prompts)
    results = [load async for load in loads(client, served, temperature, prompts, served.num_repetitions)]
    for result in results:
        record.note(load=asdict(result))
    columns = ("sessions", "plain, tokens/s", "chosen by the service, tokens/s", "ratio")
    rows = [
        (
            f"{each.num_sessions}",
            f"{each.plain_tokens_per_s:.1f}",
            f"{each.chosen_tokens_per_s:.1f}",
            f"{each.ratio:.2f}",
        )
        for each in results
    ]
    title = f"Many sessions at once, temperature {temperature:g}, {LOAD_TOKENS} tokens each"
    print_table(title, tables.lines(columns, rows))


def print_prompts(served: Served) -> None:
    """Print what is asked."""
    asked = ", ".join(f"{len(each[: served.num_prompts])} {kind}" for kind, each in served.prompts.items())
    print(f"held-out prompts: {asked}; at most {served.num_tokens} tokens each;")
    print(f"{served.num_warm_up} sessions before each temperature, from which the service's own choice learns;")
    print(f"{served.num_repetitions} repetitions, one session at a time unless said; medians.")


async def bench(served: Served, selection: Selection) -> None:
    """Run everything."""
    async with running(served.options, print_errors) as stack, AsyncClient(stack.address) as client:
        model = await client.get_model()
        drafters = selection.drafters_of(model.drafters)
        dtype = model.target.dtype
        ways: list[Way] = [ServiceWay(client, each) for each in configurations(drafters, served.draft_lengths)]
        if selection.with_transformers:
            ways += transformers_ways(served.options, dtype)
        facts = {"hardware": hardware(), "target": model.target.name, "dtype": dtype, "max_tokens": served.num_tokens}
        record = Record(facts, selection.file)
        print(f"{hardware()}; target {model.target.name} ({dtype}), drafters {', '.join(drafters) or 'none'};")
        print_prompts(served)
        for temperature in selection.temperatures:
            await print_temperature(served, ways, record, temperature)
            if served.loads:
                await print_loads(client, served, record, temperature)


# ---- the flags


def comma_separated(text: str) -> tuple[str, ...]:
    """Return what is separated by commas."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def counts(text: str) -> tuple[int, ...]:
    """Return whole numbers, separated by commas."""
    return tuple(int(word) for word in comma_separated(text))


def temperatures(text: str) -> tuple[float, ...]:
    """Return numbers, separated by commas."""
    return tuple(float(word) for word in comma_separated(text))


def flags_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(SERVED), default="demo", help="what to serve (default: the demo pair)")
    add("--target", help="another target: folder or hub id")
    add("--draft", help="another draft: folder or hub id, or ngram")
    add("--dtype", choices=get_args(Dtype), default="auto", help="of the models (default: auto)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of `specdec up`, such as num_drafts=2")
    add("--drafters", type=comma_separated, metavar="NAME,...", help="of those on offer (default: all)")
    add("--draft-lengths", type=counts, metavar="K,...", help="of each drafter, besides K automatic")
    add("--kinds", type=comma_separated, metavar="NAME,...", help="of held-out prompts (default: all)")
    add("--temperatures", type=temperatures, default=TEMPERATURES, metavar="T,...", help="(default: 0,1)")
    add("--prompts", type=int, help="held-out prompts of each kind")
    add("--warm-up", type=int, help="sessions before each temperature, from which the service's own choice learns")
    add("--tokens", type=int, help="maximum tokens of each completion")
    add("--repetitions", type=int, help="of everything")
    add("--loads", type=counts, metavar="COUNT,...", help='numbers of sessions at once; "" for none')
    add("--no-transformers", action="store_true", help="leave out transformers' own generate")
    add("--json", type=Path, metavar="FILE", help="keep every turn there, a line each, and go on where it ends")
    return parser.parse_args(arguments)


def served_of(flags: argparse.Namespace) -> Served:
    """Return what the flags serve and ask. Raises CannotRun."""
    served = with_options(SERVED[flags.model](), flags.option)
    given = {"target": flags.target, "draft": flags.draft, "dtype": flags.dtype}
    options = replace(served.options, **{name: value for name, value in given.items() if value})
    kinds = flags.kinds or tuple(served.prompts)
    if unknown := sorted(set(kinds) - set(served.prompts)):
        raise CannotRun(f"there are no prompts of kind {', '.join(unknown)}; kinds are {', '.join(served.prompts)}")
    chosen = {
        "num_prompts": flags.prompts,
        "num_warm_up": flags.warm_up,
        "num_tokens": flags.tokens,
        "num_repetitions": flags.repetitions,
        "draft_lengths": flags.draft_lengths,
        "loads": flags.loads,
    }
    return replace(
        served,
        options=options,
        prompts={kind: served.prompts[kind] for kind in kinds},
        **{name: value for name, value in chosen.items() if value is not None},
    )


def main() -> None:
    """Run; exit with 1 if the services cannot be started, or what is asked for is not there."""
    flags = flags_of()
    selection = Selection(flags.drafters, flags.temperatures, not flags.no_transformers, flags.json)
    try:
        with sharing_nothing():
            asyncio.run(bench(served_of(flags), selection))
    except (CannotRun, OtherMeasurement) as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
