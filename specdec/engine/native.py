"""The engine's C code: attention and products on CPUs.

It is built when specdec is installed, where there is a C compiler; everything it does, torch does too, more slowly.
"""

import ctypes
import importlib.util
from functools import cache

import torch

EXTENSION = "specdec.engine._kernels"  # built by setup.py

_POINTER = ctypes.c_void_p


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled code, or None where specdec was installed without a C compiler."""
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None or spec.origin is None:
        return None
    library, number = ctypes.CDLL(spec.origin), ctypes.c_int64
    library.specdec_lanes.restype = library.specdec_room.restype = library.specdec_has_pairs.restype = number
    library.specdec_attend.restype = library.specdec_store.restype = library.specdec_multiply.restype = None
    library.specdec_room.argtypes = [_POINTER]
    library.specdec_attend.argtypes = [_POINTER, _POINTER, number, _POINTER]
    library.specdec_store.argtypes = [_POINTER, _POINTER, number, _POINTER, number, number]
    library.specdec_multiply.argtypes = [*[_POINTER] * 4, *[number] * 3]
    return library


@cache
def has_tiles() -> bool:
    """Return whether this processor multiplies matrices of bfloat16 in tiles; torch does so, our kernels do not."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "amx_tile"))


@cache
def has_pairs() -> bool:
    """Return whether `specdec_multiply` runs on this processor, and is the fastest product of bfloat16 there."""
    library = kernels()
    return library is not None and bool(library.specdec_has_pairs()) and not has_tiles()
