"""What a target reads and draws from rows of logits: compiled on a CPU, elsewhere by torch (specdec/exact/sampling.py).

Both do the same arithmetic but for the last bits of an exponential and of a sum. After a forward the caches are full of
weights, so that twenty small functions take a millisecond where they take a tenth of one else.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from math import isnan
from typing import ClassVar

import torch

from specdec.engine.native import kernels, num_lanes
from specdec.exact import sampling
from specdec.exact.sampling import SamplingContext, changed_logits, next_token_distributions, truncates
from specdec.exact.values import TargetDistribution

PROBABILITIES = -1.0  # in place of a row's temperature
MAX_FOUND = 64  # of the largest numbers of a row
MAX_LOCKED = 1 << 16  # numbers: more take so long that other threads should not wait

_POINTER = ctypes.c_void_p


class Draws(ctypes.Structure):
    """The C struct `Draws`: what `specdec_draw` reads and writes."""

    _fields_: ClassVar = (
        ("rows", _POINTER),
        *((name, ctypes.c_int64) for name in ("stride", "size", "num_rows")),
        *((name, _POINTER) for name in ("temperatures", "ends", "listed", "uniforms", "probs", "masses", "drawn")),
        ("lanes", ctypes.c_int64),
    )


def read_and_draw(
    logits: torch.Tensor,
    contexts: Sequence[SamplingContext],
    unions: Sequence[Sequence[int]],
    uniforms: Sequence[float],
) -> list[TargetDistribution | None]:
    """Read the tokens of a union from each row's distribution, then draw one token from the rest; None: there is none.

    Logits are float32 [N, V], of the tokens that exist; one context, union and number in [0, 1) a row.
    """
    if not _is_compiled_for(logits):
        return sampling.read_and_draw(logits, contexts, unions, uniforms)
    rows, temperatures = changed_logits(logits, contexts), [context.sampling.temperature for context in contexts]
    truncated = [index for index, context in enumerate(contexts) if truncates(context.sampling)]
    if truncated:  # alone: whether a row's neighbours are truncated must not change its bits
        rows = rows.clone() if rows is logits else rows
        theirs = [contexts[index] for index in truncated]
        rows[truncated] = next_token_distributions(logits[truncated], theirs, logits.shape[-1])
    for index in truncated:
        temperatures[index] = PROBABILITIES
    return _drawn(rows, temperatures, unions, uniforms)


def _drawn(
    rows: torch.Tensor, temperatures: Sequence[float], unions: Sequence[Sequence[int]], uniforms: Sequence[float]
) -> list[TargetDistribution | None]:
    (num_rows, size), listed = rows.shape, array("q", chain.from_iterable(unions))
    if listed and not 0 <= min(listed) <= max(listed) < size:
        raise IndexError(f"a token of a union is none of the {size}")
    ends = array("q", accumulate(map(len, unions)))
    given = array("f", temperatures), ends, listed, array("d", uniforms)
    probs, masses, drawn = (
        array("f", bytes(4 * len(listed))),
        array("f", bytes(4 * num_rows)),
        array("q", bytes(8 * num_rows)),
    )
    addresses = [each.buffer_info()[0] for each in (*given, probs, masses, drawn)]
    struct = Draws(rows.data_ptr(), rows.stride(0), size, num_rows, *addresses, num_lanes())
    library = _kernels(num_rows * size)
    room = torch.empty(library.specdec_draw_room(size), dtype=torch.uint8)
    library.specdec_draw(ctypes.addressof(struct), room.data_ptr())
    return [
        None if isnan(mass) else TargetDistribution(probs[begin:end].tolist(), mass, token)
        for (begin, end), mass, token in zip(pairwise(chain((0,), ends)), masses, drawn, strict=True)
    ]


def largest_tokens(rows: torch.Tensor, count: int) -> tuple[bytes, ...]:
    """Return the ids of the largest entries of each row of [N, V], best first, int32 [min(count, V)].

    Of equal ones any may be left out.
    """
    count = min(count, rows.shape[-1])
    if not (_is_compiled_for(rows) and 0 < count <= MAX_FOUND):
        return bytes_of(sampling.top_tokens(rows, count).to(torch.int32))
    num_rows, size = rows.shape
    found = bytearray(4 * num_rows * count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    _kernels(num_rows * size).specdec_find_largest(
        rows.data_ptr(), rows.stride(0), size, num_rows, count, num_lanes(), address
    )
    return tuple(bytes(found[place : place + 4 * count]) for place in range(0, len(found), 4 * count))


def bytes_of(values: torch.Tensor) -> tuple[bytes, ...]:
    """Return the bytes of each entry of the first dimension."""
    return tuple(entry.tobytes() for entry in values.cpu().contiguous().flatten(1).view(torch.uint8).numpy())


def _kernels(num_numbers: int) -> ctypes.CDLL:
    library = kernels(keeps_lock=num_numbers <= MAX_LOCKED)
    assert library is not None, "asked before"
    return library


def _is_compiled_for(rows: torch.Tensor) -> bool:
    is_plain = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(-1) == 1
    return is_plain and kernels() is not None
