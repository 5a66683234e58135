"""What services in this process hold of sessions: objects, tasks, places in caches, keys in the store."""

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass

from redis.asyncio import Redis

from coordinator.admission import Ticket
from coordinator.generation import Generation
from coordinator.running import RunningGeneration
from coordinator.streams import WorkerStream
from specdec.engine.residency import Residency
from specdec.serving.session_stream import Claim, SessionRounds, SessionStream

OF_SESSIONS = (Ticket, Generation, RunningGeneration, WorkerStream, SessionRounds, SessionStream, Claim)
SETTLE_S = 60.0  # sessions expire after 10 s; the rest is for a busy machine


@dataclass(frozen=True, slots=True)
class Census:
    """Counts, by kind; what is zero is left out."""

    objects: Counter[str]
    tasks: Counter[str]
    num_keys: int

    def more_than(self, before: "Census") -> list[str]:
        """Return a sentence for each kind of which there is more than there was."""
        counted = [*(self.objects - before.objects).items(), *(self.tasks - before.tasks).items()]
        more = [f"{count} {kind} more than before" for kind, count in counted]
        return [*more, f"{self.num_keys} keys in the store"] if self.num_keys > before.num_keys else more


async def census(redis_url: str) -> Census:
    """Count."""
    gc.collect()
    objects, places = Counter[str](), 0
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: that asks objects, and some of torch's warn of it
        if issubclass(kind, OF_SESSIONS):
            objects[kind.__name__] += 1
        elif kind is Residency:
            # one without a round makes room as soon as others wait, at the latest two seconds later
            places += sum(resident.sequence.num_pins > 0 for resident in thing._residents.values())
            places += len(thing._had_turn)
    objects["places in a cache that nobody else can have"] = places
    kinds = [_kind(task) for task in asyncio.all_tasks()]
    tasks = Counter(kind for kind in kinds if "Connection." not in kind)  # redis-py's, for a moment at each call
    async with Redis.from_url(redis_url) as redis:
        keys = [key async for key in redis.scan_iter("specdec:{*")]
    return Census(objects, tasks, len(keys))


async def settled(redis_url: str, before: Census) -> list[str]:
    """Wait until there is no more than there was; return what there still is after SETTLE_S."""
    more: list[str] = []
    for _ in range(int(SETTLE_S)):
        more = (await census(redis_url)).more_than(before)
        if not more:
            break
        await asyncio.sleep(1.0)
    return more


def _kind(task: "asyncio.Task[object]") -> str:
    """Return what a task does: its name without a session's or a number of its own."""
    name = task.get_name()
    return (
        f"task {getattr(task.get_coro(), '__qualname__', '?')}"
        if name.startswith("Task-")
        else f"task {name.split()[0]}"
    )
