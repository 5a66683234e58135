"""`python -m benchmarks.forwards`: the cost of one forward, without the services.

After CACHED_TOKENS tokens a session, on one thread: in a tight loop, and each after a sleep, as it is in a round while
other workers have their turn; a processor that slept runs its first milliseconds slower.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.measure import hardware
from specdec.engine import Feed, LanguageModel, load_language_model

MODELS = Path(__file__).parent.parent / "models"
CACHED_TOKENS = 300
SLEEP_S = 0.005
# sessions in the forward, tokens of each
SHAPES = ((1, 1), (1, 3), (1, 5), (1, 9), (4, 1), (4, 5), (16, 1), (16, 5))


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


def median_ms(forward: Callable[[], None], sleep_s: float, repetitions: int) -> float:
    """Return the middle of `repetitions` forwards, milliseconds, each after a sleep."""
    times = []
    for _ in range(repetitions):
        time.sleep(sleep_s)
        begin = time.perf_counter()
        forward()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(MODELS / "target"), str(MODELS / "draft")])
    parser.add_argument("--repetitions", type=int, default=100, help="of every forward (default: 100)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware())
    for name in flags.models:
        model = load_language_model(name, kv_cache_bytes=1 << 28)
        print(f"\n### {Path(name).name}, {model.dtype}, after {CACHED_TOKENS} cached tokens\n")
        print(f"| sessions | tokens of each | tight, ms | after a sleep of {1000 * SLEEP_S:g} ms, ms |")
        print("|---|---|---|---|")
        for num_sessions, num_tokens in SHAPES:
            with forward_of(model, num_sessions, num_tokens) as forward:
                median_ms(forward, 0.0, flags.repetitions // 10)  # warms up
                tight, slept = (median_ms(forward, sleep_s, flags.repetitions) for sleep_s in (0.0, SLEEP_S))
            print(f"| {num_sessions} | {num_tokens} | {tight:.2f} | {slept:.2f} |")


if __name__ == "__main__":
    main()
