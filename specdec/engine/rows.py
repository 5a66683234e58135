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

import numpy as np
import torch

from specdec.engine.native import kernels, num_lanes
from specdec.exact import race, sampling
from specdec.exact.race import Draw, Race
from specdec.exact.sampling import SamplingContext, changed_logits, next_token_distributions, truncates
from specdec.exact.values import SparseDistribution, TargetDistribution

PROBABILITIES = -1.0  # in place of a row's temperature
NO_RACE = Race(0, -1)
MAX_FOUND = 64  # of the largest numbers of a row
MAX_LOCKED = 1 << 16  # numbers: more take so long that other threads should not wait

_POINTER = ctypes.c_void_p


class Draws(ctypes.Structure):
    """The C struct `Draws`: what `specdec_draw` reads and writes."""

    _fields_: ClassVar = (
        ("rows", _POINTER),
        *((name, ctypes.c_int64) for name in ("stride", "size", "num_rows")),
        *(
            (name, _POINTER)
            for name in ("temperatures", "ends", "listed", "uniforms", "seeds", "places", "probs", "masses", "drawn")
        ),
        ("lanes", ctypes.c_int64),
    )


class Guesses(ctypes.Structure):
    """The C struct `Guesses`: what `specdec_guess` reads and writes."""

    _fields_: ClassVar = (
        ("rows", _POINTER),
        *((name, ctypes.c_int64) for name in ("stride", "size", "num_rows")),
        *((name, _POINTER) for name in ("names", "seeds", "places")),
        ("count", ctypes.c_int64),
        *((name, _POINTER) for name in ("tokens", "chances")),
        ("spread", ctypes.c_double),
        ("lanes", ctypes.c_int64),
    )


def read_and_draw(
    logits: torch.Tensor,
    contexts: Sequence[SamplingContext],
    unions: Sequence[Sequence[int]],
    draws: Sequence[Draw],
) -> list[TargetDistribution | None]:
    """Read the tokens of a union from each row's distribution, then draw one token from the rest; None: there is none.

    Logits are float32 [N, V], of the tokens that exist; one context, union and draw a row. A row with a race has an
    empty union.
    """
    if not _is_compiled_for(logits):
        return sampling.read_and_draw(logits, contexts, unions, draws)
    rows, temperatures = changed_logits(logits, contexts), [context.sampling.temperature for context in contexts]
    truncated = [index for index, context in enumerate(contexts) if truncates(context.sampling)]
    if truncated:  # alone: whether a row's neighbours are truncated must not change its bits
        rows = rows.clone() if rows is logits else rows
        theirs = [contexts[index] for index in truncated]
        rows[truncated] = next_token_distributions(logits[truncated], theirs, logits.shape[-1])
    for index in truncated:
        temperatures[index] = PROBABILITIES
    return _drawn(rows, temperatures, unions, draws)


def _drawn(
    rows: torch.Tensor, temperatures: Sequence[float], unions: Sequence[Sequence[int]], draws: Sequence[Draw]
) -> list[TargetDistribution | None]:
    (num_rows, size), listed = rows.shape, array("q", chain.from_iterable(unions))
    if listed and not 0 <= min(listed) <= max(listed) < size:
        raise IndexError(f"a token of a union is none of the {size}")
    ends = array("q", accumulate(map(len, unions)))
    uniforms, races = zip(*draws, strict=True)
    seeds, places = zip(*(each or NO_RACE for each in races), strict=True)
    given = (
        *(array("f", temperatures), ends, listed, array("d", uniforms)),
        *(array("Q", seeds), array("q", places)),
    )
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


def likely_winners(
    rows: torch.Tensor, races: Sequence[Race], count: int, names: torch.Tensor | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """Return who most likely wins each row's race, best first, and the chances of that, by a draft's rows [N, V].

    `names` [V] are the target's tokens, where they are others. Chances are NaN where a row has no probabilities. For
    some tokens of small rows the chance is 0.
    """
    if not (_is_compiled_for(rows) and 0 < count <= MAX_FOUND):
        ids = np.arange(rows.shape[-1]) if names is None else names.cpu().numpy()
        return race.likely_winners(rows.double().cpu().numpy(), races, count, ids)
    num_rows, size = rows.shape
    seeds, places = array("Q", (each.seed for each in races)), array("q", (each.place for each in races))
    tokens, chances = np.empty((num_rows, count), np.int64), np.empty((num_rows, count))
    struct = Guesses(
        *(rows.data_ptr(), rows.stride(0), size, num_rows, None if names is None else names.data_ptr()),
        *(seeds.buffer_info()[0], places.buffer_info()[0], count, tokens.ctypes.data, chances.ctypes.data),
        *(race.SPREAD, num_lanes()),
    )
    _kernels(num_rows * size).specdec_guess(ctypes.addressof(struct))
    return tokens.tolist(), chances.tolist()


def likely_winner(distribution: SparseDistribution, run: Race) -> tuple[int, float]:
    """Return who most likely wins a race, by a draft's distribution, and the chance of that."""
    tokens, chances = likely_winners(torch.tensor([distribution.probs]), [run], 1, torch.tensor(distribution.token_ids))
    return tokens[0][0], chances[0][0]


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
