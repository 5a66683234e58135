"""The coordinator's streams to draft workers that hang or fail: a round waits shortly, once for all sessions."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from coordinator.draft import MIN_ROUND_S, DraftLimits, DraftWorkers, SessionDrafter, draft_watch
from coordinator.pool.resolving import resolver
from coordinator.pool.watching import watching
from coordinator.round_times import MIN_ROUNDS
from coordinator.streams import SessionOpening
from specdec.errors import InternalError
from specdec.exact import codec
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.serving.channels import open_worker_channel
from specdec.serving.server import Server, serving
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from target_service.settings import TargetSettings

SESSION = SessionOpening("session", 3, SamplingParams(seed=1), 2, lambda length: b"digest")
BUSY_S = 3.0  # what a busy machine may add
TIMEOUT_S = 20.0  # far more than a quick worker is waited for


class Drafts(draft_pb2_grpc.DraftServiceServicer):
    """Drafts token 7; hangs or fails where it is told to."""

    def __init__(self) -> None:
        self.hangs = self.fails = False
        self.distribution = one_hot(7)
        self.opened = list[types_pb2.OpenSession]()
        self.num_asked = 0

    async def GetDraft(self, request: object, context: object) -> draft_pb2.GetDraftResponse:
        """Offer one drafter."""
        return draft_pb2.GetDraftResponse(drafters=[draft_pb2.Drafter(name="toy")])

    async def Propose(  # type: ignore[override]  # writes by itself
        self, requests: AsyncIterator[draft_pb2.ProposeRequest], context: Any
    ) -> None:
        """Answer each round."""
        async for request in requests:
            if not request.HasField("propose"):
                self.opened += [request.open.session] if request.HasField("open") else []
                continue
            self.num_asked += 1
            if self.hangs:
                await asyncio.Event().wait()
            if self.fails:
                raise InternalError
            reply = codec.proposal_to_proto(Proposal((7,), (self.distribution,)))
            reply.cached_len = request.propose.start + len(request.propose.tokens)
            reply.round = request.propose.round
            await context.write(reply)


@asynccontextmanager
async def served(*servicers: Drafts) -> AsyncIterator[DraftWorkers]:
    """Serve each as a worker; give the coordinator's client of them."""

    async def serve(stack: AsyncExitStack, servicer: Drafts) -> str:
        @asynccontextmanager
        async def build(server: Server) -> AsyncIterator[None]:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
            yield

        settings = TargetSettings(model="none", port=0, drain_s=0)
        server = await stack.enter_async_context(serving(settings, "specdec.v1.DraftService", build))
        return f"127.0.0.1:{server.port}"

    async with AsyncExitStack() as stack:
        name = "ipv4:" + ",".join([await serve(stack, servicer) for servicer in servicers])
        pool = await stack.enter_async_context(watching(draft_watch(resolver(name), open_worker_channel)))
        yield DraftWorkers(pool, TIMEOUT_S)


def opened(workers: DraftWorkers, name: str) -> SessionDrafter:
    return workers.open(replace(SESSION, session_id=name), "toy", DraftLimits(10), lambda error: None)


async def warmed(workers: DraftWorkers, name: str = "session") -> SessionDrafter:
    """Return a session's drafter after enough rounds to know how long they take."""
    drafter, committed = opened(workers, name), [1, 2]
    for _ in range(MIN_ROUNDS):
        assert (await drafter.propose(committed, 1)).proposal.tokens == (7,)
        committed.append(7)
    return drafter


async def test_a_draft_worker_that_hangs_costs_one_short_wait() -> None:
    drafts = Drafts()
    async with served(drafts) as workers:
        drafter = await warmed(workers)
        other = await warmed(workers, "other")
        drafts.hangs = True
        began_s = time.monotonic()
        assert (await drafter.propose([1] * 40, 1)).has_failed
        assert time.monotonic() - began_s < MIN_ROUND_S + BUSY_S
        num_asked = drafts.num_asked
        assert not drafter.available
        assert (await opened(workers, "new").propose([1, 2], 1)).has_failed
        assert drafts.num_asked == num_asked, "a new session does not try it at once"
        drafts.hangs = False
        while not other.available:  # noqa: ASYNC110  # until it has answered a probe
            await asyncio.sleep(0.01)
        assert (await other.propose([1, 2, 7], 1)).proposal.tokens == (7,)
        assert opened(workers, "new").available, "a round that succeeds at another session is enough"


async def test_drafts_that_fail_inside_a_worker_come_from_another() -> None:
    sick, well = Drafts(), Drafts()
    sick.fails = True
    async with served(sick, well) as workers:
        answers = [await opened(workers, f"{number}").propose([1, 2], 1) for number in range(10)]
    assert sick.num_asked <= 1
    assert sum(answer.has_failed for answer in answers) == sick.num_asked
    assert well.num_asked == 10 - sick.num_asked


@pytest.mark.parametrize("is_matched", [True, False])
async def test_what_a_worker_has_drawn_counts_as_chosen_in_a_matched_session(is_matched: bool) -> None:
    """An older worker draws whatever it is told: then its tokens are guesses, and no rule reads how they were drawn."""
    drafts = Drafts()
    drafts.distribution = SparseDistribution((6, 7), (0.5, 0.5))
    async with served(drafts) as workers:
        session, limits = replace(SESSION, is_matched=is_matched), DraftLimits(vocab_size=10, is_matched=is_matched)
        drafted = await workers.open(session, "", limits, lambda error: None).propose([1, 2], 1)
    assert drafted.proposal == Proposal((7,), (one_hot(7) if is_matched else drafts.distribution,))
    assert [each.is_matched for each in drafts.opened] == [is_matched]
