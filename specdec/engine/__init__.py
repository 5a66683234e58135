"""The batched language model that both workers share, and the thread that owns it."""

from specdec.engine.cache import KvCache
from specdec.engine.contiguous import ContiguousPool
from specdec.engine.errors import CacheFull, CacheMiss, EngineError, ModelRefused, SequenceTooLong
from specdec.engine.feed import Feed, ForwardOutput
from specdec.engine.load import load_language_model
from specdec.engine.loop import EngineLoop, Load, Processor
from specdec.engine.model import LanguageModel
from specdec.engine.pool import LayerShape
from specdec.engine.quantized import Quantization
from specdec.engine.sequence import Sequence
from specdec.engine.task import Submission, Task, TaskState, TaskTimes

__all__ = [
    "CacheFull",
    "CacheMiss",
    "ContiguousPool",
    "EngineError",
    "EngineLoop",
    "Feed",
    "ForwardOutput",
    "KvCache",
    "LanguageModel",
    "LayerShape",
    "Load",
    "ModelRefused",
    "Processor",
    "Quantization",
    "Sequence",
    "SequenceTooLong",
    "Submission",
    "Task",
    "TaskState",
    "TaskTimes",
    "load_language_model",
]
