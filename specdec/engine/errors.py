"""The engine's errors.

    EngineError
    ├── ModelRefused       the model cannot be served exactly; the message names the value, why, and the remedy
    ├── CacheFull          the KV cache has no room, even after evicting every idle sequence
    └── SequenceTooLong    a sequence would pass the model's context length
"""


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class ModelRefused(EngineError):
    """The model cannot be loaded, or cannot be served exactly."""


class CacheFull(EngineError):
    """The KV cache has no room for the tokens."""


class SequenceTooLong(EngineError):
    """The sequence would pass the model's context length."""
