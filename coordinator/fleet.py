"""The status of the workers that a coordinator uses: what it knows of each, and what each says about itself."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from coordinator.pool.breaker import WorkerState
from coordinator.pool.pool import WorkerPool
from coordinator.pool.worker import Worker
from specdec.v1 import status_pb2, status_pb2_grpc

ASK_S = 3.0  # for a worker's status
MAX_REASON_CHARACTERS = 200
_STATES = {
    WorkerState.IN_SERVICE: status_pb2.WORKER_STATE_IN_SERVICE,
    WorkerState.ON_TRIAL: status_pb2.WORKER_STATE_ON_TRIAL,
    WorkerState.OUT: status_pb2.WORKER_STATE_OUT,
}


async def worker_statuses(pools: Mapping[str, WorkerPool[Any]]) -> Sequence[status_pb2.ProcessStatus]:
    """Return the status of all workers, by kind; one that does not answer soon has no samples."""
    workers = [(kind, worker) for kind, pool in pools.items() for worker in pool.workers.values()]
    return await asyncio.gather(*(_status(kind, worker) for kind, worker in workers))


async def _status(kind: str, worker: Worker[Any]) -> status_pb2.ProcessStatus:
    state = _STATES[worker.state] if worker.is_listed else status_pb2.WORKER_STATE_LEAVING
    return status_pb2.ProcessStatus(
        kind=kind,
        address=worker.address,
        state=state,
        reason=worker.failure.message[:MAX_REASON_CHARACTERS] if worker.failure else "",
        num_streams=worker.num_streams,
        samples=await _samples(worker) if worker.state is not WorkerState.OUT else (),
    )


async def _samples(worker: Worker[Any]) -> Sequence[status_pb2.Sample]:
    stub = status_pb2_grpc.StatusServiceStub(worker.channel)
    try:
        answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=ASK_S)
    except grpc.aio.AioRpcError:
        return ()  # its state is the coordinator's to judge, by probes and rounds
    return list(answer.processes[0].samples) if answer.processes else ()
