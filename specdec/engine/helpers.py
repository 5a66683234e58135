"""Threads of the lowest priority that help the kernels while a processor has nothing else to do (`team.c`).

No product waits for them, and its bits are the same with any number of them.
"""

import atexit
import ctypes

from specdec.engine.native import kernels

_library: ctypes.CDLL | None = None  # where there have ever been helpers


def set_helpers(count: int) -> int:
    """Let this process have so many helpers, and return how many there are now: none without our C code or Linux."""
    global _library
    library = kernels()
    if library is None:
        return 0
    _library = library
    atexit.register(library.specdec_set_helpers, 0)
    return int(library.specdec_set_helpers(count))


def count_parts() -> tuple[int, int]:
    """Return how many parts of products helpers have computed, and how many more came too late and were done again."""
    library, helped, again = kernels(), ctypes.c_int64(), ctypes.c_int64()
    if library is not None:
        library.specdec_count_parts(ctypes.byref(helped), ctypes.byref(again))
    return helped.value, again.value


def rest() -> None:
    """Wait until no helper reads anything of a product that is over."""
    if _library is not None:
        _library.specdec_rest()


class ReadByHelpers:
    """Holds memory that helpers read: it is freed once none of them does."""

    _rest = staticmethod(rest)  # also when Python ends, and modules have lost their names

    def __del__(self) -> None:
        """Wait for them."""
        self._rest()
