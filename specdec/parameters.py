"""Kinds of request parameters: what is allowed, how text is parsed, and what is wrong with a value.

`specdec.types.SamplingParams` gives each field one of these. The client and the services validate with them, and the
command line derives its flags from them.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

MAX_UINT32 = 2**32 - 1
MIN_LIKENESS = 0.6  # of difflib; below it two names have little in common
MIN_PREFIX = 2  # letters


class Kind(ABC):
    """What one parameter accepts. On the command line a list is given entry by entry."""

    is_list: ClassVar[bool] = False
    metavar: str  # what the command line calls a value, or an entry

    @abstractmethod
    def parse(self, text: str) -> Any:
        """Return the value, or one entry of a list, that an argument of the command line means. Raises ValueError."""

    @abstractmethod
    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value and what would be right, or None."""

    def count_problem(self, value: Any) -> str | None:
        """Return what is wrong with the number of a list's entries, without looking at any of them."""
        return None

    def join(self, entries: Sequence[Any]) -> Any:
        """Return the value that these parsed entries make up; of a scalar the last counts."""
        return tuple(entries) if self.is_list else entries[-1]

    def token_ids(self, value: Any) -> Sequence[int]:
        """Return the token ids in a value, which must lie in the vocabulary."""
        return ()


@dataclass(frozen=True)
class Number(Kind):
    """A real number in [low, high], or in (low, high] where the low end is excluded."""

    low: float
    high: float
    excludes_low: bool = False
    metavar: str = "NUMBER"

    def parse(self, text: str) -> float:
        """Return the number."""
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"is {text!r}; give a number in {self._interval}") from None

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        remedy = f"give a number in {self._interval}, or leave it unset"
        if not isinstance(value, Real) or isinstance(value, bool):
            return f"is {value!r}; {remedy}"
        number = _as_float(value)
        above = self.low < number if self.excludes_low else self.low <= number
        shown = repr(number).removesuffix(".0")
        return None if math.isfinite(number) and above and number <= self.high else f"is {shown}; {remedy}"

    @property
    def _interval(self) -> str:
        return f"{'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class WholeNumber(Kind):
    """An integer in [low, high]."""

    low: int
    high: int
    metavar: str = "COUNT"

    def parse(self, text: str) -> int:
        """Return the number."""
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"is {text!r}; give a whole number {self._range}") from None

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        remedy = f"give a whole number {self._range}, or leave it unset"
        if not isinstance(value, Integral) or isinstance(value, bool) or value < self.low:
            return f"is {value!r}; {remedy}"
        return None if value <= self.high else f"is {value!r}; the maximum is {self.high}"

    @property
    def _range(self) -> str:
        return f"from {self.low} to {self.high}" if self.high != MAX_UINT32 else f"of at least {self.low}"


@dataclass(frozen=True)
class Switch(Kind):
    """True or False."""

    metavar: str = ""

    def parse(self, text: str) -> bool:
        """Raise ValueError: a switch takes no argument."""
        raise ValueError(f"is {text!r}; this flag takes no value")

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        return None if isinstance(value, bool) else f"is {value!r}; give True or False"


@dataclass(frozen=True)
class Texts(Kind):
    """Some texts, none of them empty."""

    is_list: ClassVar[bool] = True
    max_entries: int
    max_characters: int
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        """Return one text."""
        return text

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        if not isinstance(value, Sequence):
            return f"is {value!r}; give a text or a list of texts"
        if problem := self.count_problem(value):
            return problem
        if wrong := [entry for entry in value if not isinstance(entry, str)]:
            return f"has {wrong[0]!r}; give texts"
        if any(has_no_encoding(entry) for entry in value):
            return "has a text without a UTF-8 encoding; mend it first"
        if sizes := [len(text) for text in value if not 1 <= len(text) <= self.max_characters]:
            return f"has a string of {sizes[0]} characters; give 1 to {self.max_characters}, or leave it out"
        return None

    def count_problem(self, value: Any) -> str | None:
        """Return whether there are too many texts."""
        return _count_problem(len(value), self.max_entries, "strings")


@dataclass(frozen=True)
class Text(Kind):
    """One text, which is not empty."""

    max_characters: int
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value, without repeating it."""
        if not isinstance(value, str):
            return f"is {value!r}; give a text"
        if has_no_encoding(value):
            return "is a text without a UTF-8 encoding; mend it first"
        if not 1 <= len(value) <= self.max_characters:
            return f"has {len(value)} characters; give 1 to {self.max_characters}, or leave it unset"
        return None


@dataclass(frozen=True)
class TokenIds(Kind):
    """Some token ids."""

    is_list: ClassVar[bool] = True
    max_entries: int
    metavar: str = "ID"

    def parse(self, text: str) -> int:
        """Return one id."""
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"is {text!r}; give a token id") from None

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        if not isinstance(value, Sequence):
            return f"is {value!r}; give a list of token ids"
        return self.count_problem(value) or token_id_problem(value)

    def count_problem(self, value: Any) -> str | None:
        """Return whether there are too many ids."""
        return _count_problem(len(value), self.max_entries, "ids")

    def token_ids(self, value: Any) -> Sequence[int]:
        """Return the ids."""
        ids: Sequence[int] = value
        return ids


@dataclass(frozen=True)
class Biases(Kind):
    """A number in [-limit, limit] for some token ids."""

    is_list: ClassVar[bool] = True
    max_entries: int
    limit: float
    metavar: str = "ID=BIAS"

    def parse(self, text: str) -> tuple[int, float]:
        """Return one token id and its bias."""
        token, _, bias = text.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            raise ValueError(f"is {text!r}; give ID=BIAS, as 42=-1.5") from None

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        if not isinstance(value, Mapping):
            return f"is {value!r}; give a mapping from token ids to numbers"
        if problem := self.count_problem(value):
            return problem
        for token, bias in value.items():
            is_number = isinstance(bias, Real) and not isinstance(bias, bool)
            if not is_number or not -self.limit <= bias <= self.limit:
                shown = repr(_as_float(bias)) if is_number else repr(bias)
                return f"is {shown} for token {token}; give numbers in [-{self.limit:g}, {self.limit:g}]"
        return token_id_problem(list(value))

    def count_problem(self, value: Any) -> str | None:
        """Return whether there are too many entries."""
        return _count_problem(len(value), self.max_entries, "entries")

    def join(self, entries: Sequence[Any]) -> Any:
        """Return the mapping; of two biases for a token the last counts."""
        return dict(entries)

    def token_ids(self, value: Any) -> Sequence[int]:
        """Return the ids."""
        return list(value)


def token_id_problem(ids: Sequence[Any]) -> str | None:
    """Return what is wrong with ids of any vocabulary, or None."""
    for token in ids:
        if WholeNumber(0, MAX_UINT32).problem(token):
            return f"has {token!r}, which is no token id; give integers of at least 0"
    return None


def _as_float(number: Any) -> float:
    """Return a number as a float; an integer that is too large for one becomes infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, 1 if number > 0 else -1)


def _count_problem(count: int, maximum: int, noun: str) -> str | None:
    return f"has {count} {noun}; the maximum is {maximum}" if count > maximum else None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of a parameter class: what it accepts, and how the command line presents it."""

    kind: Kind
    help: str
    group: str
    flag: str | None = None  # where it is not the field's name with dashes


def parameter(default: Any, kind: Kind, help: str, *, group: str, flag: str | None = None) -> Any:
    """Return a dataclass field with this default (a function of no arguments makes one) and its `Parameter`."""
    metadata = {"parameter": Parameter(kind, help, group, flag)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def has_no_encoding(text: str) -> bool:
    """Return whether a text cannot be sent: UTF-8 has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like `name`, before others one that begins with it; None if none is near."""
    likeness = {other: difflib.SequenceMatcher(None, _word(name), _word(other)).ratio() for other in known}
    longer = [other for other in known if len(_word(name)) >= MIN_PREFIX and _word(other).startswith(_word(name))]
    best = max(longer or known, key=likeness.__getitem__, default=None)
    return best if longer or (best is not None and likeness[best] >= MIN_LIKENESS) else None


def nearest_hint(name: str, known: Sequence[str], what: str = "the nearest is") -> str:
    """Return a clause that names the nearest known name; empty if none is near."""
    best = nearest(name, known)
    return f"; {what} {best}" if best is not None else ""


def _word(name: str) -> str:
    """Return a name without what all flags, or all variables, begin with: it is no likeness."""
    return name.lstrip("-").removeprefix("SPECDEC_")
