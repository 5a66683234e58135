"""The engine's errors.

EngineError
├── ModelRefused       the model cannot be served exactly; the message names the value, why, and the remedy
├── CacheFull          the KV cache has no room, even after evicting every idle sequence
├── Abandoned          nobody awaits the task any more
├── CacheMiss          a sequence holds fewer tokens than the task builds on; carries how many
└── SequenceTooLong    a sequence would pass the model's context length
"""

import traceback
from pathlib import Path


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class ModelRefused(EngineError):
    """The model cannot be loaded, or cannot be served exactly."""


class CacheFull(EngineError):
    """The KV cache has no room for the tokens."""


class Abandoned(EngineError):
    """Nobody awaits the task any more."""


class CacheMiss(EngineError):
    """The sequence holds only `cached_len` tokens; repeat the task from there."""

    def __init__(self, cached_len: int, start: int) -> None:
        super().__init__(f"{cached_len} tokens are cached, fewer than the {start} to build on; start from there")
        self.cached_len = cached_len


class SequenceTooLong(EngineError):
    """The sequence would pass the model's context length."""


def where_raised(error: BaseException) -> str:
    """Return the file and line that raised `error`, for logs: a message may hold tokens, a place does not."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
