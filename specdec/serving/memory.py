"""How the C library's allocator gives memory back."""

import ctypes

M_MMAP_THRESHOLD = -3  # of mallopt, in glibc
LARGE_BYTES = 128 << 10


def give_back_large_blocks() -> None:
    """Let each large block be a mapping of its own, which is gone once it is freed; does nothing without glibc.

    By default glibc learns from the first large block that is freed to keep up to 32 MB ones, in pools of several
    threads: after some large requests a process stays as large as its busiest moment.
    """
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    except (AttributeError, OSError):
        return
