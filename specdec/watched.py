"""Files that are replaced while a process runs: read again within a second, unless they cannot be used."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

CHECK_PERIOD_S = 1.0  # between two looks at the files

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]


class WatchedError(ValueError):
    """Files cannot be used. The message names them and the remedy."""


def signature_of(paths: Iterable[str | Path]) -> Signature:
    """Return what changes when a file is replaced. Raises WatchedError for a file that is not there."""
    return tuple(map(_signature, paths))


def _signature(path: str | Path) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise WatchedError(f"cannot read {path}: {error.strerror}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Watched(Generic[T]):
    """The last usable value of files: what cannot be used, as in the middle of a replacement, is left out.

    `read` returns the value or raises WatchedError. `on_reload` is called with a problem once, and with None when a new
    value was taken.
    """

    def __init__(
        self,
        signature: Callable[[], Signature],
        read: Callable[[], T],
        on_reload: Callable[[WatchedError | None], None] = lambda problem: None,
        period_s: float = CHECK_PERIOD_S,
    ) -> None:
        self._read_signature, self._read = signature, read
        self._on_reload, self._period_s = on_reload, period_s
        self._signature = signature()
        self._value = read()
        self._problem = ""
        self._next_check = time.monotonic() + period_s

    @property
    def value(self) -> T:
        """The value, at most `period_s` older than the files."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + self._period_s
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        try:
            signature = self._read_signature()
            if signature == self._signature:
                return
            self._value, self._signature = self._read(), signature
        except WatchedError as problem:
            if str(problem) != self._problem:
                self._problem = str(problem)
                self._on_reload(problem)
        else:
            self._problem = ""
            self._on_reload(None)
