"""What a program reads of the world besides its messages: time and chance. Tests hand in others."""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outside:
    """Where time and randomness come from."""

    now_s: Callable[[], float] = time.perf_counter  # never goes back; its zero means nothing
    uniform: Callable[[], float] = random.random  # in [0, 1), for pauses: predictable
    random_bits: Callable[[int], int] = secrets.randbits  # a whole number of so many bits, unpredictable

    def __deepcopy__(self, memo: dict[int, Any]) -> "Outside":
        """Return itself: redis-py copies what it is given, and the source of randomness cannot be copied."""
        return self


REAL = Outside()
