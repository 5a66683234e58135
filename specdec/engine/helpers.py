"""Threads of the lowest priority that help the kernels while a processor has nothing else to do (`team.c`).

No product waits for them, and its bits are the same with any number of them.
"""

import atexit
import ctypes

from specdec.engine.native import kernels


def set_helpers(count: int) -> int:
    """Let this process have so many helpers, and return how many there are now: none without our C code or Linux."""
    library = kernels()
    if library is None:
        return 0
    atexit.register(library.specdec_set_helpers, 0)
    return int(library.specdec_set_helpers(count))


def count_parts() -> tuple[int, int]:
    """Return how many parts of products helpers have computed, and how many more came too late and were done again."""
    library, helped, again = kernels(), ctypes.c_int64(), ctypes.c_int64()
    if library is not None:
        library.specdec_count_parts(ctypes.byref(helped), ctypes.byref(again))
    return helped.value, again.value


def rest() -> None:
    """Wait until no helper reads the weight of a product that is over: before the weight is freed."""
    library = kernels()
    if library is not None:
        library.specdec_rest()
