"""Errors to gRPC statuses with google.rpc details."""

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.errors import DOMAIN, SpecdecError

# a client takes 8 KiB of metadata; it gets the message twice, and each violation once more
MAX_MESSAGE_CHARACTERS = 1024
MAX_VIOLATION_CHARACTERS = 256


def to_status(error: SpecdecError) -> grpc.Status:
    """Return the status to abort a call with."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = status_pb2.Status(code=error.code.value[0], message=_shortened(error.message, MAX_MESSAGE_CHARACTERS))
    for detail in (info, *error.details()):
        if isinstance(detail, error_details_pb2.BadRequest):
            _shorten_violations(detail)
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    result: grpc.Status = rpc_status.to_status(status)
    return result


def _shorten_violations(bad: error_details_pb2.BadRequest) -> None:
    for violation in bad.field_violations:
        violation.description = _shortened(violation.description, MAX_VIOLATION_CHARACTERS)


def _shortened(text: str, maximum: int) -> str:
    return text if len(text) <= maximum else f"{text[: maximum - 3]}..."
