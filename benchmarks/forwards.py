"""`python -m benchmarks.forwards`: the cost of one forward, without the services.

After CACHED_TOKENS tokens a session, on one thread and those that help it: in a tight loop, and each after a sleep, as
it is in a round while other workers have their turn; a processor that slept runs its first milliseconds slower.
`--kinds` compares number types and quantisations, forward by forward in turn: DTYPE, or DTYPE+QUANTIZATION, as
float32,bfloat16,float32+int8.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import hardware
from specdec.engine import Feed, LanguageModel, load_language_model
from specdec.engine.helpers import set_helpers

MODELS = Path(__file__).parent.parent / "models"
CACHED_TOKENS = 300
SLEEP_S = 0.005
# sessions in the forward, tokens of each
SHAPES = ((1, 1), (1, 3), (1, 5), (1, 9), (1, 17), (4, 1), (4, 5), (16, 1), (16, 5), (1, 256))


@contextmanager
def forward_of(model: LanguageModel, num_sessions: int, num_tokens: int) -> Iterator[Callable[[], None]]:
    """Give what appends `num_tokens` to each of some sessions that hold CACHED_TOKENS, and takes them back."""
    with ExitStack() as at_end:
        sequences = [model.cache.open(f"session {number}") for number in range(num_sessions)]
        for sequence in sequences:
            at_end.callback(sequence.close)
            sequence.reserve(CACHED_TOKENS + num_tokens)
            model.forward([Feed(sequence, [5] * CACHED_TOKENS, 0)])

        def forward() -> None:
            for sequence in sequences:
                sequence.reserve(CACHED_TOKENS + num_tokens)
            model.forward([Feed(sequence, [5] * num_tokens, num_tokens) for sequence in sequences])
            for sequence in sequences:
                sequence.truncate(CACHED_TOKENS)

        yield forward


def medians_ms(forwards: Mapping[str, Callable[[], None]], sleep_s: float, repetitions: int) -> dict[str, float]:
    """Return the middle of `repetitions` forwards of each kind, milliseconds, each after a sleep; kinds take turns."""
    times: dict[str, list[float]] = {kind: [] for kind in forwards}
    for _ in range(repetitions):
        for kind, forward in forwards.items():
            time.sleep(sleep_s)
            begin = time.perf_counter()
            forward()
            times[kind].append(1000 * (time.perf_counter() - begin))
    return {kind: statistics.median(measured) for kind, measured in times.items()}


def loaded(name: str, kind: str) -> LanguageModel:
    """Return a model of a kind, DTYPE or DTYPE+QUANTIZATION."""
    dtype, _, quantization = kind.partition("+")
    options: dict[str, Any] = {"quantization": quantization or None, "dtype": dtype}
    return load_language_model(name, device="cpu", kv_cache_bytes=1 << 29, **options)


def rows(models: Mapping[str, LanguageModel], repetitions: int) -> Iterator[str]:
    """Give the table's rows: each kind in a tight loop and after a sleep, and the tight ones to the first."""
    for num_sessions, num_tokens in SHAPES:
        with ExitStack() as at_end:
            forwards = {
                kind: at_end.enter_context(forward_of(model, num_sessions, num_tokens))
                for kind, model in models.items()
            }
            medians_ms(forwards, 0.0, max(1, repetitions // 10))  # warms up
            tight, slept = (medians_ms(forwards, sleep_s, repetitions) for sleep_s in (0.0, SLEEP_S))
        first = next(iter(tight.values()))
        cells = [f"{tight[kind]:.2f} | {slept[kind]:.2f} | {tight[kind] / first:.2f}" for kind in models]
        yield f"| {num_sessions} | {num_tokens} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(MODELS / "target"), str(MODELS / "draft")])
    parser.add_argument("--kinds", default="auto", help="number types and quantisations to compare (default: auto)")
    parser.add_argument("--helpers", type=int, default=0, help="threads that help (default: 0)")
    parser.add_argument("--repetitions", type=int, default=100, help="of every forward (default: 100)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    num_helpers = set_helpers(flags.helpers)
    print(hardware())
    for name in flags.models:
        models = {kind: loaded(name, kind) for kind in flags.kinds.split(",")}
        first = next(iter(models))
        threads = f"one thread and {num_helpers} helpers" if num_helpers else "one thread"
        load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        print(f"\n### {Path(name).name}, after {CACHED_TOKENS} cached tokens, {threads}; load of the machine {load}\n")
        names = [kind.replace("auto", f"auto ({model.dtype})") for kind, model in models.items()]
        titles = [f"{kind}, ms | after {1000 * SLEEP_S:g} ms of sleep | to {first}" for kind in names]
        print(f"| sessions | tokens of each | {' | '.join(titles)} |")
        print("|---|---|" + "---|---|---|" * len(models))
        for row in rows(models, flags.repetitions):
            print(row, flush=True)


if __name__ == "__main__":
    main()
