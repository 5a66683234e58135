"""The workers' models and engine: the real schedule and cached tokens, a model of a few numbers, steps in virtual time.

The model's logits are a function of all tokens that its cache holds, so a cache that holds a wrong prefix gives a wrong
text.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specdec.engine import EngineError, EngineLoop, Feed, ForwardOutput, KvCache
from specdec.engine.batch import TaskT
from specdec.exact.tree import path_to
from specdec.outside import Outside
from specdec.types import ModelInfo

OnScored = Callable[[str, tuple[int, ...]], None]
"""Is told a sequence's key and its committed tokens whenever logits after them were asked for."""

VOCAB_SIZE = 8
NUM_STATES = 61
CONTEXT_LENGTH = 1024
BLOCK_TOKENS = 4
TOKENIZER = "toy tokenizer"


class ToyText:
    """A language whose next token depends on all tokens before it, by a number below NUM_STATES."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        logits = np.random.default_rng(seed).normal(0, 2.0, (NUM_STATES, VOCAB_SIZE))
        logits += np.random.default_rng(1000).normal(0, noise, logits.shape)
        self.logits = torch.tensor(logits, dtype=torch.float32)
        self._best: list[int] = self.logits.argmax(-1).tolist()

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy text after a prompt."""
        state, text = state_after(0, prompt), list[int]()
        while len(text) < num_tokens:
            text.append(self._best[state])
            state = state_after(state, text[-1:])
        return text


def state_after(state: int, tokens: Sequence[int]) -> int:
    """Return the language's state after more tokens."""
    for token in tokens:
        state = (state * 7 + token + 1) % NUM_STATES
    return state


class ToyPool:
    """A KV pool that counts blocks and has no contents: the model reads the tokens."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.num_blocks - sum(self._held.values())

    def num_blocks_of(self, key: str) -> int:
        """Return how many blocks a sequence holds."""
        return self._held.get(key, 0)

    def resize(self, key: str, num_blocks: int) -> None:
        """Let a sequence hold so many blocks."""
        self._held[key] = num_blocks
        if not num_blocks:
            del self._held[key]

    def compact(self, key: str, first: int, slots: Sequence[int]) -> None:
        """Do nothing: there are no contents."""


class ToyLanguageModel:
    """The engine's model."""

    def __init__(self, text: ToyText, num_blocks: int, on_scored: OnScored = lambda key, tokens: None) -> None:
        self.text = text
        self._on_scored = on_scored
        self.cache = KvCache(ToyPool(num_blocks))
        self.num_fed = 0  # tokens, of all sessions

    def check(self, feed: Feed) -> None:
        """Raise EngineError for tokens that do not exist."""
        if not all(0 <= token < VOCAB_SIZE for token in feed.tokens):
            raise EngineError("unknown token")
        feed.sequence.check_append(feed.tokens, feed.parents)

    def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
        """Append the feeds' tokens and return the logits of their last rows."""
        when_prepared()
        states = [state for feed in feeds for state in self._states(feed)]
        return ForwardOutput(self.text.logits[states], (None,) * len(feeds))

    def _states(self, feed: Feed) -> list[int]:
        """Return the states at the last rows of a feed."""
        feed.sequence.append(feed.tokens, feed.parents)
        self.num_fed += len(feed.tokens)
        tokens = list(feed.sequence.tokens)
        if feed.num_rows:  # a token that is scored ahead counts as a draft token, and has a row of its own
            length = max(feed.sequence.num_committed, len(tokens) - feed.num_rows + 1)
            self._on_scored(feed.sequence.key, tuple(tokens[:length]))
        num_tree = len(feed.parents)
        first = len(tokens) - feed.num_rows
        base = len(tokens) - num_tree
        root = state_after(0, tokens[:base])
        chain = [state_after(0, tokens[: place + 1]) for place in range(first, base)]
        tree = tokens[base:]
        paths = [path_to(node + 1, feed.parents) for node in range(max(0, first - base), num_tree)]
        return [*chain, *(state_after(root, [tree[node] for node in path]) for path in paths)]


class InlineEngine(EngineLoop[TaskT]):
    """The engine loop, its steps on the event loop in virtual time instead of on a thread."""

    def __init__(
        self,
        model: ToyLanguageModel,
        processor: Any,
        step_s: Callable[[], float],
        outside: Outside,
        prefill_chunk_tokens: int,
    ) -> None:
        super().__init__(model, processor, prefill_chunk_tokens=prefill_chunk_tokens, outside=outside)
        self._step_s = step_s
        self._pumping: asyncio.TimerHandle | None = None
        self._thread = _NoThread()  # type: ignore[assignment]

    async def run(self, task: TaskT) -> Any:
        """Run a task to its end."""
        self._wake()
        return await super().run(task)

    def _call(self, function: Callable[[], None]) -> None:
        super()._call(function)
        self._wake()

    def _wake(self) -> None:
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_later(self._step_s(), self._pump)

    def _pump(self) -> None:
        self._pumping = None
        if not self._inbox.empty():  # with nothing in it and nothing to do the loop would wait, as a thread may
            self._take_arrivals()
        self._step()
        if self._schedule.tasks:
            self._wake()
        else:
            self._tell_ends()  # as the thread does before it waits


class _NoThread:
    """Stands for the engine's thread, which has not ended."""

    def is_alive(self) -> bool:
        """Return True."""
        return True


def described(name: str, fingerprint: str) -> ModelInfo:
    """Return what a worker says about its toy model."""
    return ModelInfo(
        name,
        tokenizer_fingerprint=TOKENIZER,
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        fingerprint=fingerprint,
    )
