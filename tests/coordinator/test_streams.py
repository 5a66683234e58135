"""The coordinator's ends of the worker streams, against workers that misbehave."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from coordinator import streams, target
from coordinator.checks import Checks
from coordinator.choosing.plans import Forward
from coordinator.pool.resolving import resolver
from coordinator.pool.watching import watching
from coordinator.rounds import Scored, ScoreOptions
from coordinator.streams import SessionOpening
from coordinator.target import TargetWorkers, _shares, target_watch
from specdec.errors import ContextTooShortError, FencedError, InternalError, UnavailableError
from specdec.exact import codec
from specdec.exact.lookup import NextRound
from specdec.exact.prefix import chain_draft
from specdec.exact.tree import chain_parents, children_of, union
from specdec.exact.values import ObservationRequest, Proposal, SparseDistribution, one_hot
from specdec.retry import RetryPolicy
from specdec.serving.channels import open_worker_channel
from specdec.serving.model_worker import MAX_FAILED_FORWARDS
from specdec.serving.server import Server, serving
from specdec.types import SamplingParams
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.settings import TargetSettings

SESSION = SessionOpening("session", 3, SamplingParams(seed=1), 2, lambda length: f"digest of {length}".encode())
PLAIN = Proposal()
Answer = Callable[[int, target_pb2.Score], target_pb2.ScoreResponse]


class Scripted(target_pb2_grpc.TargetServiceServicer):
    """Runs one script for each stream; later streams get good answers."""

    def __init__(self, *scripts: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._scripts = list(scripts)
        self.model = types_pb2.ModelInfo(
            name="scripted", tokenizer_fingerprint="words", vocab_size=10, context_length=1000
        )
        self.requests: list[tuple[int, list[int]]] = []  # start and tokens of each request
        self.digests: list[bytes] = []  # of each request
        self.promised: list[bool] = []  # by each request: that a plain round follows
        self.num_streams = 0
        self.num_closed = 0  # sessions

    async def GetTarget(self, request: object, context: object) -> target_pb2.GetTargetResponse:
        """Answer with the description."""
        return target_pb2.GetTargetResponse(model=self.model)

    async def Score(  # type: ignore[override]  # writes by itself
        self, requests: AsyncIterator[target_pb2.ScoreRequest], context: Any
    ) -> None:
        """Run the next script."""
        self.num_streams += 1
        if self._scripts:
            await self._scripts.pop(0)(requests, context)
            return
        async for request in requests:
            if request.HasField("score"):
                self.requests.append((request.score.start, list(request.score.tokens)))
                self.digests.append(request.score.prefix_digest)
                self.promised.append(request.score.HasField("next_round"))
                await context.write(well_answered(request.score))
            elif request.HasField("close"):
                self.num_closed += 1


def well_answered(score: target_pb2.Score, cached_len: int | None = None) -> target_pb2.ScoreResponse:
    """Answer a round with token 7, whatever its draft."""
    held = score.start + len(score.tokens) if cached_len is None else cached_len
    num_drafted, supports = len(score.draft_tokens), codec.draft_supports_from_proto(score)
    children = children_of(codec.checked_parents(score.parents, num_drafted) or chain_parents(num_drafted))
    num_supported = sum(len(union(supports[child] for child in each)) for each in children)
    mass, tokens = np.ones(num_drafted + 1, "<f4").tobytes(), np.full(num_drafted + 1, 7, "<u4").tobytes()
    return target_pb2.ScoreResponse(
        support_probs=np.zeros(num_supported, "<f4").tobytes(),
        tail_mass=mass,
        tail_tokens=tokens,
        cached_len=held,
        round=score.round,
    )


@asynccontextmanager
async def served(*servicers: Scripted, patience_s: float = 10, timeout_s: float = 10) -> AsyncIterator[TargetWorkers]:
    """Serve each as a worker; give the coordinator's client of them."""
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(serving_one(servicer)) for servicer in servicers]
        name = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        pool = await stack.enter_async_context(watching(target_watch(resolver(name), open_worker_channel)))
        yield TargetWorkers(pool, timeout_s, patience_s)


@asynccontextmanager
async def serving_one(servicer: Scripted) -> AsyncIterator[int]:
    """Serve it; give its port."""

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
        yield

    settings = TargetSettings(model="none", port=0, drain_s=0)
    async with serving(settings, "specdec.v1.TargetService", build) as server:
        yield server.port


async def refuse_as_fenced(requests: Any, context: Any) -> None:
    """End the stream before the coordinator's first request."""
    raise FencedError("epoch 4 owns the session")


async def end_after_one_answer(requests: Any, context: Any) -> None:
    """Answer once, then end the stream without an error, as a server that drains would."""
    async for request in requests:
        if request.HasField("score"):
            await context.write(well_answered(request.score))
            return


async def break_after_one_answer(requests: Any, context: Any) -> None:
    """Answer once, then fail."""
    await end_after_one_answer(requests, context)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def answer_late(requests: Any, context: Any) -> None:
    """Say often that the round is in progress, for longer than the time-out, then answer."""
    async for request in requests:
        if request.HasField("score"):
            load = types_pb2.Load(num_without_place=3, num_resident=1)
            for _ in range(10):
                answer = target_pb2.ScoreResponse(in_progress=True, load=load, round=request.score.round)
                await context.write(answer)
                await asyncio.sleep(0.05)
            await context.write(well_answered(request.score))


async def answer_nonsense(requests: Any, context: Any) -> None:
    """Answer with a tail that is no probability."""
    async for request in requests:
        if request.HasField("score"):
            answer = well_answered(request.score, cached_len=9)
            answer.tail_mass = b"\0\0\xc0\x7f"
            await context.write(answer)


async def hang_at_the_end(requests: Any, context: Any) -> None:
    """Answer rounds, and never end the stream."""
    async for request in requests:
        if request.HasField("score"):
            await context.write(well_answered(request.score))
    await asyncio.Event().wait()


async def hold_less(requests: Any, context: Any) -> None:
    """Report an empty cache at the second request."""
    num_asked = 0
    async for request in requests:
        if request.HasField("score"):
            num_asked += 1
            await context.write(well_answered(request.score, cached_len=1 if num_asked == 2 else None))


def several(*following: target_pb2.ScoreResponse) -> Callable[[Any, Any], Awaitable[None]]:
    """Return a script that answers each round with these answers to rounds that follow, and counts what it is asked."""

    async def answer_several(requests: Any, context: Any) -> None:
        async for request in requests:
            if request.HasField("score"):
                answer = well_answered(request.score)
                answer.following.extend(following)
                await context.write(answer)

    return answer_several


def follower(length: int, token: int, digest: bytes | None = None, mass: float = 1.0) -> target_pb2.ScoreResponse:
    """Return the answer to a plain round of a text of so many tokens, of that digest."""
    answer = well_answered(target_pb2.Score(), cached_len=length)
    answer.tail_mass, answer.tail_tokens = np.array([mass], "<f4").tobytes(), np.array([token], "<u4").tobytes()
    answer.prefix_digest = SESSION.prefix_digest(length) if digest is None else digest
    return answer


def tree(*tokens: int, parents: tuple[int, ...] = ()) -> Proposal:
    """Return tokens that were chosen."""
    return Proposal(tokens, tuple(map(one_hot, tokens)), parents)


def drafted(length: int, draft: Proposal, offer: Proposal = PLAIN) -> target_pb2.ScoreResponse:
    """Return the answer to a round that has a draft, with what is offered for the next one."""
    answer = well_answered(codec.score_to_proto(length - 1, [1], draft), cached_len=length)
    answer.prefix_digest = chain_draft(SESSION.prefix_digest(length), draft.tokens, draft.tree)
    answer.offer.draft_tokens.extend(offer.tokens)
    answer.offer.parents.extend(offer.parents)
    return answer


def observed(answer: target_pb2.ScoreResponse) -> target_pb2.ScoreResponse:
    """Return an answer with an observation."""
    answer.observations.CopyFrom(types_pb2.Observations(count=1))
    return answer


def expected(scored: Scored | None) -> Scored:
    assert scored is not None
    return scored


TOGETHER = ScoreOptions(observes=False, next_round=NextRound(plain=True), num_rounds=3)
OFFERED = replace(TOGETHER, next_round=NextRound(plain=True, num_offered=2))
LOOKED_AT = ObservationRequest(num_top_tokens=2)


async def test_rounds_that_were_answered_with_another_one_are_not_asked_for() -> None:
    async with served(Scripted(several(follower(3, 8), follower(4, 9)))) as workers:
        scorer = workers.open(SESSION, 10)
        first = await scorer.score([1, 2], Proposal(), TOGETHER)
        assert first.waited_s == pytest.approx(3 * first.elapsed_s)
        assert first.num_more == 2
        scored = [expected(scorer.known([1, 2, 7, *more], Proposal())) for more in ([], [8])]
        assert [each.scores.positions[0].tail_token for each in scored] == [8, 9]
        facts = [(each.num_more, each.waited_s, each.elapsed_s, each.num_fed) for each in scored]
        assert facts == [(num_more, 0.0, first.elapsed_s, first.num_fed) for num_more in (1, 0)]
        last = await scorer.score([1, 2, 7, 8, 9], Proposal())
        assert last.scores.positions[0].tail_token == 7, "asked for: the worker knows the others"


async def test_rounds_with_drafts_are_among_them() -> None:
    """What is offered for the next round comes with each."""
    branches = tree(5, 6, parents=(0, 0))
    async with served(Scripted(several(drafted(3, tree(4)), drafted(4, tree(8, 9), branches)))) as workers:
        scorer = workers.open(SESSION, 10)
        assert (await scorer.score([1, 2], Proposal(), OFFERED)).num_more == 2
        looked_up = expected(scorer.known([1, 2, 7], tree(4)))
        assert (len(looked_up.scores.positions), len(looked_up.offer), looked_up.num_more) == (2, 0, 1)
        offered = expected(scorer.known([1, 2, 7, 4], tree(8, 9)))
        assert (len(offered.scores.positions), offered.offer, offered.num_more) == (3, branches, 0)


async def test_rounds_that_are_answered_together_take_their_forwards_share() -> None:
    """As far as each of them is told."""
    short, long, untold = follower(3, 8), follower(3, 8), follower(3, 8)
    short.timing.forward_s, long.timing.forward_s = 0.5, 1.5
    short.timing.num_forward_tokens = long.timing.num_forward_tokens = 1
    assert _shares([short, long]) == [0.25, 0.75]
    assert _shares([short, long, untold]) == [1 / 3] * 3


@pytest.mark.parametrize(
    ("following", "committed", "proposal"),
    [
        (follower(3, 8, b"another text"), [1, 2, 7], Proposal()),
        (follower(4, 8), [1, 2, 7], Proposal()),
        (follower(3, 8), [1, 2, 7, 8], Proposal()),
        (follower(3, 8), [1, 2, 7], tree(4)),
        (drafted(3, tree(4)), [1, 2, 7], Proposal()),
        (drafted(3, tree(4, 5)), [1, 2, 7], tree(4, 6)),
        (drafted(3, tree(4, 5)), [1, 2, 7], tree(4, 5, parents=(0, 0))),
        (drafted(3, tree(4, 5, 0, 0)), [1, 2, 7], tree(4, 5, parents=(0, 0))),
        (drafted(3, tree(4)), [1, 2, 7], Proposal((4,), (SparseDistribution((4, 5), (0.5, 0.5)),))),
    ],
    ids=[
        "of another text",
        "of another length",
        "for a round that does not come",
        "without a draft",
        "with a draft",
        "with another draft",
        "with another tree",
        "with a chain of a tree's numbers",
        "with a draft that was chosen, not drawn",
    ],
)
async def test_an_answer_is_not_used(
    following: target_pb2.ScoreResponse, committed: list[int], proposal: Proposal
) -> None:
    servicer = Scripted(several(following, follower(5, 9)))
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10, LOOKED_AT)
        await scorer.score([1, 2], Proposal(), TOGETHER)
        assert scorer.known(committed, proposal) is None
        scored = await scorer.score(committed, proposal, TOGETHER)
        assert scored.scores.positions[0].tail_token == 7
        assert scored.num_more == 2, "it was asked for, and the worker answered as before"


@pytest.mark.parametrize(
    "following",
    [
        [follower(3, 8)] * 3,
        [follower(3, 10)],
        [follower(3, 8, mass=math.nan)],
        [drafted(3, Proposal(), tree(4))],
        [observed(follower(3, 8))],
    ],
    ids=[
        "more than were asked for",
        "a token that does not exist",
        "no probability",
        "an offer that nobody asked for",
        "observations that nobody asked for",
    ],
)
async def test_a_worker_that_answers_nonsense_of_what_follows_is_left(
    following: list[target_pb2.ScoreResponse],
) -> None:
    servicer = Scripted(several(*following))
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        await scorer.score([1, 2], Proposal(), TOGETHER)
        assert scorer.known([1, 2, 7], Proposal()) is None
        scored = await scorer.score([1, 2, 7], Proposal(), TOGETHER)
        assert scored.scores.positions[0].tail_token == 7
    assert servicer.num_streams == 2


async def test_a_refusal_at_open_keeps_its_status() -> None:
    """grpc.aio loses the status where a write meets the stream's end; a retry gets it."""
    for _ in range(20):
        async with served(Scripted(*[refuse_as_fenced] * 100)) as workers:
            with pytest.raises(FencedError, match="epoch 4"):
                await workers.open(SESSION, 10).score([1, 2], Proposal())


async def test_a_worker_that_describes_no_model_counts_as_away() -> None:
    """Its empty description is a valid message."""
    servicer = Scripted()
    servicer.model.Clear()
    async with served(servicer) as workers:
        assert not workers.pool.descriptions
        assert not workers.pool.is_available


async def test_each_round_proves_what_it_builds_on_and_says_what_follows() -> None:
    servicer = Scripted()
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        for committed in ([1, 2], [1, 2, 7], [1, 2, 7, 8, 9]):
            await scorer.score(
                committed, Proposal(), ScoreOptions(next_round=NextRound() if len(committed) == 3 else None)
            )
    assert servicer.digests == [b"digest of 0", b"digest of 2", b"digest of 3"]
    assert servicer.promised == [False, True, False]


@pytest.mark.parametrize("script", [end_after_one_answer, break_after_one_answer])
async def test_a_worker_lost_between_rounds_is_replaced(script: Any) -> None:
    for _ in range(10):
        servicer = Scripted(script)
        async with served(servicer) as workers:
            scorer = workers.open(SESSION, 10)
            await scorer.score([1, 2], Proposal())
            second = await scorer.score([1, 2, 7], Proposal())
            assert second.scores.positions[0].tail_token == 7
        assert servicer.num_streams == 2
        assert servicer.requests == [(0, [1, 2, 7])], "the new stream is sent everything"


async def test_malformed_scores_are_asked_again() -> None:
    servicer = Scripted(answer_nonsense)
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        scored = await scorer.score([1, 2], Proposal(), TOGETHER)
        again = await scorer.score([1, 2, 7], Proposal(), TOGETHER)
    assert scored.scores.positions[0].tail_token == 7
    assert servicer.num_streams == 2
    assert (scored.has_lost, again.has_lost) == (True, False), "who knows what the first answer told of"


async def test_a_session_that_moved_is_closed_at_every_worker() -> None:
    """A worker that failed one round still holds the session."""
    servicers = Scripted(answer_nonsense), Scripted(answer_nonsense)
    async with served(*servicers) as workers:
        scorer = workers.open(SESSION, 10)
        await scorer.score([1, 2], Proposal())
        await scorer.close()
        assert [worker.num_streams for worker in workers.pool.workers.values()] == [0, 0]
    assert [servicer.num_closed for servicer in servicers] == [1, 1]


async def test_close_does_not_wait_for_a_worker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CLOSE_TIMEOUT_S", 0.2)
    hanging = Scripted(answer_nonsense, hang_at_the_end)
    other = Scripted(answer_nonsense)
    async with served(hanging, other) as workers:
        scorer = workers.open(SESSION, 10)
        await scorer.score([1, 2], Proposal())
        await asyncio.wait_for(scorer.close(), 5)
    assert (hanging.num_closed, other.num_closed) == (0, 1)


@pytest.mark.parametrize("code", ["DATA_LOSS", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS"])
async def test_what_no_worker_may_say_of_a_session_is_not_believed(code: str) -> None:
    """To a client it would say that the session is lost, or that its token is wrong."""

    async def end_with(requests: Any, context: Any) -> None:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode[code], "a lie")

    servicer = Scripted(end_with)
    async with served(servicer) as workers:
        scored = await workers.open(SESSION, 10).score([1, 2], Proposal())
    assert scored.scores.positions[0].tail_token == 7
    assert servicer.num_streams == 2


async def test_an_evicted_worker_is_sent_more() -> None:
    servicer = Scripted(hold_less)
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        for committed in ([1, 2], [1, 2, 7], [1, 2, 7, 7]):
            await scorer.score(committed, Proposal())
    assert servicer.num_streams == 1


async def garble_a_sign_of_life(requests: Any, context: Any) -> None:
    """Let a message that says that the round is in progress arrive empty, like an answer that holds nothing."""
    async for request in requests:
        if request.HasField("score"):
            if request.score.start == 2:
                await context.write(target_pb2.ScoreResponse())
            answer = well_answered(request.score)
            answer.tail_tokens = np.array([len(request.score.tokens) + request.score.start], "<u4").tobytes()
            await context.write(answer)


async def test_an_answer_to_another_round_is_none() -> None:
    """Whoever repeats a round on the same stream may read the answer of the first as that of the second."""
    servicer = Scripted(garble_a_sign_of_life)
    async with served(servicer, Scripted(garble_a_sign_of_life)) as workers:
        scorer = workers.open(SESSION, 10)
        for committed in ([1, 2], [1, 2, 7], [1, 2, 7, 7]):
            scored = await scorer.score(committed, Proposal())
            assert scored.scores.positions[0].tail_token == len(committed)


async def always_hold_less(requests: Any, context: Any) -> None:
    """Report an empty cache for every request."""
    async for request in requests:
        if request.HasField("score"):
            await context.write(well_answered(request.score, cached_len=max(0, request.score.start - 1)))


async def test_a_second_miss_is_sent_everything() -> None:
    servicer = Scripted(always_hold_less)
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        for length in range(2, 40):
            await asyncio.wait_for(scorer.score([1] * length, Proposal()), 5)


async def test_rounds_send_only_newly_committed_tokens() -> None:
    servicer = Scripted()
    async with served(servicer) as workers:
        scorer = workers.open(SESSION, 10)
        for committed in ([1, 2], [1, 2, 7], [1, 2, 7, 8, 9]):
            await scorer.score(committed, Proposal())
    assert servicer.requests == [(0, [1, 2]), (2, [7]), (3, [8, 9])]


async def test_scoring_fails_when_patience_ends() -> None:
    async with served(patience_s=0) as workers:
        scorer = workers.open(SESSION, 10)
        with pytest.raises(UnavailableError, match="no target worker has served this round for 0 s; the session"):
            await scorer.score([1, 2], Proposal())


async def fail_inside(requests: Any, context: Any) -> None:
    """Fail as a forward does that raises."""
    async for request in requests:
        if request.HasField("score"):
            raise InternalError


async def refuse_as_too_long(requests: Any, context: Any) -> None:
    """Refuse the text as a worker with a small cache does."""
    async for request in requests:
        if request.HasField("score"):
            raise ContextTooShortError("the text would be 74 tokens long")


async def test_rounds_that_fail_inside_a_worker_go_to_another() -> None:
    sick, well = Scripted(*[fail_inside] * 100), Scripted()
    async with served(sick, well) as workers:
        for number in range(10):
            scorer = workers.open(replace(SESSION, session_id=f"session {number}"), 10)
            await scorer.score([1, 2], Proposal())
            await scorer.score([1, 2, 7], Proposal())
    assert sick.num_streams <= 1, "the others do not try it in turn"
    assert well.num_streams == 10


class Silent(Scripted):
    """A worker that stops as a whole with its first round: it describes itself no more either."""

    has_stopped = False

    async def GetTarget(self, request: object, context: object) -> target_pb2.GetTargetResponse:
        """Answer until it has stopped."""
        if self.has_stopped:
            await asyncio.Event().wait()
        return await super().GetTarget(request, context)

    async def Score(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        """Stop."""
        self.has_stopped = True
        await asyncio.Event().wait()


async def test_a_worker_that_stops_is_left_for_one_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may be sick is better than one that is silent; waiting for its proof cost a client a second."""
    monkeypatch.setattr(target, "CHECKS", Checks(after_s=0.1, timeout_s=0.2))
    silent, sick = Silent(), Scripted()
    sick.model.name = "sick"
    async with served(silent, sick) as workers:
        found = {worker.description.name: worker for worker in workers.pool.in_service if worker.description}
        found["sick"].round_failed(InternalError())
        while not found["sick"].is_on_trial:
            await found["sick"].probe()
        scorer = workers.open(SESSION, 10)
        async with asyncio.timeout(target.MIN_ROUND_S / 2):
            await scorer.score([1, 2], Proposal())
    assert silent.has_stopped
    assert sick.requests == [(0, [1, 2])]


async def test_a_round_that_always_fails_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One session must cause fewer failures than end a worker."""
    monkeypatch.setattr("coordinator.target.RETRY", RetryPolicy(first_s=0.001))
    servicer = Scripted(*[fail_inside] * 100)
    async with served(servicer) as workers:
        with pytest.raises(InternalError):
            await workers.open(SESSION, 10).score([1, 2], Proposal())
    assert servicer.num_streams < MAX_FAILED_FORWARDS


async def test_texts_too_long_for_one_worker_go_to_another() -> None:
    short, long, noticed = Scripted(*[refuse_as_too_long] * 100), Scripted(), asyncio.Event()
    async with served(short, long) as workers:
        for number in range(24):
            scorer = workers.open(replace(SESSION, session_id=f"{number}"), 10, on_mismatch=noticed.set)
            await scorer.score([1, 2], Proposal())
    assert 1 <= short.num_streams < 24
    assert noticed.is_set(), "the coordinator asks which models are served"


async def test_texts_too_long_for_all_workers_can_be_resumed() -> None:
    async with served(Scripted(*[refuse_as_too_long] * 100), patience_s=0.05) as workers:
        with pytest.raises(ContextTooShortError, match=r"within 0\.05 s; resume it"):
            await workers.open(SESSION, 10).score([1, 2], Proposal())


async def test_worker_phases_are_measured() -> None:
    """Queue and forward of a round come from the worker; an impossible time is left out."""

    def seconds(phase: str) -> float:
        value = REGISTRY.get_sample_value("specdec_round_phase_seconds_sum", {"phase": phase})
        return value or 0.0

    async def answer_with_times(requests: Any, context: Any) -> None:
        async for request in requests:
            if request.HasField("score"):
                reply = well_answered(request.score)
                reply.timing.queue_s, reply.timing.forward_s = math.nan, 0.25
                await context.write(reply)

    before = seconds("score_queue"), seconds("score_forward")
    async with served(Scripted(answer_with_times)) as workers:
        await workers.open(SESSION, 10).score([1, 2], Proposal())
    assert (seconds("score_queue"), seconds("score_forward")) == (before[0], before[1] + 0.25)


IMPOSSIBLE = [
    {},
    {"num_forward_tokens": 3},
    {"num_forward_tokens": 0, "forward_s": 0.25},
    {"num_forward_tokens": 3, "forward_s": -1.0},
    {"num_forward_tokens": 3, "forward_s": math.nan},
    {"num_forward_tokens": 3, "forward_s": math.inf},
    {"num_forward_tokens": 0xFFFFFFFF, "forward_s": 0.25},
]


@pytest.mark.parametrize(
    ("timing", "forward"),
    [({"num_forward_tokens": 3, "forward_s": 0.25}, Forward(3, 0.25)), *((each, None) for each in IMPOSSIBLE)],
)
async def test_a_forward_is_learned_from_only_if_it_can_have_been(
    timing: dict[str, Any], forward: Forward | None
) -> None:
    """No number that a worker sends spoils what the coordinator knows of costs."""

    async def answer(requests: Any, context: Any) -> None:
        async for request in requests:
            if request.HasField("score"):
                reply = well_answered(request.score)
                reply.timing.CopyFrom(types_pb2.Timing(**timing))
                await context.write(reply)

    async with served(Scripted(answer)) as workers:
        scored = await workers.open(SESSION, 10).score([1, 2], Proposal())
    assert scored.forward == forward


async def test_a_round_in_progress_does_not_time_out() -> None:
    servicer = Scripted(answer_late)
    async with served(servicer, timeout_s=0.3) as workers:
        scorer = workers.open(SESSION, 10)
        scored = await scorer.score([1, 2], Proposal())
        assert scored.scores.positions[0].tail_token == 7
        assert servicer.num_streams == 1
        assert workers.loads.load.num_without_place > 0, "coordinators learn how many wait"
        scorer.abandon()
