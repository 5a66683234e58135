"""One cached sequence: its token ids, and the draft tokens that are not verified yet.

The tokens are a committed text, then a pending tree of draft tokens that hangs from the text's last token (a chain is a
tree). The next round's tokens keep their path through the tree; the rest is dropped.
"""

import sys
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

from specdec.engine.errors import CacheMiss, EngineError
from specdec.exact.prefix import PrefixChain, num_equal
from specdec.exact.tree import chain_length, is_tree, longest_path


class Storage(Protocol):
    """What a sequence needs of its cache."""

    def reserve(self, sequence: "Sequence", length: int) -> None:
        """Hold slots for `length` tokens; raises CacheFull with nothing changed."""
        ...

    def num_reserved(self, sequence: "Sequence") -> int:
        """Return how many tokens the reserved slots can hold."""
        ...

    def compact(self, sequence: "Sequence", first: int, slots: Tokens[int]) -> None:
        """Move the contents of `slots`, increasing and from `first` on, to `first` and the slots after it."""
        ...

    def release(self, sequence: "Sequence") -> None:
        """Free what the sequence holds beyond its length."""
        ...


@dataclass(frozen=True, slots=True)
class _Round:
    """What was kept when the pending round began; the same message keeps the same again."""

    start: int
    kept: int
    num_committed: int


class Sequence:
    """One token sequence's claim on the cache. Made by `KvCache.open`; used on the engine thread only."""

    def __init__(self, storage: Storage, key: str) -> None:
        self.key = key
        self.num_pins = 0
        self.is_resident = False  # keeps its blocks between rounds
        self._storage = storage
        self._tokens = array("I")
        self._chain = PrefixChain()  # over the tokens
        self._num_committed = 0
        self._parents: list[int] = []  # of the tokens after the committed ones
        self._round: _Round | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.key!r}, length={self.length}, num_committed={self._num_committed})"

    @property
    def tokens(self) -> "array[int]":
        """The ids of the cached tokens [length]: the committed ones, then the pending tree's. Do not change it."""
        return self._tokens

    @property
    def length(self) -> int:
        """Tokens whose keys and values are cached. 0 after an eviction."""
        return len(self._tokens)

    @property
    def num_committed(self) -> int:
        """Tokens before the pending tree; more than `length` while some are still to be appended."""
        return self._num_committed

    @property
    def parents(self) -> tuple[int, ...]:
        """The pending tree, [length - num_committed]: see `exact/tree.py`."""
        return tuple(self._parents)

    @property
    def num_linear(self) -> int:
        """Tokens at the beginning that form one text: up to the pending tree's first branch."""
        return self.length - len(self._parents) + chain_length(self._parents)

    @property
    def is_evictable(self) -> bool:
        """Whether it makes room for others."""
        return self.num_pins == 0 and not self.is_resident

    @property
    def is_branched(self) -> bool:
        """Whether the pending tree has branches, so that nothing can be appended."""
        return self.num_linear < self.length

    def prefix_digest(self, length: int) -> bytes:
        """Return the hash chain over the first `length` cached tokens, which must be of one text."""
        return self._chain.digest(self._tokens, length)

    def mark_committed(self, length: int) -> None:
        """Count the first `length` tokens as committed, also those that are yet to be appended.

        Raises EngineError after a tree with branches.
        """
        self._refuse_branches()
        self._num_committed = length
        self._parents = list(range(self.length - length))

    def reserve(self, length: int) -> None:
        """Hold room for `length` tokens, evicting idle sequences if need be.

        Raises CacheFull, with nothing changed, when pinned sequences leave too little room.
        """
        self._storage.reserve(self, length)

    def release(self) -> None:
        """Free what is reserved beyond the cached tokens."""
        self._storage.release(self)

    def append(self, tokens: Tokens[int], parents: Tokens[int] = ()) -> None:
        """Count `tokens`, the last of which may form a tree, as cached; their room must be reserved.

        Raises EngineError, with nothing changed, after a tree with branches: `resume` or `truncate` first.
        """
        self.check_append(tokens, parents)
        length = self.length + len(tokens)
        if length > self._storage.num_reserved(self):
            raise EngineError(f"sequence {self.key!r} has no room reserved for {length} tokens; reserve it first")
        root = length - len(parents) - self._num_committed  # as in `exact/tree.py`: the token before the tree
        self._parents.extend(range(len(self._parents), root))
        self._parents.extend(root + parent for parent in parents)
        self._tokens.extend(tokens)
        # now: a long text arrives in parts, each hashed beside its forward
        self._chain.digest(self._tokens, min(length, self._num_committed))

    def check_append(self, tokens: Tokens[int], parents: Tokens[int]) -> None:
        """Raise EngineError where `append` could not be: nothing may follow branches, and a tree needs a root."""
        self._refuse_branches()
        if not parents:
            return
        if not is_tree(parents):
            raise EngineError(f"the parents {list(parents)} are not a tree; a parent comes before its children")
        root_length = self.length + len(tokens) - len(parents)
        if len(parents) > len(tokens) or root_length < max(1, self._num_committed):
            raise EngineError(
                f"a tree of {len(parents)} tokens hangs from token {root_length} of sequence {self.key!r}, which has "
                f"{self._num_committed} committed tokens; feed those first, and at least one"
            )

    def _refuse_branches(self) -> None:
        if self.is_branched:
            raise EngineError(f"sequence {self.key!r} ends in a tree with branches; resume or truncate it first")

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and free the rest, reserved room included.

        Raises EngineError when `length` is negative or more than is cached.
        """
        if not 0 <= length <= self.length:
            raise EngineError(f"sequence {self.key!r} holds {self.length} tokens and cannot be truncated to {length}")
        del self._tokens[length:]
        self._chain.truncate(length)
        del self._parents[max(0, length - self._num_committed) :]
        self._num_committed = min(self._num_committed, length)
        if self._round is not None and length < self._round.kept:
            self._round = None
        self._storage.release(self)

    def resume(
        self,
        start: int,
        tokens: Tokens[int],
        *,
        num_committed: int,
        min_fed: int = 0,
        match: bool = False,
        on_draft: bool = False,
        prefix_digest: bytes | None = None,
    ) -> list[int]:
        """Truncate to `start`, to append `tokens`; return what is left to feed of them, at least `min_fed` tokens.

        Cached tokens after `start` that equal `tokens` are kept if `start` is where the pending tree hangs from (along
        any path of the tree), with `match` (from any position), and where the pending round began with the same `start`
        (as many as it kept then, so that a repeated message feeds what it fed before). Then `num_committed` tokens
        count as committed. Raises CacheMiss, with the number of committed tokens, if fewer than `start` tokens are
        committed and cached. With `on_draft`, `start` may lie within the draft, up to its first branch: the caller
        knows that the tokens before `start` are those that it drafted, or has their digest. With `prefix_digest`,
        tokens before `start` that have another one are a CacheMiss of all of them.
        """
        verified = min(self._num_committed, self.length)
        if start > (self.num_linear if on_draft else verified):
            raise CacheMiss(verified, start)
        if not self._chain.proves(self._tokens, start, prefix_digest):
            raise CacheMiss(0, start)
        path = self._path(start, tokens)[: self._num_to_keep(start, match)]
        kept = max(0, min(start + len(path), start + len(tokens) - min_fed))
        fed = [*self._tokens[kept:start], *tokens[max(0, kept - start) :]]
        self._keep(path[: max(0, kept - start)], start)
        self.truncate(kept)
        self.mark_committed(num_committed)
        if self._round is None or self._round.num_committed != num_committed:
            self._round = _Round(start, kept, num_committed)
        return fed

    def _path(self, start: int, tokens: Tokens[int]) -> list[int]:
        """Return the slots after `start` that hold the beginning of `tokens`, along one path."""
        base = self._num_committed
        num_matching = num_equal(self._tokens[start:base], tokens)
        committed = range(start, start + num_matching)
        if committed.stop < min(base, self.length):
            return list(committed)
        root = max(0, start - base)
        path = longest_path(self._parents, self._tokens[base:], root, tokens[num_matching:])
        return [*committed, *(base + node for node in path)]

    def _num_to_keep(self, start: int, match: bool) -> int:
        """Return how many matching tokens after `start` may be kept."""
        if match or start == self._num_committed:
            return sys.maxsize
        if self._round is not None and start == self._round.start:
            return max(0, self._round.kept - start)
        return 0

    def _keep(self, path: Tokens[int], start: int) -> None:
        """Let the slots of `path` follow the first `start` tokens, as a chain; what comes after them is undefined."""
        moved = next((index for index, slot in enumerate(path) if slot != start + index), len(path))
        if moved == len(path):
            return
        first = start + moved
        self._storage.compact(self, first, path[moved:])
        end = start + len(path)
        self._chain.truncate(first)
        self._tokens[first:end] = array("I", [self._tokens[slot] for slot in path[moved:]])
        num_pending = end - self._num_committed
        self._parents[:num_pending] = range(num_pending)

    def pin(self) -> None:
        """Keep the sequence from being evicted until `unpin`. Pins count."""
        self.num_pins += 1

    def unpin(self) -> None:
        """Take back one `pin`."""
        self.num_pins -= 1

    def close(self) -> None:
        """Free everything. The sequence is empty afterwards."""
        self.truncate(0)
