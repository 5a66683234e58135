"""The draft worker, through real servers: drafts, state, fencing, failures, and what it refuses."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from draft_service.drafter import DraftRequest
from draft_service.drafters.model import ModelDrafterSettings
from draft_service.drafters.ngram import NgramDrafter
from draft_service.model.drafter import ModelDrafter
from draft_service.model.tasks import DraftProcessor, ProposeTask
from draft_service.registry import registered
from draft_service.servicer import DraftServicer
from draft_service.settings import SETTINGS as DraftSettings
from draft_service.settings import chosen_kinds
from specdec.engine import ContiguousPool, KvCache, LayerShape, Submission
from specdec.errors import FencedError
from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import SamplingContext, draw, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, SparseDistribution
from specdec.serving import session_stream
from specdec.serving.model_worker import load_model, new_engine
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb
from specdec.v1 import draft_pb2_grpc, types_pb2
from tests.support.architectures import CONTEXT_LENGTH
from tests.support.worker_streams import PLAIN, PROMPT, DraftStream, connected_draft, propose_request
from tests.workers.conftest import NUM_TOKENS, Forwards, Reference

SUPPORT_MASS, SUPPORT_MAX = 0.9, 40

in_module_loop = pytest.mark.asyncio(loop_scope="module")  # the event loop of the shared worker


@asynccontextmanager
async def served(folder: Path | None, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a draft worker with the supports that `expected` has, and connect to it."""
    limits = {"support_mass": SUPPORT_MASS, "support_max": SUPPORT_MAX}
    async with connected_draft(folder, **limits | settings) as channel:
        yield channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with served(model_folder) as connected:
        yield connected


def decoded(answer: pb.ProposeResponse, count: int) -> Proposal:
    """Check and unpack an answer as the coordinator does."""
    return codec.proposal_from_proto(answer, count, NUM_TOKENS)


def expected(
    reference: Reference,
    text: Sequence[int],
    count: int,
    sampling: SamplingParams = PLAIN,
) -> Proposal:
    """Draft by a plain loop over transformers' forward."""
    assert sampling.seed is not None
    tokens: list[int] = []
    distributions: list[SparseDistribution] = []
    for index in range(count):
        context = SamplingContext(sampling, text[: len(PROMPT)], [*text[len(PROMPT) :], *tokens])
        dense = next_token_distributions(reference([*text, *tokens])[-1:], [context], NUM_TOKENS)
        distributions += sparse_distributions(dense, SUPPORT_MASS, SUPPORT_MAX)
        tokens.append(draw(distributions[-1], uniform(sampling.seed, Key(len(text), index, Purpose.DRAFT))))
    return Proposal(tuple(tokens), tuple(distributions))


def assert_same(actual: Proposal, wanted: Proposal) -> None:
    """Equal tokens and supports, and probabilities within rounding."""
    assert actual.tokens == wanted.tokens
    for found, other in zip(actual.distributions, wanted.distributions, strict=True):
        assert dict(zip(found.token_ids, found.probs, strict=True)) == pytest.approx(
            dict(zip(other.token_ids, other.probs, strict=True)), abs=1e-5
        )


# ---- drafting with a model


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        SamplingParams(seed=1, temperature=0),
        SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(seed=3, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(seed=4, temperature=0, frequency_penalty=5.0),
    ],
    ids=["plain", "greedy", "truncated", "penalties", "greedy penalties"],
)
@in_module_loop
async def test_drafts_equal_a_plain_loop(
    sampling: SamplingParams, channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Over rounds with rejections, full acceptance and rollbacks; each round from what the worker should hold."""
    stream = DraftStream(channel, next(names), sampling)
    text: list[int] = []
    for start, tokens in ((0, PROMPT), (6, [11]), (7, [12, 13]), (4, [1, 2]), (6, list(range(50, 80)))):
        text = [*text[:start], *tokens]
        answer = await stream.propose(start, tokens, 5)
        assert_same(decoded(answer, 5), expected(reference, text, 5, sampling))
        assert answer.cached_len == len(text) + 4, "the last draft token is not fed"


@in_module_loop
async def test_full_acceptance_feeds_the_last_draft_token(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    stream, text = DraftStream(channel, next(names)), list(PROMPT)
    held = 0
    for _ in range(4):
        stream.text = list(text)
        answer = await stream.propose(held, text[held:], 3)
        proposal = decoded(answer, 3)
        assert_same(proposal, expected(reference, text, 3))
        text += [*proposal.tokens, 17]
        held = min(answer.cached_len, len(text) - 1)


@in_module_loop
async def test_k_drafts_take_k_forwards(channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards) -> None:
    stream = DraftStream(channel, next(names))
    await stream.propose(0, PROMPT, 5)
    assert forwards.sizes == [6, 1, 1, 1, 1]
    await stream.propose(6, [1, 2], 1)
    assert forwards.sizes[5:] == [2]
    answer = await stream.propose(8, [3], 0)
    assert forwards.sizes[6:] == [1], "K = 0 brings the cache up to date"
    assert (answer.cached_len, list(answer.tokens), answer.distributions.sizes) == (9, [], b"")
    answer = await stream.propose(9, [], 0)
    assert (forwards.sizes[7:], answer.cached_len) == ([], 9)


@in_module_loop
async def test_no_new_tokens_feeds_the_last_again(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    stream = DraftStream(channel, next(names))
    await stream.propose(0, PROMPT, 0)
    answer = await stream.propose(6, [], 4)
    assert_same(decoded(answer, 4), expected(reference, PROMPT, 4))
    assert forwards.sizes == [6, 1, 1, 1, 1]


@in_module_loop
async def test_tokens_are_drawn_from_the_shipped_distributions(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Bit for bit: the decoded distribution and the same uniform give the token, for every draft of many rounds."""
    stream, text = DraftStream(channel, next(names), SamplingParams(seed=99, temperature=1.5)), list(PROMPT)
    for _ in range(10):
        proposal = decoded(await stream.propose(0, text, 8), 8)
        for index, (token, distribution) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
            assert draw(distribution, uniform(99, Key(len(text), index, Purpose.DRAFT))) == token
            assert len(distribution.token_ids) <= SUPPORT_MAX
        text += proposal.tokens[:3]


@in_module_loop
async def test_repeated_messages_get_bitwise_equal_answers(
    channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    stream = DraftStream(channel, next(names))
    for start, tokens in ((0, PROMPT), (6, [3, 4])):
        answers = [await stream.propose(start, tokens, 4) for _ in range(3)]
        assert (
            len({(bytes(answer.distributions.probs), tuple(answer.tokens), answer.cached_len) for answer in answers})
            == 1
        )
    assert forwards.sizes == 3 * [6, 1, 1, 1] + 3 * [2, 1, 1, 1], (
        "the same forwards: another shape would change the last bits"
    )


@in_module_loop
async def test_batched_sessions_draft_as_they_do_alone(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    params = [SamplingParams(seed=seed, temperature=(0, 0.8, 1)[seed % 3]) for seed in range(9)]
    counts = [1 + seed % 4 for seed in range(9)]
    texts = [[(5 * place + seed) % 290 for place in range(6 + seed)] for seed in range(9)]
    answers = await asyncio.gather(
        *(
            DraftStream(channel, next(names), sampling).propose(0, text, count)
            for sampling, text, count in zip(params, texts, counts, strict=True)
        )
    )
    for answer, sampling, text, count in zip(answers, params, texts, counts, strict=True):
        assert_same(decoded(answer, count), expected(reference, text, count, sampling))


@in_module_loop
async def test_drafts_end_with_the_context(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    text = [token % 290 for token in range(CONTEXT_LENGTH - 2)]
    answer = await DraftStream(channel, next(names)).propose(0, text, 8)
    assert len(answer.tokens) == 3, "the last one is never fed"
    assert answer.cached_len == CONTEXT_LENGTH
    answer = await DraftStream(channel, next(names)).propose(0, [*text, 1, 2], 8)
    assert len(answer.tokens) == 1


@in_module_loop
async def test_takeovers_reuse_the_cache_until_close(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """A new stream computes only what the cache does not hold; a closed session's cache is gone."""
    name = next(names)
    first = DraftStream(channel, name)
    drafted = decoded(await first.propose(0, [*PROMPT, *range(60, 90)], 3), 3).tokens
    await first.abandon()
    forwards.sizes.clear()
    text = [*PROMPT, *range(60, 90), drafted[0], 299]
    second = DraftStream(channel, name, epoch=2)
    assert_same(decoded(await second.propose(0, text, 3), 3), expected(reference, text, 3))
    assert forwards.sizes == [1, 1, 1]
    await second.close()
    assert (await DraftStream(channel, name, epoch=2).propose(3, [4], 3)).cached_len == 0


def test_a_restarted_task_discards_its_draft() -> None:
    """Its sequence was evicted in mid-draft: the engine prepares it again."""
    cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8))
    task = ProposeTask(WorkerSession("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), match=False)
    task.sequence = cache.open("s")
    task.prepare()
    task.sequence.reserve(2)
    task.sequence.append([1, 2])
    task.draw_from(SparseDistribution((5,), (1.0,)))
    assert (task.drawn, task.tokens) == ([5], [5])
    task.sequence.close()
    task.tokens = [1, 2]
    task.prepare()
    assert (task.drawn, task.distributions, task.tokens) == ([], [], [1, 2])


# ---- draft-ahead


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ahead_channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A worker that drafts ahead."""
    async with served(model_folder, draft_ahead=True) as connected:
        yield connected


async def until_fed(sizes: list[int], expected_sizes: list[int]) -> None:
    """Return once there were as many forwards, which must be these; the first one may be in pieces."""
    while len(in_one(sizes, expected_sizes[0])) < len(expected_sizes):  # noqa: ASYNC110  # the engine has no event
        await asyncio.sleep(0.001)
    assert in_one(sizes, expected_sizes[0]) == expected_sizes


def in_one(sizes: list[int], num_tokens: int) -> list[int]:
    """Return the sizes with the pieces of a prompt of `num_tokens` in one."""
    count = next((count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) == num_tokens), 1)
    return [sum(sizes[:count]), *sizes[count:]]


def guess_of(reference: Reference, text: Sequence[int]) -> int:
    """Return the most probable next token."""
    return int(reference(text)[-1].argmax())


@pytest.mark.parametrize(
    ("count", "later", "more"),
    [(4, 4, []), (4, 2, []), (4, 6, [1, 1]), (1, 1, []), (1, 3, [1, 1])],
    ids=["as many", "fewer", "more", "one", "more than one"],
)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@in_module_loop
async def test_rounds_drafted_ahead_equal_rounds_drafted_on_request(
    count: int,
    later: int,
    more: list[int],
    heat: float,
    channel: grpc.aio.Channel,
    ahead_channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    forwards: Forwards,
) -> None:
    """Bit for bit, and with no forward that was done before."""
    sampling, name = SamplingParams(seed=11, temperature=heat), next(names)
    ahead, plain = DraftStream(ahead_channel, name, sampling), DraftStream(channel, next(names), sampling)
    drafted = decoded(await ahead.propose(0, PROMPT, count), count)
    before = [6, *[1] * (count - 1), 1, 2, *[1] * (count - 1)]  # the proposal, the guess, the round after it
    await until_fed(forwards.by_session[name], before)
    length = len(PROMPT) + count
    following = [drafted.tokens[-1], guess_of(reference, [*PROMPT, *drafted.tokens])]
    ahead.text += drafted.tokens
    answer = await ahead.propose(length - 1, following, later)
    assert forwards.by_session[name][len(before) : len(before) + len(more)] == more
    await plain.propose(0, PROMPT, count)
    plain.text += drafted.tokens
    wanted = await plain.propose(length - 1, following, later)
    for each in (answer, wanted):
        each.ClearField("timing")
    assert answer == wanted


@pytest.mark.parametrize("kept", range(4))
@in_module_loop
async def test_a_wrong_guess_leaves_no_trace(
    kept: int, ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """For any number of accepted tokens, with another closing token than guessed."""
    name = next(names)
    stream = DraftStream(ahead_channel, name)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 1, 2, 1, 1])
    closing = (guess_of(reference, [*PROMPT, *drafted]) + 1) % NUM_TOKENS
    text = [*PROMPT, *drafted[:kept], closing]
    start = min(len(text) - 1, len(PROMPT) + 2)
    stream.text = list(text)
    answer = await stream.propose(start, text[start:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3))


@in_module_loop
async def test_drafts_ahead_of_another_text_are_not_used(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """Though all that the request repeats of its text is the same."""
    name, other = next(names), [PROMPT[0] + 1, *PROMPT[1:]]
    stream = DraftStream(ahead_channel, name)
    drafted = decoded(await stream.propose(0, other, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    text = [*PROMPT, *drafted, guess_of(reference, [*other, *drafted])]
    stream.text = list(text)
    assert (await stream.propose(7, text[7:], 2)).cached_len == 0
    assert_same(decoded(await stream.propose(0, text, 2), 2), expected(reference, text, 2))


@in_module_loop
async def test_drafts_ahead_of_another_epoch_are_discarded(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """The new owner has another seed here, so that its rounds differ."""
    name, other = next(names), SamplingParams(seed=8)
    drafted = decoded(await DraftStream(ahead_channel, name).propose(0, PROMPT, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    taken_over = DraftStream(ahead_channel, name, other, epoch=2)
    taken_over.text = text
    answer = await taken_over.propose(7, text[7:], 2)
    assert_same(decoded(answer, 2), expected(reference, text, 2, other))


@in_module_loop
async def test_penalties_count_what_was_drafted_ahead(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    sampling, name = SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.3), next(names)
    stream = DraftStream(ahead_channel, name, sampling)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 1, 2, 1, 1])
    context = SamplingContext(sampling, PROMPT, drafted)
    guess = int(next_token_distributions(reference([*PROMPT, *drafted])[-1:], [context], NUM_TOKENS).argmax())
    text = [*PROMPT, *drafted, guess]
    stream.text = list(text)
    answer = await stream.propose(8, text[8:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3, sampling))
    assert forwards.by_session[name][:8] != [6, 1, 1, 1, 2, 1, 1, 2], "it was drafted ahead"


@in_module_loop
async def test_drafting_ahead_ends_with_the_context(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    name, text = next(names), [token % 290 for token in range(CONTEXT_LENGTH - 4)]
    stream = DraftStream(ahead_channel, name)
    await stream.propose(0, text, 2)
    await until_fed(
        forwards.by_session[name], [CONTEXT_LENGTH - 4, 1, 1, 2, 1]
    )  # one token is left, and one that is never fed
    whole = next(names)
    stream = DraftStream(ahead_channel, whole)
    assert len((await stream.propose(0, [*text, 1, 2, 3], 5)).tokens) == 2
    await stream.close()
    read = in_one(forwards.by_session[whole], CONTEXT_LENGTH - 1)
    assert read == [CONTEXT_LENGTH - 1, 1], "there is nothing to go on to"


@in_module_loop
async def test_drafting_ahead_stops_for_requests_and_ended_streams(model_folder: Path, forwards: Forwards) -> None:
    settings = ModelDrafterSettings(model=str(model_folder), dtype="float32", port=0)
    model, info = await load_model(settings, str(model_folder))
    engine = new_engine(settings, model, DraftProcessor(info.vocab_size, SUPPORT_MASS, SUPPORT_MAX))
    drafter = ModelDrafter("model", engine, info, drafts_ahead=True)
    engine.start()
    try:
        first, second = (WorkerSession(name, 1, PLAIN, len(PROMPT)) for name in ("first", "second"))
        ask = DraftRequest(0, PROMPT, 8)
        drafted = await drafter.propose(first, ask, match=False)
        asking = asyncio.create_task(drafter.propose(second, ask, match=False))
        await asyncio.sleep(0)  # a request is waiting now
        drafter.draft_ahead(first, ask, drafted.proposal)
        await asking
        assert forwards.by_session["first"] == [6, *[1] * 7], "nothing was drafted ahead"

        for session in (first, second):
            drafter.draft_ahead(session, ask, drafted.proposal)
            await asyncio.sleep(0.001)
            drafter.abandon(session)
        while engine.load.num_running or engine.load.num_waiting:  # noqa: ASYNC110  # the engine has no event for this
            await asyncio.sleep(0.001)
    finally:
        engine.stop()


@in_module_loop
async def test_an_ended_stream_stops_only_its_own_drafting(
    ahead_channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    name = next(names)
    old = DraftStream(ahead_channel, name)
    await old.propose(0, PROMPT, 2)
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1])
    new = DraftStream(ahead_channel, name, epoch=2)
    drafted = decoded(await new.propose(0, PROMPT, 2), 2).tokens
    await until_fed(forwards.by_session[name], [6, 1, 1, 2, 1, 1, 1, 1, 2, 1])
    await old.fail(propose_request(start=6, tokens=[1]))
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    await new.propose(7, text[7:], 2)
    assert forwards.by_session[name][10:11] != [2], "what was drafted ahead is gone"


async def test_a_stream_fenced_while_writing_drafts_nothing_ahead() -> None:
    """The answer is not read before another stream owns the session."""
    asked_ahead: list[int] = []

    class Recorder(NgramDrafter):
        def draft_ahead(self, session: WorkerSession, ask: DraftRequest, proposal: Proposal) -> None:
            asked_ahead.append(session.epoch)

    class Context:
        def __init__(self) -> None:
            self.reads, self.wrote = asyncio.Event(), asyncio.Event()

        async def send_initial_metadata(self, metadata: object) -> None:
            pass

        async def write(self, answer: pb.ProposeResponse) -> None:
            self.wrote.set()
            await self.reads.wait()

    async def requests(epoch: int) -> AsyncIterator[pb.ProposeRequest]:
        yield pb.ProposeRequest(open=pb.OpenDraft(session=session_stream.open_session("s", epoch, PLAIN, 2)))
        yield propose_request(tokens=[1, 2, 1], num_draft_tokens=1)

    servicer = DraftServicer({"ngram": Recorder(1, 3)})
    hanging, reading = Context(), Context()
    reading.reads.set()
    old = asyncio.create_task(servicer.Propose(requests(1), hanging))
    await hanging.wrote.wait()
    await servicer.Propose(requests(2), reading)
    hanging.reads.set()
    with pytest.raises(FencedError):
        await old
    assert asked_ahead == [2]


async def test_drafting_ahead_stops_after_the_current_forward() -> None:
    """It returns what is drafted so far, which a later request can continue."""
    cache, asked = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8)), False
    task = ProposeTask(WorkerSession("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), False, interrupted=lambda: asked)
    task.submit(Submission(1))
    task.sequence = cache.open("s")
    task.prepare()
    task.sequence.reserve(2)
    task.sequence.append([1, 2])
    task.draw_from(SparseDistribution((5,), (1.0,)))
    assert not task.done
    asked = True
    task.draw_from(SparseDistribution((6,), (1.0,)))
    assert task.done
    assert task.submission.result == Proposal(
        (5, 6), (SparseDistribution((5,), (1.0,)), SparseDistribution((6,), (1.0,)))
    )


# ---- stopping early

STOPS = [0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0]


@in_module_loop
@pytest.mark.parametrize("heat", [0.0, 1.0])
async def test_an_unsure_draft_is_shorter(channel: grpc.aio.Channel, names: Iterator[str], heat: float) -> None:
    """The same tokens and distributions, up to where it stopped: nothing that was drawn is left out."""
    sampling, lengths = SamplingParams(seed=11, temperature=heat), []
    whole = decoded(await DraftStream(channel, next(names), sampling).propose(0, PROMPT, 4), 4)
    for stop_below in STOPS:
        stream = DraftStream(channel, next(names), sampling)
        drafted = decoded(await stream.propose(0, PROMPT, 4, stop_below), 4)
        assert_same(drafted, Proposal(whole.tokens[: len(drafted)], whole.distributions[: len(drafted)]))
        lengths.append(len(drafted))
    assert lengths[0] == 4
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2


@in_module_loop
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("later", STOPS)
@pytest.mark.parametrize("first", [0.0, 0.03])
async def test_rounds_drafted_ahead_stop_where_asked(
    first: float,
    later: float,
    heat: float,
    ahead_channel: grpc.aio.Channel,
    channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    forwards: Forwards,
) -> None:
    """What a token costs has changed since it was drafted ahead: a hit is what a miss would have drawn, bit for bit."""
    sampling, name = SamplingParams(seed=11, temperature=heat), next(names)
    ahead, plain = DraftStream(ahead_channel, name, sampling), DraftStream(channel, next(names), sampling)
    drafted = decoded(await ahead.propose(0, PROMPT, 2, first), 2)
    while len(forwards.by_session[name]) < 4:  # noqa: ASYNC110  # the engine has no event for this
        await asyncio.sleep(0.001)
    length = len(PROMPT) + len(drafted)
    following = [drafted.tokens[-1], guess_of(reference, [*PROMPT, *drafted.tokens])]
    answer = await ahead.propose(length - 1, following, 4, later)
    await plain.propose(0, PROMPT, 2, first)
    wanted = await plain.propose(length - 1, following, 4, later)
    for each in (answer, wanted):
        each.ClearField("timing")
    assert answer == wanted


@in_module_loop
@pytest.mark.parametrize("stop_below", [-0.1, 1.5, float("nan")])
async def test_a_chance_is_between_0_and_1(channel: grpc.aio.Channel, names: Iterator[str], stop_below: float) -> None:
    request = propose_request(tokens=PROMPT, num_draft_tokens=2, stop_below=stop_below)
    stream = DraftStream(channel, next(names))
    await stream.open()
    assert "stop_below" in str((await stream.fail(request)).details())


# ---- drafting by lookup


@in_module_loop
async def test_ngram_drafts_repeat_what_followed_before(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    stream = DraftStream(channel, next(names), drafter="ngram")
    answer = await stream.propose(0, [1, 2, 3, 4, 5, 9, 1, 2, 3], 2)
    proposal = decoded(answer, 2)
    assert proposal.tokens == (4, 5)
    assert proposal.distributions == (SparseDistribution((4,), (1.0,)), SparseDistribution((5,), (1.0,)))
    assert answer.cached_len == 9
    answer = await stream.propose(12, [7], 2)
    assert (answer.cached_len, list(answer.tokens)) == (9, []), "it holds less than that"
    answer = await stream.propose(7, [77, 78], 2)
    assert (answer.cached_len, list(answer.tokens)) == (9, []), "nothing ends like this"


@in_module_loop
async def test_ngram_sessions_need_no_vocabulary_or_model() -> None:
    async with served(None, drafters="ngram") as channel:
        large = 2**32 - 1
        answer = await DraftStream(channel, "s", drafter="").propose(0, [large, 5, large], 3)
        assert list(answer.tokens) == [5, large, 5]
        (drafter,) = (await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(pb.GetDraftRequest())).drafters
        assert (drafter.name, drafter.model.vocab_size, drafter.model.tokenizer_fingerprint) == ("ngram", 0, "")


def test_an_ngram_worker_never_imports_torch() -> None:
    """It serves, drafts, and ends, in a separate process."""
    program = """
import asyncio, sys
from specdec.serving.telemetry import configure_logs
from draft_service.__main__ import SERVICE, built
from draft_service.registry import registered
from draft_service.settings import SETTINGS as DraftSettings
from specdec.channel import open_channel
from specdec.serving import session_stream
from specdec.serving.server import serving
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb, draft_pb2_grpc

async def main():
    configure_logs("draft", "debug", "json")
    settings = DraftSettings(drafters="ngram", port=0, drain_s=0)
    async with (
        serving(settings, SERVICE, lambda server: built(settings, server, registered())) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        session = session_stream.open_session("s", 1, SamplingParams(seed=1), 1)
        await call.write(pb.ProposeRequest(open=pb.OpenDraft(session=session)))
        await call.write(pb.ProposeRequest(propose=pb.Propose(tokens=[1, 2, 1], num_draft_tokens=2)))
        print(list((await call.read()).tokens))
        await call.done_writing()
        await call.read()
    print(sorted(sys.modules.keys() & {"torch", "transformers", "tokenizers"}))

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
    assert ended.stdout.splitlines() == ["[2, 1]", "[]"], ended.stderr


# ---- fencing, failures, bad input


@in_module_loop
async def test_a_sessions_drafters_leave_each_other_alone(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """A session has one stream to each drafter: asked in turn and at once, all keep what they hold."""
    name, drafters = next(names), ("model", "ngram")
    streams = [DraftStream(channel, name, drafter=drafter) for drafter in drafters]
    for start, tokens in ((0, PROMPT), (len(PROMPT), [7]), (len(PROMPT) + 1, [8])):
        for stream in streams:
            assert (await stream.propose(start, tokens, 2)).cached_len >= start + len(tokens)
    length = len(PROMPT) + 2
    answers = await asyncio.gather(*(stream.propose(length, [9], 2) for stream in streams))
    assert all(answer.cached_len > length for answer in answers)
    for stream in streams:
        await stream.close()


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@in_module_loop
async def test_a_newer_epoch_fences_the_older_stream(
    drafter: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    name = next(names)
    old, closing = (DraftStream(channel, name, drafter=drafter, epoch=1) for _ in range(2))
    for stream in (old, closing):
        await stream.propose(0, PROMPT, 2)
    new = DraftStream(channel, name, drafter=drafter, epoch=2)
    await new.propose(0, PROMPT, 2)
    failing = (
        old.fail(propose_request(start=6, tokens=[1])),
        closing.fail(pb.ProposeRequest(close=types_pb2.CloseSession())),
        DraftStream(channel, name, drafter=drafter, epoch=1).refused(),
    )
    for error in [await each for each in failing]:
        assert error.code() == grpc.StatusCode.ABORTED
    assert (await new.propose(6, [1], 0)).cached_len == 7, "the owner is not disturbed"


@in_module_loop
async def test_a_session_with_nan_logits_fails_alone(nan_model_folder: Path, names: Iterator[str]) -> None:
    async with served(nan_model_folder) as channel:
        healthy = SamplingParams(seed=1, logit_bias={42: -100.0})
        alone = await DraftStream(channel, next(names), healthy).propose(0, PROMPT, 4)
        sick = propose_request(start=0, tokens=[5, 42, 6], num_draft_tokens=3)
        answers, errors = await asyncio.gather(
            asyncio.gather(*(DraftStream(channel, next(names), healthy).propose(0, PROMPT, 4) for _ in range(3))),
            asyncio.gather(
                *(
                    DraftStream(channel, next(names), SamplingParams(seed=1, temperature=heat)).fail(sick)
                    for heat in (0, 1)
                )
            ),
        )
        assert [answer.tokens for answer in answers] == [alone.tokens] * 3
        assert [error.code() for error in errors] == [grpc.StatusCode.FAILED_PRECONDITION] * 2


BAD_ROUNDS = {
    "token past the vocabulary": (propose_request(tokens=[NUM_TOKENS]), "propose.tokens has token id 300"),
    "too many draft tokens": (propose_request(tokens=[1], num_draft_tokens=33), "propose.num_draft_tokens is 33"),
    "past the context": (propose_request(tokens=[1] * (CONTEXT_LENGTH + 1)), "129 tokens"),
    "start past the context": (propose_request(start=2**32 - 1, tokens=[1]), "context"),
    "nothing to follow": (propose_request(num_draft_tokens=2), "propose.tokens is empty"),
    "empty message": (pb.ProposeRequest(), "empty where propose is due"),
    "open twice": (pb.ProposeRequest(open=pb.OpenDraft()), "open where propose is due"),
}


@pytest.mark.parametrize("name", BAD_ROUNDS)
@in_module_loop
async def test_bad_rounds_are_refused_without_side_effects(
    name: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    message, words = BAD_ROUNDS[name]
    session = next(names)
    witness = await DraftStream(channel, session).propose(0, PROMPT, 3)
    error = await DraftStream(channel, session).fail(message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert words in (error.details() or "")
    assert (await DraftStream(channel, session).propose(0, PROMPT, 3)).tokens == witness.tokens


@in_module_loop
async def test_bad_openings_are_refused(channel: grpc.aio.Channel) -> None:
    error = await DraftStream(channel, "s", drafter="oracle").refused()
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'oracle'; on offer: model, ngram" in (error.details() or "")
    error = await DraftStream(channel, "s", drafter="x" * 100_000).refused()
    assert error.details() == "open.drafter has 100000 characters; the maximum is 64"
    biased = DraftStream(channel, "s", SamplingParams(seed=1, logit_bias={310: 1.0}))
    assert "sampling.logit_bias" in ((await biased.refused()).details() or "")
    call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
    await call.write(propose_request(tokens=[1]))
    with pytest.raises(grpc.aio.AioRpcError, match="propose where open is due"):
        await call.read()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafters": "oracle"}, "'oracle'; there are: dflash, eagle3, medusa, model, ngram"),
        ({"drafters": ""}, "''; there are"),
        ({"drafters": "model"}, "--model is missing"),
        ({"drafters": "ngram", "ngram_min": 5, "ngram_max": 4}, "--ngram-min 5"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_kinds(DraftSettings.model_validate(settings), registered())
