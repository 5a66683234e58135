"""Searching which layers of a model to keep.

First a rough look at choices of every size, so that a short search ends with something; then the careful removal of one
layer after the other; then exchanges. Each yields choices, and may be stopped after any.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Layers = tuple[int, ...]
FIRST_LOOK_FACTOR = 0.75  # about ten choices for 30 layers


@dataclass(frozen=True, slots=True)
class Choice:
    """Layers to keep, and what they gain."""

    layers: Layers
    acceptance: float  # mean over tokens of sum min(p, q)
    speed_up: float  # expected, over plain decoding
    num_draft_tokens: int  # that gives it


Judge = Callable[[Layers], Choice]


def first_look(num_layers: int, judge: Judge) -> Iterator[Choice]:
    """Yield choices of fewer and fewer layers, without those that by themselves can be spared best."""
    every = tuple(range(num_layers))
    alone = {layer: judge(tuple(other for other in every if other != layer)) for layer in every}
    best_spared_first = sorted(every, key=lambda layer: -alone[layer].acceptance)
    num_kept = num_layers - 1
    while num_kept:
        yield judge(tuple(sorted(best_spared_first[num_layers - num_kept :])))
        num_kept = min(num_kept - 1, round(num_kept * FIRST_LOOK_FACTOR))


def removals(num_layers: int, judge: Judge) -> Iterator[Choice]:
    """Yield choices with a layer less each: of the removals from the choice before, the one that keeps most acceptance.

    What a removal kept when it was last tried bounds what it keeps now, for then there were more layers; so most
    removals need not be tried again (lazy evaluation, Minoux 1978).
    """
    kept: Layers = tuple(range(num_layers))
    bounds = dict.fromkeys(kept, math.inf)
    while len(kept) > 1:
        best: Choice | None = None
        for layer in sorted(kept, key=lambda layer: -bounds[layer]):
            if best and bounds[layer] <= best.acceptance:
                break
            tried = judge(tuple(other for other in kept if other != layer))
            bounds[layer] = tried.acceptance
            best = max(best or tried, tried, key=lambda choice: choice.acceptance)
        assert best
        yield best
        kept = best.layers


def exchanges(begin: Choice, num_layers: int, judge: Judge, seed: int = 0) -> Iterator[Choice]:
    """Yield choices that are faster than all before, each by one layer added, removed, or exchanged for another.

    Ends where no such change gains anything.
    """
    best, chooser = begin, random.Random(seed)
    improved = True
    while improved:
        improved = False
        for layers in _neighbours(best.layers, num_layers, chooser):
            tried = judge(layers)
            if tried.speed_up > best.speed_up:
                best, improved = tried, True
                yield best
                break


def _neighbours(layers: Layers, num_layers: int, chooser: random.Random) -> list[Layers]:
    """Return the choices that differ by one layer, or by two of which one is kept, in random order."""
    others: Sequence[int] = [layer for layer in range(num_layers) if layer not in layers]
    without = [{*layers} - {layer} for layer in layers]
    more = [{*layers, other} for other in others]
    exchanged = [fewer | {other} for fewer in without for other in others]
    found = [tuple(sorted(choice)) for choice in [*without, *more, *exchanged] if choice]
    chooser.shuffle(found)
    return found
