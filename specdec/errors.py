"""The errors of specdec, and the one table between them and gRPC status codes.

    SpecdecError                 sent as (reason)                          also: codes of others that mean it
    ├── InvalidArgumentError     INVALID_ARGUMENT                          OUT_OF_RANGE
    ├── NotFoundError            NOT_FOUND (SESSION_NOT_FOUND)
    ├── AlreadyExistsError       ALREADY_EXISTS (REQUEST_ID_REUSED)
    ├── FencedError              ABORTED (SESSION_FENCED)
    ├── ModelMismatchError       FAILED_PRECONDITION (MODEL_MISMATCH)      UNIMPLEMENTED
    ├── ContextTooShortError     FAILED_PRECONDITION (CONTEXT_TOO_SHORT)
    ├── NonFiniteLogitsError     FAILED_PRECONDITION (NON_FINITE_LOGITS)
    ├── UnauthenticatedError     UNAUTHENTICATED
    ├── PermissionDeniedError    PERMISSION_DENIED
    ├── OverloadedError          RESOURCE_EXHAUSTED (OVERLOADED)
    ├── UnavailableError         UNAVAILABLE                               CANCELLED, UNKNOWN, INTERNAL
    │   └── DeadlineExceededError  DEADLINE_EXCEEDED
    ├── DataLossError            DATA_LOSS (STORE_ROLLED_BACK)
    └── InternalError            INTERNAL

Each class states its row: `code`, `reason`, `foreign_codes`. Every status that a specdec server sends carries an
ErrorInfo with the reason, and the reason decides which class it becomes. A status without one was made by grpc itself
or by a proxy, and its code decides: a broken connection gives any of the codes in the row of UnavailableError.
InvalidArgumentError also carries BadRequest, OverloadedError and UnavailableError carry RetryInfo.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "specdec"
STATUS_DETAILS_KEY = "grpc-status-details-bin"


class SpecdecError(Exception):
    """Base of all errors that a caller of specdec may see.

    `message` is the sentence, `metadata` facts about it as texts.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    foreign_codes: ClassVar[tuple[grpc.StatusCode, ...]] = ()  # what grpc and proxies send for it, besides `code`

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}

    @property
    def is_retryable(self) -> bool:
        """Return whether the same call can succeed later."""
        return False

    def details(self) -> Sequence[Message]:
        """Return the google.rpc details besides ErrorInfo."""
        return ()


class InvalidArgumentError(SpecdecError, ValueError):
    """A field is wrong; also a ValueError.

    `violations` maps field paths to what is wrong with each; it is empty if the status names no field.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"
    foreign_codes = (grpc.StatusCode.OUT_OF_RANGE,)

    def __init__(self, violations: Mapping[str, str], message: str | None = None) -> None:
        super().__init__(message or "; ".join(f"{field} {problem}" for field, problem in violations.items()))
        self.violations = dict(violations)

    def details(self) -> Sequence[Message]:
        """Return one violation for each field."""
        violation = error_details_pb2.BadRequest.FieldViolation
        fields = [violation(field=field, description=problem) for field, problem in self.violations.items()]
        return (error_details_pb2.BadRequest(field_violations=fields),)


class NotFoundError(SpecdecError):
    """There is no such session, or it is not the caller's (indistinguishable)."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SESSION_NOT_FOUND"


class AlreadyExistsError(SpecdecError):
    """The request_id belongs to a session with other parameters."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_REUSED"


class FencedError(SpecdecError):
    """A higher epoch owns the session: another coordinator, which Resume finds."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_FENCED"

    @property
    def is_retryable(self) -> bool:
        """Say that the session continues elsewhere."""
        return True


class ModelMismatchError(SpecdecError):
    """Two parts do not fit together: draft and target, model and request, client and server."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MODEL_MISMATCH"
    foreign_codes = (grpc.StatusCode.UNIMPLEMENTED,)


class ContextTooShortError(SpecdecError):
    """The session's text is too long for this worker; another worker of the same model may have more room."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONTEXT_TOO_SHORT"


class NonFiniteLogitsError(SpecdecError):
    """The model gave NaN or infinity for this session."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NON_FINITE_LOGITS"


class UnauthenticatedError(SpecdecError):
    """The call carries no credentials, or invalid ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(SpecdecError):
    """The caller is known and not allowed to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class _LaterError(SpecdecError):
    """An error that passes. `retry_after_s` is the pause that the server asks for, None where it named none."""

    def __init__(self, message: str, retry_after_s: float | None = 1.0, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.retry_after_s = retry_after_s

    @property
    def is_retryable(self) -> bool:
        """Say that it passes."""
        return True

    def details(self) -> Sequence[Message]:
        """Return when to try again."""
        if self.retry_after_s is None:
            return ()
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_after_s * 1e9))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class OverloadedError(_LaterError):
    """There is no room for this now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"

    @property
    def is_retryable(self) -> bool:
        """Whether the server named a pause: grpc's own RESOURCE_EXHAUSTED (a message too large) does not pass."""
        return self.retry_after_s is not None


class UnavailableError(_LaterError):
    """A part is loading, draining or gone, or the connection broke."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    foreign_codes: ClassVar[tuple[grpc.StatusCode, ...]] = (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    )


class DeadlineExceededError(UnavailableError):
    """The call did not end in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
    foreign_codes = ()


class DataLossError(SpecdecError):
    """The store holds less than, or other than, what a client was shown."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "STORE_ROLLED_BACK"


class InternalError(SpecdecError):
    """A bug of ours. The message is fixed: what happened is in the log, not on the wire."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self) -> None:
        super().__init__("an error inside the server; its log has the cause")


ERRORS: tuple[type[SpecdecError], ...] = (
    InvalidArgumentError,
    NotFoundError,
    AlreadyExistsError,
    FencedError,
    ModelMismatchError,
    ContextTooShortError,
    NonFiniteLogitsError,
    UnauthenticatedError,
    PermissionDeniedError,
    OverloadedError,
    UnavailableError,
    DeadlineExceededError,
    DataLossError,
    InternalError,
)
_BY_REASON = {kind.reason: kind for kind in ERRORS}
# of two classes with one code the first is meant; foreign codes win, as INTERNAL without a reason is grpc's own
_BY_CODE = {kind.code: kind for kind in reversed(ERRORS)} | {
    code: kind for kind in ERRORS for code in kind.foreign_codes
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> SpecdecError:
    """Return the error that a status means: by its reason where a specdec server sent it, else by its code."""
    details = _details(error)
    kind = _BY_REASON.get(details.info.reason) if details.is_ours else None
    kind = kind or _BY_CODE.get(error.code(), InternalError)
    result = _rebuilt(kind, error.details() or error.code().name, details)
    result.metadata |= details.info.metadata
    return result


def is_from_server(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a specdec server sent this status, as against grpc itself or a proxy."""
    return _details(error).is_ours


def _rebuilt(kind: type[SpecdecError], message: str, details: "_Details") -> SpecdecError:
    if issubclass(kind, InvalidArgumentError):
        return kind({entry.field: entry.description for entry in details.bad.field_violations}, message)
    if issubclass(kind, _LaterError):
        return kind(message, details.retry_after_s)
    return kind() if kind is InternalError else kind(message)


class _Details:
    """The google.rpc details of a status. What cannot be decoded counts as absent: proxies may send anything."""

    def __init__(self) -> None:
        self.info = error_details_pb2.ErrorInfo()
        self.bad = error_details_pb2.BadRequest()
        self.retry = error_details_pb2.RetryInfo()

    @property
    def is_ours(self) -> bool:
        """Return whether a specdec server sent the status."""
        return str(self.info.domain) == DOMAIN

    @property
    def retry_after_s(self) -> float | None:
        """Return the pause that the server asks for, at least 0; None if it asks for none."""
        if not self.retry.HasField("retry_delay"):
            return None
        return max(0.0, float(self.retry.retry_delay.ToNanoseconds() / 1e9))

    def read(self, packed: any_pb2.Any) -> None:
        """Take in one detail; unknown kinds are left out."""
        for message in (self.info, self.bad, self.retry):
            if packed.Is(message.DESCRIPTOR):
                message.MergeFrom(type(message).FromString(packed.value))


def _details(error: grpc.aio.AioRpcError) -> _Details:
    result = _Details()
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
                for packed in status.details:
                    result.read(packed)
            except DecodeError:
                return _Details()
    return result
