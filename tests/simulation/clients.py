"""Clients: the client library's connection, followed chunk by chunk, left and resumed, at any coordinator."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from coordinator.session_ids import SessionIds
from specdec.completion import Transcript
from specdec.connection import Connection
from specdec.errors import SpecdecError
from specdec.request import generate_request, prompt_request
from specdec.retry import Retry, RetryPolicy
from specdec.serving.security.caller import NO_TENANT
from specdec.types import AcceptanceRuleName, DetachedPolicy, FinishReason, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2
from tests.simulation.cluster import Cluster
from tests.simulation.engine import VOCAB_SIZE, ToyText
from tests.simulation.ledger import Ledger
from tests.simulation.loop import Process
from tests.simulation.store import SECRET, SimulatedRedis

TIMEOUT_S = 1000.0  # virtual, a follower's in all


@dataclass(frozen=True, slots=True)
class Wanted:
    """A session that clients ask for."""

    store: SimulatedRedis
    request: generation_pb2.GenerateRequest
    session_id: str

    @property
    def address(self) -> str:
        """Return what the coordinators of its store are known by."""
        return f"coordinators of {self.store.name}"


@dataclass(slots=True)
class Client:
    """Follows one session to its end, in several visits."""

    name: str
    wanted: Wanted
    cluster: Cluster
    ledger: Ledger
    begin_s: float
    visits: list[tuple[int, float]]  # leave after so many chunks, return after so many seconds
    cancels: bool = False  # cancels the session at the end of its first visit
    seen: Transcript = field(default_factory=Transcript)

    async def run(self) -> None:
        """Follow the session to its end, or to an error."""
        process = Process(self.name)
        process.on_death.append(self.ledger.died)
        await process.spawn(self._run(process), name=self.name)
        process.kill()  # it is gone for good

    async def _run(self, process: Process) -> None:
        await asyncio.sleep(self.begin_s)
        try:
            for num_chunks, pause_s in self.visits:
                await self._visit(process, num_chunks)
                await self._cancel()
                self.ledger.trace.note(self.name, f"leaves at {self.seen.end}")
                await asyncio.sleep(pause_s)
            await self._visit(process, None)
            self.ledger.endings["finished"] += 1
        except SpecdecError as error:
            self.ledger.failed(self.wanted.store.name, self.name, self.wanted.session_id, error)

    async def _visit(self, process: Process, num_chunks: int | None) -> None:
        """Follow until so many chunks have come, or to the end."""
        channel: Any = self.cluster.network.channel(self.wanted.address)
        chunks = self._connection(channel).follow(self.wanted.request, self.seen, TIMEOUT_S)
        async with aclosing(chunks):
            async for chunk in chunks:
                self.ledger.observed(self.wanted.store.name, process, channel.server, chunk)
                if chunk.finish and chunk.finish.reason is not FinishReason.CANCELLED:
                    self._check_length(chunk.offset + len(chunk.tokens))
                num_chunks = num_chunks - 1 if num_chunks is not None else None
                if num_chunks == 0:
                    return

    def _check_length(self, length: int) -> None:
        if length != self.wanted.request.sampling.max_new_tokens:
            self.ledger.violated(f"{self.name} was told that its session ended after {length} tokens")

    async def _cancel(self) -> None:
        if self.cancels and self.seen.session_id:
            self.ledger.trace.note(self.name, "cancels")
            request = generation_pb2.CancelSessionRequest(session_id=self.seen.session_id)
            channel = self.cluster.network.channel(self.wanted.address)
            await self._connection(channel).ask(lambda stub: stub.CancelSession, request, TIMEOUT_S)

    def _connection(self, channel: Any) -> Connection:
        def note(retry: Retry) -> None:
            self.ledger.trace.note(self.name, f"tries again in {retry.pause_s:.3f} s: {retry.failure.message}")

        return Connection(
            self.wanted.address,
            open_channel=lambda _: channel,
            closes_channel=False,
            metadata=(),
            policy=RetryPolicy(),
            connect_timeout_s=TIMEOUT_S,
            on_retry=note,
            outside=self.cluster.outside,
        )


def drawn_clients(chance: random.Random, cluster: Cluster, ledger: Ledger, hazards: frozenset[str]) -> list[Client]:
    """Return a world's clients: some sessions, each with some followers.

    Two stores have sessions of the same names with other prompts. A store that goes back in time shows what that does
    only where a repeated text is another one: sampled, with another number of draft tokens.
    """
    clients: list[Client] = []
    for number in range(chance.choice((1, 2, 2, 3))):
        for store in cluster.stores:
            request = _request(chance, number)
            if "rollback" in hazards and chance.random() < 0.8:
                request.sampling.temperature = 1.0
                request.speculation.ClearField("num_draft_tokens")
            wanted = _announced(store, ledger, request, cluster.texts)
            for _ in range(chance.choice((1, 1, 2)) if "rollback" not in hazards else 2):
                clients.append(_client(chance, f"client-{len(clients) + 1}", wanted, cluster, ledger))
    return clients


def _client(chance: random.Random, name: str, wanted: Wanted, cluster: Cluster, ledger: Ledger) -> Client:
    visits = [(chance.randrange(1, 6), 10 ** chance.uniform(-3, 0.5)) for _ in range(chance.choice((0, 0, 1, 2)))]
    cancels = bool(visits) and chance.random() < 0.1
    return Client(name, wanted, cluster, ledger, chance.uniform(0, 0.3), visits, cancels)


def _request(chance: random.Random, number: int) -> generation_pb2.GenerateRequest:
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 8))]
    is_greedy = chance.random() < 0.6
    sampling = SamplingParams(
        temperature=0.0 if is_greedy else 1.0,
        seed=None if chance.random() < 0.5 else chance.getrandbits(32),
        max_new_tokens=chance.randrange(4, 25),
    )
    num_draft_tokens = chance.choice((None, None, 0, 1, 3))
    # rarely neither: such a text is the same whatever is drafted, and so shows less of what was drawn anew
    rule = None if number % 8 == 5 else AcceptanceRuleName.BLOCK
    speculation = SpeculationParams(num_draft_tokens=num_draft_tokens, acceptance_rule=rule)
    policy = chance.choice((None, None, DetachedPolicy.PARK, DetachedPolicy.FINISH, DetachedPolicy.CANCEL))
    return generate_request(prompt_request(None, prompt), sampling, speculation, f"request {number}", policy)


def _announced(
    store: SimulatedRedis, ledger: Ledger, request: generation_pb2.GenerateRequest, texts: list[ToyText]
) -> Wanted:
    session_id = SessionIds(SECRET).of_request(NO_TENANT, request.request_id).public
    prompt = list(request.tokens.ids)
    is_greedy = request.sampling.temperature == 0
    greedy = [text.greedy(prompt, request.sampling.max_new_tokens) for text in texts if is_greedy]
    ledger.expect(store.name, session_id, prompt, greedy)
    return Wanted(store, request, session_id)
