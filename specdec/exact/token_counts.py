"""How often each token is in a session's text, for penalties: a round counts its own tokens, not the text again."""

from array import array
from collections.abc import Sequence

import numpy as np

from specdec.exact.prefix import num_equal


class TokenCounts:
    """The counts of one session's committed text. Not thread-safe."""

    def __init__(self) -> None:
        self._text = array("I")
        self._num_prompt = 0
        self._times = np.zeros(0, np.int64)  # [V], in prompt and completion
        self._completion_times = np.zeros(0, np.float32)  # [V]
        self._is_listed = np.zeros(0, np.bool_)  # [V], in `_ids`
        self._ids = array("q")  # of all tokens that were ever seen, each once
        self._counted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # as `counted` returns it

    def update(self, start: int, tokens: Sequence[int], length: int, num_prompt_tokens: int) -> "TokenCounts":
        """Count the first `length` of `tokens`, of which the first `num_prompt_tokens` are the prompt; return self.

        Those before `start` are known to be as they were, as far as they were counted.
        """
        if num_prompt_tokens != self._num_prompt:
            self._add(0, -1)
            del self._text[:]
            self._num_prompt = num_prompt_tokens
        known = min(start, length, len(self._text))
        new = tokens[known:length]
        kept = known + num_equal(self._text[known:], new)
        self._add(kept, -1)
        del self._text[kept:]
        self._text.extend(new[kept - known :])
        self._add(kept, 1)
        return self

    def counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token ids, how often each was seen at all, int64, and in the completion, float32; each [N].

        Tokens that are not among them were not seen. Do not change the arrays.
        """
        if self._counted is None:
            ids = np.array(self._ids, np.int64)
            self._counted = ids, self._times[ids], self._completion_times[ids]
        return self._counted

    def arrays(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each token was seen at all, int64 [V], and in the completion, float32 [V]."""
        self._grow(vocab_size)
        return self._times[:vocab_size], self._completion_times[:vocab_size]

    @property
    def num_distinct(self) -> int:
        """How many tokens `counted` has."""
        return len(self._ids)

    def times_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each of these tokens was seen at all, and in the completion."""
        self._grow(int(ids.max(initial=-1)) + 1)
        return self._times[ids], self._completion_times[ids]

    def _add(self, begin: int, count: int) -> None:
        """Add `count` for each token of the text from `begin` on."""
        tokens = np.array(self._text[begin:], np.int64)
        if not len(tokens):
            return
        self._counted = None
        self._grow(int(tokens.max()) + 1)
        if count > 0:
            distinct = np.unique(tokens)
            self._ids.extend(distinct[~self._is_listed[distinct]].tolist())
            self._is_listed[distinct] = True
        np.add.at(self._times, tokens, count)
        completion = tokens[max(0, self._num_prompt - begin) :]
        np.add.at(self._completion_times, completion, np.float32(count))

    def _grow(self, size: int) -> None:
        missing = max(size, 2 * len(self._times)) - len(self._times) if size > len(self._times) else 0
        if missing:
            self._times = np.pad(self._times, (0, missing))
            self._completion_times = np.pad(self._completion_times, (0, missing))
            self._is_listed = np.pad(self._is_listed, (0, missing))
