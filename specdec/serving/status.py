"""Errors to gRPC statuses with google.rpc details."""

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.errors import DOMAIN, SpecdecError


def to_status(error: SpecdecError) -> grpc.Status:
    """Return the status to abort a call with."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in (info, *error.details()):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    result: grpc.Status = rpc_status.to_status(status)
    return result
