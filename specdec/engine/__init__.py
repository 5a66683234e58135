"""The batched language model that both workers share, and the thread that owns it."""

from specdec.engine.errors import CacheFull, EngineError, ModelRefused, SequenceTooLong
from specdec.engine.kv import KvCache, Sequence
from specdec.engine.model import Feed, LanguageModel

__all__ = ["CacheFull", "EngineError", "Feed", "KvCache", "LanguageModel", "ModelRefused", "Sequence", "SequenceTooLong"]
