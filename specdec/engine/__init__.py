"""The batched language model that both workers share, and the thread that owns it."""

from specdec.engine.errors import CacheFull, CacheMiss, EngineError, ModelRefused, SequenceTooLong
from specdec.engine.kv import KvCache, Sequence
from specdec.engine.loop import Counters, EngineLoop, Load, Processor
from specdec.engine.model import Feed, LanguageModel
from specdec.engine.task import Task, Timings

__all__ = [
    "CacheFull",
    "CacheMiss",
    "Counters",
    "EngineError",
    "EngineLoop",
    "Feed",
    "KvCache",
    "LanguageModel",
    "Load",
    "ModelRefused",
    "Processor",
    "Sequence",
    "SequenceTooLong",
    "Task",
    "Timings",
]
