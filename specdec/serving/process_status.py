"""StatusService: a process's metrics over gRPC, behind the same TLS and gate as its other calls."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY

from specdec.errors import PermissionDeniedError
from specdec.serving.security.caller import NO_TENANT, current_tenant
from specdec.v1 import status_pb2, status_pb2_grpc

OURS = "specdec_"
CREATED = "_created"  # when a counter began, which nobody needs

Others = Callable[[], Awaitable[Sequence[status_pb2.ProcessStatus]]]


async def _nobody() -> Sequence[status_pb2.ProcessStatus]:
    return ()


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Answers for one process of a kind, and for `others` that it asks. `operators` are tenants that may see it."""

    def __init__(self, kind: str, others: Others = _nobody, operators: frozenset[str] = frozenset()) -> None:
        self._kind, self._others, self._operators = kind, others, operators

    async def GetStatus(self, request: status_pb2.GetStatusRequest, context: Any) -> status_pb2.GetStatusResponse:
        """Return the metrics. Raises PermissionDeniedError."""
        tenant = current_tenant()
        if tenant != NO_TENANT and tenant not in self._operators:
            problem = "the status is for operators, and the tenant of this token is none"
            raise PermissionDeniedError(f"{problem}; add it to the coordinator's --operators")
        own = status_pb2.ProcessStatus(kind=self._kind, samples=samples())
        return status_pb2.GetStatusResponse(processes=[own, *await self._others()])


def samples() -> Iterator[status_pb2.Sample]:
    """Give the values of all metrics of ours."""
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(OURS) and not sample.name.endswith(CREATED):
                yield status_pb2.Sample(name=sample.name, labels=sample.labels, value=sample.value)
