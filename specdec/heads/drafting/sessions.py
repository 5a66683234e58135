"""What a worker holds of its sessions: their tokens and what the head computed at them, within a bound of memory."""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch

from specdec.drafting.request import DraftRequest
from specdec.exact.prefix import PrefixChain, num_equal
from specdec.exact.values import Proposal
from specdec.heads.drafting.kept import KeptKeys

SESSION_BYTES = 4096  # that a session takes besides its tokens and keys
TOKEN_BYTES = 36  # a Python integer in a list


@dataclass(slots=True)
class HeldSession:
    """One session. States of its tokens may be missing where observations were lost."""

    kept: KeptKeys
    tokens: list[int] = field(default_factory=list)
    chain: PrefixChain = field(default_factory=PrefixChain)  # over the tokens
    latest: tuple[int, torch.Tensor] | None = None  # position, and what the head needs of it to draft after it
    # committed length, K, whether the session is matched, and what was answered
    answer: tuple[tuple[int, int, bool], Proposal] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return SESSION_BYTES + TOKEN_BYTES * len(self.tokens) + self.kept.num_bytes

    def update(self, request: DraftRequest, num_ahead: int) -> None:
        """Truncate and append, but keep what is the same.

        What the head has at a position stays while `num_ahead` tokens after it are the same.
        """
        num_same = request.start + num_equal(self.tokens[request.start :], request.tokens)
        if num_same < len(self.tokens):
            self._truncate(num_same, num_ahead)
        self.tokens += list(request.tokens[num_same - request.start :])

    def _truncate(self, length: int, num_ahead: int) -> None:
        del self.tokens[length:]
        self.chain.truncate(length)
        self.kept.truncate(length - num_ahead)
        self.answer = None
        if self.latest and self.latest[0] >= length - num_ahead:
            self.latest = None


class HeldSessions:
    """All sessions, the least recently used first."""

    def __init__(self, new_keys: Callable[[], KeptKeys], max_bytes: int) -> None:
        self._new_keys = new_keys
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def num_proved(self, key: str, request: DraftRequest) -> int:
        """Return how many tokens are held of a session; 0 if they are others than a request builds on."""
        held = self._held.get(key)
        if held is None:
            return 0
        length = len(held.tokens)
        is_same = length < request.start or held.chain.proves(held.tokens, request.start, request.prefix_digest)
        return length if is_same else 0

    def open(self, key: str) -> HeldSession:
        """Return a session, new if nothing is held of it."""
        if key not in self._held:
            self._held[key] = HeldSession(self._new_keys())
        self._held.move_to_end(key)
        return self._held[key]

    def forget(self, key: str) -> None:
        """Free a session."""
        self._held.pop(key, None)

    def evict(self, in_use: Container[str]) -> None:
        """Free the least recently used sessions while all together take too much, but none that is in use."""
        num_bytes = sum(held.num_bytes for held in self._held.values())
        for key in [name for name in self._held if name not in in_use]:
            if num_bytes <= self._max_bytes:
                return
            num_bytes -= self._held.pop(key).num_bytes
