"""The processes that share one model's weights, and the messages that the leader sends to the others.

Messages go by gloo over TCP, also where the model's own sums go by NCCL from GPU to GPU: a follower may wait for the
next one as long as the leader lives. A process that dies closes its connections, and the others find out at once.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from specdec.engine.errors import EngineError, ModelRefused

RENDEZVOUS_VARIABLE = "TENSOR_PARALLEL_RENDEZVOUS"  # set by a worker that starts its own followers
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # else both listen where others can connect
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FRAME_BYTES = 4096  # of a message that is sent at once, with its length; a round of 16 sessions fits
LENGTH_BYTES = 8
LOADING = timedelta(hours=2)  # until the slowest process has read its weights, as transformers allows
WAITING = timedelta(days=3650)  # a follower waits as long as nobody asks for anything


class GroupLost(EngineError):
    """Another process of the group has ended, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among those that share a model."""

    rank: int  # 0 leads
    size: int
    device_index: int  # of its GPU on this machine
    rendezvous: str  # the URL by which the processes find each other, as torch.distributed takes it
    is_local: bool = True  # all processes are on this machine


def place_in(environment: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher such as torchrun gave this process; None where it is alone."""
    values = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(value.isdecimal() for value in values) or int(values[1]) < 2:
        return None
    rank, size, device_index = map(int, values)
    is_local = environment.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
    return Place(rank, size, device_index, environment.get(RENDEZVOUS_VARIABLE, "env://"), is_local)


class Group:
    """This process among those that share a model. Use it on one thread at a time.

    Raises ModelRefused where torch cannot connect processes, GroupLost where the others do not come.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        _check_backends(device)
        if not place.is_local:
            raise ModelRefused(
                "processes on several machines cannot share a model: nothing protects what they exchange"
            )
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, LOOPBACK)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(
                backend, init_method=place.rendezvous, rank=place.rank, world_size=place.size, timeout=LOADING
            )
            self._messages = distributed.new_group(backend="gloo", timeout=WAITING)
        except RuntimeError as error:
            raise GroupLost(f"{place.size} processes did not find each other: {error}") from error

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others. Raises GroupLost."""
        frame = len(message).to_bytes(LENGTH_BYTES, "little") + message
        self._broadcast(torch.frombuffer(bytearray(frame[:FRAME_BYTES].ljust(FRAME_BYTES)), dtype=torch.uint8))
        if len(frame) > FRAME_BYTES:
            self._broadcast(torch.frombuffer(bytearray(frame[FRAME_BYTES:]), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Return the leader's next message. Raises GroupLost."""
        frame = self._broadcast(torch.empty(FRAME_BYTES, dtype=torch.uint8))
        num_bytes = LENGTH_BYTES + int.from_bytes(frame[:LENGTH_BYTES], "little")
        if num_bytes > FRAME_BYTES:
            frame += self._broadcast(torch.empty(num_bytes - FRAME_BYTES, dtype=torch.uint8))
        return frame[LENGTH_BYTES:num_bytes]

    def _broadcast(self, buffer: torch.Tensor) -> bytes:
        try:
            distributed.broadcast(buffer, src=0, group=self._messages)
        except RuntimeError as error:
            raise GroupLost("a process that shares the model has ended; its log has the cause") from error
        return buffer.numpy().tobytes()

    def check_equal(self, number: int, what: str) -> None:
        """Raise ModelRefused where the processes have different numbers."""
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.place.size)]
        distributed.all_gather(numbers, torch.tensor([number]), group=self._messages)
        found = [int(each) for each in numbers]
        if len(set(found)) > 1:
            raise ModelRefused(f"the processes have {found} {what}; start all of them with the same settings")

    def close(self) -> None:
        """Leave the group; nothing can be sent any more."""
        distributed.destroy_process_group()


def _check_backends(device: torch.device) -> None:
    """Raise ModelRefused where this torch lacks what connects processes."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ModelRefused("this torch cannot connect processes (it has no gloo); install one that can")
    if device.type == "cuda" and not distributed.is_nccl_available():
        raise ModelRefused("this torch cannot connect GPUs (it has no NCCL); install one that can")
