"""The errors of specdec and the one table that turns them into gRPC status codes and back.

    SpecdecError
    ├── InvalidArgumentError    a field is wrong; says which, its value and what would be right
    ├── NotFoundError           no such session, or not yours (indistinguishable)
    ├── AlreadyExistsError      the request_id was used with other parameters
    ├── FencedError             another coordinator owns the session now
    ├── ModelMismatchError           draft and target, or model and request, do not fit
    ├── NonFiniteLogitsError       the model's distribution for this session holds NaN or infinity
    ├── OverloadedError         no room now; says when to come back
    ├── UnavailableError        loading, draining, or a part is gone; says when to come back
    ├── DataLossError           the store went back in time
    └── InternalError           a bug of ours; its text stays in the log

Every status carries an ErrorInfo; InvalidArgumentError adds BadRequest, OverloadedError and UnavailableError add RetryInfo.
"""

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "specdec"
BROKEN_CALL_CODES = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)


class SpecdecError(Exception):
    """Base of all errors that a caller of specdec may see."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def details(self) -> Sequence[Message]:
        """Return the google.rpc details beside ErrorInfo."""
        return ()


class InvalidArgumentError(SpecdecError):
    """A field is wrong. `violations` maps field paths to what is wrong with each."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"

    def __init__(self, violations: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field} {problem}" for field, problem in violations.items()))
        self.violations = dict(violations)

    def details(self) -> Sequence[Message]:
        """Return one violation a field."""
        violation = error_details_pb2.BadRequest.FieldViolation
        fields = [violation(field=field, description=problem) for field, problem in self.violations.items()]
        return (error_details_pb2.BadRequest(field_violations=fields),)


class NotFoundError(SpecdecError):
    """There is no such session, or it is not the caller's."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SESSION_NOT_FOUND"


class AlreadyExistsError(SpecdecError):
    """The request_id belongs to a session with other parameters."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_REUSED"


class FencedError(SpecdecError):
    """A higher epoch owns the session."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_FENCED"


class ModelMismatchError(SpecdecError):
    """Two parts do not fit together, and retrying will not change that."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MODEL_MISMATCH"


class NonFiniteLogitsError(SpecdecError):
    """The model gave NaN or infinity for this session."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NON_FINITE_LOGITS"


class _Retryable(SpecdecError):
    def __init__(self, message: str, retry_after_s: float = 1.0, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.retry_after_s = retry_after_s

    def details(self) -> Sequence[Message]:
        """Say when to try again."""
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_after_s * 1e9))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class OverloadedError(_Retryable):
    """There is no room for this now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class UnavailableError(_Retryable):
    """A part is loading, draining or gone."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DataLossError(SpecdecError):
    """The store holds less than, or other than, what a client was shown."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "STORE_ROLLED_BACK"


class InternalError(SpecdecError):
    """A bug of ours. The message is fixed: what happened is in the log, not on the wire."""

    def __init__(self) -> None:
        super().__init__("an error inside the server; its log has the cause")


ERRORS: tuple[type[SpecdecError], ...] = (
    InvalidArgumentError,
    NotFoundError,
    AlreadyExistsError,
    FencedError,
    ModelMismatchError,
    NonFiniteLogitsError,
    OverloadedError,
    UnavailableError,
    DataLossError,
    InternalError,
)


def from_rpc_error(error: grpc.aio.AioRpcError) -> SpecdecError:
    """Return the error that the other side raised; library errors become the kind that has their code."""
    info, violations, retry_after_s = _read_details(error)
    kind = next((kind for kind in ERRORS if kind.reason == info.reason), None) or _kind_of_code(error.code())
    result = _rebuilt(kind, error.details() or error.code().name, violations, retry_after_s)
    result.metadata |= info.metadata
    return result


def _rebuilt(
    kind: type[SpecdecError], message: str, violations: Mapping[str, str], retry_after_s: float
) -> SpecdecError:
    if issubclass(kind, InvalidArgumentError):
        return kind(violations or {"request:": message})
    if issubclass(kind, _Retryable):
        return kind(message, retry_after_s)
    return kind() if kind is InternalError else kind(message)


def _kind_of_code(code: grpc.StatusCode) -> type[SpecdecError]:
    """Calls that ran out of time or were cut off can be made again; the rest follow the table.

    Our own INTERNAL has an ErrorInfo; one without is how the library reports a connection that broke.
    """
    if code in BROKEN_CALL_CODES:
        return UnavailableError
    return next((kind for kind in ERRORS if kind.code == code and kind is not NonFiniteLogitsError), InternalError)


def _read_details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, dict[str, str], float]:
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode()).details:
                for message in (info, bad, retry):
                    packed.Unpack(message)
    violations = {entry.field: entry.description for entry in bad.field_violations}
    return info, violations, retry.retry_delay.ToNanoseconds() / 1e9 or 1.0
