"""The names of drafters that draft together: `model+recycle`."""

from collections.abc import Iterable, Mapping
from itertools import product

AND = "+"


def joint_names(drafters: Mapping[str, bool]) -> list[str]:
    """Return the pairs that are worth trying: each drafter with a model, and the first one without.

    `drafters` says by name whether a drafter has a model. Lookups among themselves find much the same.
    """
    with_model = [name for name, has_model in drafters.items() if has_model]
    without = [name for name, has_model in drafters.items() if not has_model][:1]
    return [AND.join(pair) for pair in product(with_model, without)]


def parts_of(name: str) -> list[str]:
    """Return the names of the drafters that a name stands for, each once."""
    return list(dict.fromkeys(name.split(AND)))


def without_joint(names: Iterable[str]) -> list[str]:
    """Return the names of single drafters, or all where there are only joint ones."""
    every = list(names)
    return [name for name in every if AND not in name] or every
