"""The public names of `specdec`, which imports them from here on first use."""

from specdec.client import AsyncClient
from specdec.completion import Chunk, Completion, Finish, ServedModel, Session, SessionStatus, Usage
from specdec.errors import (
    AlreadyExistsError,
    ContextTooShortError,
    DataLossError,
    DeadlineExceededError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    ModelMismatchError,
    NonFiniteLogitsError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    SpecdecError,
    UnauthenticatedError,
    UnavailableError,
)
from specdec.request import ChatMessage
from specdec.retry import Retry
from specdec.stream import AsyncStream
from specdec.sync_client import Client, Stream
from specdec.tls import TlsFiles
from specdec.types import (
    AcceptanceRuleName,
    DetachedPolicy,
    FinishReason,
    ModelInfo,
    RoundDraft,
    SamplingParams,
    SpeculationParams,
    Statistics,
    TokenLogprobs,
    TokenOrigin,
)

__all__ = [
    "AcceptanceRuleName",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Chunk",
    "Client",
    "Completion",
    "ContextTooShortError",
    "DataLossError",
    "DeadlineExceededError",
    "DetachedPolicy",
    "FencedError",
    "Finish",
    "FinishReason",
    "InternalError",
    "InvalidArgumentError",
    "ModelInfo",
    "ModelMismatchError",
    "NonFiniteLogitsError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "Retry",
    "RoundDraft",
    "SamplingParams",
    "ServedModel",
    "Session",
    "SessionStatus",
    "SpecdecError",
    "SpeculationParams",
    "Statistics",
    "Stream",
    "TlsFiles",
    "TokenLogprobs",
    "TokenOrigin",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
