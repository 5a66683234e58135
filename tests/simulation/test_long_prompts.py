"""A prompt that takes a worker longer to read than a round is waited for: attempt after attempt reads on."""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from coordinator.session_ids import SessionIds
from specdec.completion import Chunk, Transcript
from specdec.connection import Connection
from specdec.request import generate_request, prompt_request
from specdec.retry import RetryPolicy
from specdec.serving.security.caller import NO_TENANT
from specdec.types import SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2
from tests.simulation.cluster import TARGET, Cluster
from tests.simulation.engine import VOCAB_SIZE
from tests.simulation.ledger import Ledger, Trace
from tests.simulation.loop import Process, VirtualLoop, virtual_loop
from tests.simulation.network import Network
from tests.simulation.store import SECRET, SimulatedRedis, virtual_wall_clock

PROMPT = [token * token % VOCAB_SIZE for token in range(640)]  # ten forwards
CHUNK_TOKENS, STEP_S = 64, 0.5
NUM_NEW = 32
ADDRESS = "coordinators of store"


def followed(work: Coroutine[Any, Any, None]) -> None:
    """Run in virtual time."""
    loop = VirtualLoop()
    with virtual_wall_clock(loop.time):
        loop.run_until_complete(work)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(60.0))
    loop.close()


class World:
    """Two coordinators, a target worker and a draft worker, slow at reading."""

    def __init__(self, score_timeout_s: float = 60.0, num_coordinators: int = 1) -> None:
        self.trace = Trace(lambda: virtual_loop().time())
        self.ledger = Ledger(self.trace)
        store = SimulatedRedis(random.Random(1), on_change=self.ledger.store_changed)
        self.cluster = Cluster(
            random.Random(2), Network(random.Random(3), on_bug=self.ledger.violated), self.trace, self.ledger, [store]
        )
        self.cluster.step_s, self.cluster.prefill_chunk_tokens = STEP_S, CHUNK_TOKENS
        self.cluster.score_timeout_s = score_timeout_s
        for number in range(num_coordinators):
            self.cluster.add(f"coordinator-{number + 1}", self.cluster.coordinator(store, ADDRESS))
        self.cluster.add("target-1", self.cluster.target())
        self.cluster.add("draft-1", self.cluster.draft())

    async def started(self) -> None:
        await asyncio.gather(*(self.cluster.start(name) for name in self.cluster.names()))

    async def generate(self) -> list[Chunk]:
        """Follow one session to its end; greedy, three draft tokens a round."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW)
        request = generate_request(
            prompt_request(None, PROMPT), sampling, SpeculationParams(num_draft_tokens=3), "long prompt"
        )
        session_id = SessionIds(SECRET).of_request(NO_TENANT, request.request_id).public
        self.ledger.expect("store", session_id, PROMPT, [TARGET.greedy(PROMPT, NUM_NEW)])
        client = Process("client")
        return await client.spawn(self._follow(client, request))

    async def _follow(self, client: Process, request: generation_pb2.GenerateRequest) -> list[Chunk]:
        channel: Any = self.cluster.network.channel(ADDRESS)
        connection = Connection(
            ADDRESS,
            open_channel=lambda _: channel,
            closes_channel=False,
            metadata=(),
            policy=RetryPolicy(),
            connect_timeout_s=1000.0,
            outside=self.cluster.outside,
        )
        chunks = [chunk async for chunk in connection.follow(request, Transcript(), 1000.0)]
        for chunk in chunks:
            self.ledger.observed("store", client, channel.server, chunk)
        return chunks

    def num_fed(self, name: str) -> int:
        """Return how many tokens a worker has read."""
        return self.cluster.models[name].num_fed


def test_draft_worker_reads_a_long_prompt_in_several_attempts() -> None:
    async def run() -> None:
        world = World()
        await world.started()
        chunks = await world.generate()
        assert chunks[-1].finish
        assert chunks[-1].finish.statistics.num_accepted_tokens > 0
        assert world.num_fed("draft-1") < 1.5 * len(PROMPT)
        assert world.ledger.violations == []

    followed(run())


def test_target_worker_reads_a_long_prompt_in_several_attempts() -> None:
    async def run() -> None:
        world = World(score_timeout_s=1.0)
        await world.started()
        await world.generate()
        assert world.num_fed("target-1") < 1.5 * len(PROMPT)
        assert world.ledger.violations == []

    followed(run())


def test_coordinator_that_takes_over_goes_on_with_what_was_read() -> None:
    async def run() -> None:
        world = World(num_coordinators=2)
        await world.started()
        generating = asyncio.ensure_future(world.generate())
        while world.num_fed("target-1") < len(PROMPT) / 2:  # noqa: ASYNC110  # workers send no events
            await asyncio.sleep(STEP_S / 5)
        (owner,) = [name for name, running in world.cluster.running.items() if len(running)]
        world.cluster.kill(owner)
        with suppress(asyncio.CancelledError):
            await generating
        assert world.num_fed("target-1") < 1.5 * len(PROMPT)
        assert world.ledger.violations == []

    followed(run())
