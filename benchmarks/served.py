"""What is served in the demo and the bench: a target, what drafts for it, and what it is asked."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path

from benchmarks.instructions import KINDS, held_out
from benchmarks.measure import Prompt, held_out_prompts
from specdec import SamplingParams
from specdec.serving.local import HEADS, CannotRun, Options

MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, slots=True)
class Served:
    """A target with its drafts, and its held-out prompts by kind."""

    options: Options
    prompts: Mapping[str, tuple[Prompt, ...]]
    shown: SamplingParams  # of the text that the demo streams
    ignore_eos: bool  # where a text has no end of its own
    draft_lengths: tuple[int, ...]  # that the bench compares, of each drafter
    loads: tuple[int, ...]  # numbers of sessions at once that the bench tries
    num_prompts: int  # of each kind that the bench takes
    num_warm_up: int  # sessions from which the service's own choice learns before it is measured
    num_tokens: int  # the maximum of a completion
    num_repetitions: int

    def in_turn(self, num_prompts: int) -> list[Prompt]:
        """Return so many prompts, one of each kind, then the next of each."""
        return list(islice(chain.from_iterable(zip(*self.prompts.values(), strict=True)), num_prompts))

    def others(self) -> list[Prompt]:
        """Return the prompts that are not measured, one of each kind, then the next; all where none are left."""
        counts = [len(prompts) for prompts in self.prompts.values()]
        unused = [prompts[self.num_prompts :] for prompts in self.prompts.values()]
        rest = unused if all(unused) else list(self.prompts.values())
        return [prompts[index] for index in range(max(counts)) for prompts in rest if index < len(prompts)]

    def sampling(self, temperature: float, num_tokens: int) -> SamplingParams:
        """Return the sampling parameters of a measured completion."""
        return SamplingParams(temperature=temperature, max_new_tokens=num_tokens, ignore_eos=self.ignore_eos)


def with_options(served: Served, given: Sequence[str]) -> Served:
    """Return it with other options of `specdec up`, as NAME=VALUE: a head, a store. Raises CannotRun."""
    known = [field.name for field in fields(Options)]
    options = dict(word.partition("=")[::2] for word in given)
    for name, value in options.items():
        if name not in known or not value:
            raise CannotRun(f"--option {name}={value} is no NAME=VALUE; names are {', '.join(known)}")
    values = {name: int(value) if value.isdecimal() else value for name, value in options.items()}
    return replace(served, options=replace(served.options, **values))  # type: ignore[arg-type]


def demo_pair() -> Served:
    """Return the pair of this repository, which writes Python."""
    prompts = tuple(Prompt(name, text) for name, text in held_out_prompts(MODELS / "heldout").items())
    return Served(
        options=with_heads(
            Options(target=str(MODELS / "target"), draft=str(MODELS / "draft"), port=0, store="memory"),
            MODELS / "demo_heads",
        ),
        prompts={"Python": prompts},
        shown=SamplingParams(temperature=0.7, seed=1, ignore_eos=True),
        ignore_eos=True,
        draft_lengths=(1, 2, 4, 8),
        loads=(1, 4, 16),
        num_prompts=8,
        num_warm_up=8,
        num_tokens=128,
        num_repetitions=3,
    )


def with_heads(options: Options, folder: Path) -> Options:
    """Return the options with the heads of a folder, where it has them."""
    heads = {kind: str(folder / kind) if (folder / kind).is_dir() else None for kind in HEADS}
    return replace(options, eagle3_head=heads["eagle3"], dflash_head=heads["dflash"], medusa_head=heads["medusa"])


def smollm2() -> Served:
    """Return SmolLM2-135M-Instruct, which answers instructions, with its heads. Raises CannotRun."""
    folder = MODELS / "smollm2"
    if not folder.is_dir():
        raise CannotRun(f"there is no {folder}; run `make smollm2` first")
    prompts = {
        kind: tuple(Prompt(f"{kind}/{each.name}", each.prompt, is_chat=True) for each in held_out(kind))
        for kind in KINDS
    }
    return Served(
        options=with_heads(Options(target=str(folder), port=0, store="memory"), MODELS / "smollm2_heads"),
        prompts=prompts,
        shown=SamplingParams(temperature=0.2, top_p=0.9, seed=1),  # as its authors recommend
        ignore_eos=False,
        draft_lengths=(4, 16),
        loads=(),
        num_prompts=10,
        num_warm_up=24,
        num_tokens=96,
        num_repetitions=1,
    )


@contextmanager
def sharing_nothing() -> Iterator[None]:
    """Keep workers that start here from drafting what another configuration wrote after the same prompt."""
    shared = {"RECYCLE_SHARED": "false", "SUFFIX_SHARED_TOKENS": "0", "OFFERS_SHARED": "false"}
    variables = {f"SPECDEC_{name}": value for name, value in shared.items()}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


SERVED: Mapping[str, Callable[[], Served]] = {"demo": demo_pair, "smollm2": smollm2}
