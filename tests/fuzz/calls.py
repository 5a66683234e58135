"""Hostile calls of one service, and how each of them ended."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.channel import open_channel
from tests.fuzz.mutation import all_mutated
from tests.fuzz.scripts import Leaving, Script, Seen

NUM_CALLERS = 8
CALLS_PER_CHANNEL = 300
HANGS_S = 60.0  # no call here takes a second on an idle machine
STAY_S = 0.05
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
# what grpc at this end says when the other one ended the call while this one wrote; what a server fails with it logs
ENDED_EARLY = "Internal error from Core"

MakeScript = Callable[[random.Random, Seen], Script]


@dataclass(slots=True)
class Endings:
    """How calls ended, by method and status, and those that must not have."""

    codes: Counter[str] = field(default_factory=Counter)
    num_messages: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, script: Script, sent: list[bytes], code: grpc.StatusCode, details: str) -> None:
        """Count a call; keep what repeats one that failed inside the server, or hung."""
        name = script.method.rpartition("/")[2]
        is_early = details == ENDED_EARLY
        self.codes[f"{name} {'ended early' if is_early else code.name}"] += 1
        if code in NEVER and not is_early:
            repeat = " ".join(data[:2000].hex() or "(empty)" for data in sent)
            self.wrong.append(f"{name} ended with {code.name} ({details}) after the messages {repeat}")


async def call_all(address: str, make: MakeScript, num_messages: int, seed: int) -> Endings:
    """Send so many mutated messages to a service, some calls at a time."""
    endings, seen = Endings(), Seen()
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CALLERS):
            rng = random.Random(f"{seed} {number}")
            group.create_task(_call_often(address, make, rng, seen, endings, num_messages))
    return endings


async def _call_often(
    address: str, make: MakeScript, rng: random.Random, seen: Seen, endings: Endings, num_messages: int
) -> None:
    while endings.num_messages < num_messages:
        async with open_channel(address) as channel:
            for _ in range(CALLS_PER_CHANNEL):
                if endings.num_messages >= num_messages:
                    return
                script = make(rng, seen)
                sent = all_mutated(rng, script.messages)
                endings.num_messages += len(sent)
                endings.note(script, sent, *await _call(channel, script, sent, seen))


async def _call(channel: Any, script: Script, sent: list[bytes], seen: Seen) -> tuple[grpc.StatusCode, str]:
    """Make a call; return its status. CANCELLED: this end left."""
    call = channel.stream_stream(script.method)(timeout=HANGS_S)
    try:
        for data in sent:
            await call.write(data)
        if script.leaving is Leaving.HALF_CLOSE:
            await call.done_writing()
        elif script.leaving is Leaving.STAY:
            reading = asyncio.ensure_future(call.read())
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())  # its status says it
            await asyncio.wait([reading], timeout=STAY_S)
        if script.leaving is not Leaving.HALF_CLOSE:
            call.cancel()
        while (answer := await call.read()) is not grpc.aio.EOF:
            seen.note(script.method, answer)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # its status says why
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # it is this task
            raise
    return await call.code(), await call.details() or ""
