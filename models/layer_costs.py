"""What forwards of a model cost on this machine, whole and with some of its layers."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.engine import Feed, load_language_model

CONTEXT_TOKENS = 64  # cached before the measured forwards
REPETITIONS = 15
KV_CACHE_BYTES = 64 << 20
MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of one forward, as the workers run it."""

    target: Sequence[float]  # [1 + MAX_DRAFT_TOKENS]: of 1, 2, ... tokens
    first_layer: float  # of one token in a draft of one layer: embeddings and head included
    more_layers: float  # of each layer more

    def draft(self, num_layers: int) -> float:
        """Return what drafting one token costs."""
        return self.first_layer + (num_layers - 1) * self.more_layers


def measured_costs(target: Path, num_layers: int, dtype: str) -> Costs:
    """Time forwards of the target and of its first layer, in turn, so that load of the machine meets both alike."""
    whole, first = (_Timed(target, dtype, layers) for layers in ((), (0,)))
    for _ in range(REPETITIONS):
        for count in range(1, MAX_DRAFT_TOKENS + 2):
            whole.run(count)
        first.run(1)
    # what more tokens take bounds what fewer take: another program may have disturbed all forwards of one size
    times = [min(map(whole.median_ms, range(count, MAX_DRAFT_TOKENS + 2))) for count in range(1, MAX_DRAFT_TOKENS + 2)]
    alone = min(first.median_ms(1), times[0])
    return Costs(times, alone, (times[0] - alone) / max(1, num_layers - 1))


class _Timed:
    """A model, and how long its forwards took."""

    def __init__(self, folder: Path, dtype: str, layers: Sequence[int]) -> None:
        self._model = load_language_model(
            str(folder), dtype=dtype, kv_cache_bytes=KV_CACHE_BYTES, layers=layers, self_check=False
        )
        self._sequence = self._model.cache.open("timing")
        self._model.forward([Feed(self._sequence, [1] * CONTEXT_TOKENS, 0)])
        self._seconds: dict[int, list[float]] = {}

    def run(self, num_tokens: int) -> None:
        """Append so many tokens, with logits at each."""
        self._sequence.truncate(CONTEXT_TOKENS)
        begin = time.perf_counter()
        self._model.forward([Feed(self._sequence, [1] * num_tokens, num_tokens)])
        self._seconds.setdefault(num_tokens, []).append(time.perf_counter() - begin)

    def median_ms(self, num_tokens: int) -> float:
        """Return how long forwards of so many tokens take."""
        return 1e3 * statistics.median(self._seconds[num_tokens])
