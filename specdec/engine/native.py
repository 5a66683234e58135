"""The engine's C code: attention, products and whole forwards on CPUs.

It is built when specdec is installed, where there is a C compiler; everything it does, torch does too, more slowly.
"""

import ctypes
import importlib.util
from functools import cache
from typing import ClassVar

import torch

EXTENSION = "specdec.engine._kernels"  # built by setup.py

TILE_BYTES = 64  # of a row, in one tile of the matrix unit

_POINTER = ctypes.c_void_p


@cache
def kernels(keeps_lock: bool = False) -> ctypes.CDLL | None:
    """Return the compiled code, or None where specdec was installed without a C compiler.

    What takes microseconds better keeps Python's lock meanwhile: to get it back may take longer.
    """
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None or spec.origin is None:
        return None
    library, number = (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(spec.origin), ctypes.c_int64
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "lanes": (number, []),
        "has_pairs": (number, []),
        "room": (number, [_POINTER]),
        "attend_shared": (None, [_POINTER, _POINTER, number, number, _POINTER]),
        "store": (None, [_POINTER, _POINTER, number, _POINTER, number, number]),
        "has_bytes": (number, []),
        "has_tiles": (number, []),
        "multiply": (None, [_POINTER, _POINTER, _POINTER, number, _POINTER]),
        "product_room": (number, [_POINTER, number]),
        "forward_room": (number, [_POINTER, number]),
        "forward": (None, [_POINTER, _POINTER, _POINTER]),
        "set_helpers": (number, [number]),
        "rest": (None, []),
        "count_parts": (None, [_POINTER, _POINTER]),
        "pairs": (None, [_POINTER, _POINTER, _POINTER, _POINTER, number, _POINTER]),
        "draw_room": (number, [number]),
        "draw": (None, [_POINTER, _POINTER]),
        "guess": (None, [_POINTER]),
        "find_largest": (None, [_POINTER, number, number, number, number, number, _POINTER]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"specdec_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def num_lanes() -> int:
    """Return how many floats the kernels' vectors have on this processor."""
    library = kernels()
    return int(library.specdec_lanes()) if library else 0


class Weight(ctypes.Structure):
    """The C struct `Weight`: what `specdec_multiply` reads."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("numbers", "bias", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "is_bf16", "is_halved", "lanes", "has_tiles")),
    )


def multiply(weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight.T + bias, for rows of the weight's type: [..., num_in] -> [..., num_out]."""
    library, address = kernels(), ctypes.addressof(weight)
    assert library is not None, "weights are packed where it is there"
    rows = rows.contiguous()
    num_rows = rows.numel() // weight.num_in
    output = rows.new_empty(*rows.shape[:-1], weight.num_out)
    room = torch.empty(library.specdec_product_room(address, num_rows), dtype=torch.uint8)
    library.specdec_multiply(address, rows.data_ptr(), output.data_ptr(), num_rows, room.data_ptr())
    return output


@cache
def has_bytes() -> bool:
    """Return whether `specdec_multiply` takes weights of 8 bits on this processor."""
    library = kernels()
    return library is not None and bool(library.specdec_has_bytes())


@cache
def has_pairs() -> bool:
    """Return whether `specdec_multiply` takes weights of bfloat16 on this processor."""
    library = kernels()
    return library is not None and bool(library.specdec_has_pairs())


@cache
def has_tiles() -> bool:
    """Return whether the kernels can use the processor's matrix unit (Intel AMX): 16 rows cost about as much as one."""
    library = kernels()
    return library is not None and bool(library.specdec_has_tiles())


def in_tiles(row_bytes: int) -> bool:
    """Return whether rows of so many bytes are multiplied in tiles."""
    return has_tiles() and row_bytes % TILE_BYTES == 0
