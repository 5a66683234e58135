"""The draft worker, through real servers: drafts, state, fencing, failures, and what it refuses."""

import asyncio
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from draft_service.__main__ import SERVICE, built
from draft_service.drafter import DraftRequest
from draft_service.drafters.ngram import NgramDrafter
from draft_service.model.drafter import ModelDrafter
from draft_service.model.tasks import DraftProcessor, ProposeTask
from draft_service.registry import registered
from draft_service.servicer import DraftServicer
from draft_service.settings import SETTINGS as DraftSettings
from draft_service.settings import chosen_kinds
from specdec.channel import open_channel
from specdec.engine import ContiguousPool, ForwardOutput, KvCache, LanguageModel, LayerShape, Submission
from specdec.errors import FencedError
from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import SamplingContext, draw, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, SparseDistribution
from specdec.serving import session_stream
from specdec.serving.model_worker import load_model, new_engine
from specdec.serving.server import serving
from specdec.serving.session_stream import Session
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb
from specdec.v1 import draft_pb2_grpc, types_pb2
from tests.support.architectures import CONTEXT_LENGTH, build
from tests.support.cluster import save_tokenizer

NUM_TOKENS = 300  # of the tokenizer; the model pads its logits
PROMPT = [5, 6, 7, 8, 9, 10]
PLAIN = SamplingParams(seed=7)
SUPPORT_MASS, SUPPORT_MAX = 0.9, 40
Reference = Callable[[Sequence[int]], torch.Tensor]

in_module_loop = pytest.mark.asyncio(loop_scope="module")  # where the shared worker lives


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("draft")), NUM_TOKENS)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    """Logits [1, V] after a text, by transformers' own forward over all of it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1:]
        return result

    return logits


@asynccontextmanager
async def served(folder: Path | None, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a draft worker and connect to it."""
    values = {
        "port": 0,
        "dtype": "float32",
        "drain_s": 0,
        "kv_cache_bytes": 8 << 20,
        "drafters": "model,ngram",
        "draft_ahead": False,
    }
    limits = {"support_mass": SUPPORT_MASS, "support_max": SUPPORT_MAX, "model": folder and str(folder)}
    worker = DraftSettings(**values | limits | settings)
    async with (
        serving(worker, SERVICE, lambda server: built(worker, server, registered())) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with served(model_folder) as connected:
        yield connected


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[str]:
    """Session ids that no other test uses."""
    return (f"{request.node.name} {number}" for number in range(1000))


FED: list[int] = []
FED_BY: defaultdict[str, list[int]] = defaultdict(list)  # the same by session


@pytest.fixture(autouse=True)
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each forward in this test."""
    forward = LanguageModel.forward
    FED.clear()

    def counting(self: LanguageModel, feeds: Any) -> ForwardOutput:
        feeds = list(feeds)
        FED.append(sum(len(feed.tokens) for feed in feeds))
        for feed in feeds:
            FED_BY[feed.sequence.key].append(len(feed.tokens))
        return forward(self, feeds)

    monkeypatch.setattr(LanguageModel, "forward", counting)
    return FED


class Stream:
    """One session's stream."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        session_id: str,
        sampling: SamplingParams = PLAIN,
        drafter: str = "model",
        epoch: int = 1,
    ) -> None:
        self._call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        session = session_stream.open_session(session_id, epoch, sampling, len(PROMPT))
        self._opening: pb.ProposeRequest | None = pb.ProposeRequest(open=pb.OpenDraft(session=session, drafter=drafter))

    async def send(self, message: pb.ProposeRequest) -> Any:
        """Send, after `open` if that was not sent; return the answer, or EOF."""
        if self._opening is not None:
            await self._call.write(self._opening)
            self._opening = None
        await self._call.write(message)
        return await self._call.read()

    async def propose(self, start: int, tokens: Sequence[int], count: int) -> pb.ProposeResponse:
        """Play one round."""
        answer = await self.send(propose(start=start, tokens=tokens, num_draft_tokens=count))
        assert answer is not grpc.aio.EOF
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None:
        """End the session."""
        assert await self.send(pb.ProposeRequest(close=types_pb2.CloseSession())) is grpc.aio.EOF

    async def abandon(self) -> None:
        """End the stream alone."""
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    async def fail(self, message: pb.ProposeRequest) -> grpc.aio.AioRpcError:
        """Return the error that this message ends the stream with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.send(message)
        return caught.value

    async def refused(self) -> grpc.aio.AioRpcError:
        """Return the error that the opening ends the stream with; nothing is written behind it."""
        assert self._opening is not None
        await self._call.write(self._opening)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._call.read()
        return caught.value


def propose(**fields: Any) -> pb.ProposeRequest:
    return pb.ProposeRequest(propose=pb.Propose(**fields))


def decoded(answer: pb.ProposeResponse, count: int) -> Proposal:
    """Check and unpack an answer as the coordinator does."""
    return codec.proposal_from_proto(answer, count, NUM_TOKENS)


def expected(
    reference: Callable[[Sequence[int]], torch.Tensor],
    text: Sequence[int],
    count: int,
    sampling: SamplingParams = PLAIN,
) -> Proposal:
    """Draft by a plain loop over transformers' forward."""
    assert sampling.seed is not None
    tokens: list[int] = []
    rows: list[SparseDistribution] = []
    for index in range(count):
        context = SamplingContext(sampling, text[: len(PROMPT)], [*text[len(PROMPT) :], *tokens])
        dense = next_token_distributions(reference([*text, *tokens]), [context], NUM_TOKENS)
        rows += sparse_distributions(dense, SUPPORT_MASS, SUPPORT_MAX)
        tokens.append(draw(rows[-1], uniform(sampling.seed, Key(len(text), index, Purpose.DRAFT))))
    return Proposal(tuple(tokens), tuple(rows))


def assert_same(actual: Proposal, wanted: Proposal) -> None:
    """Equal tokens and supports, and probabilities within rounding."""
    assert actual.tokens == wanted.tokens
    for row, other in zip(actual.distributions, wanted.distributions, strict=True):
        assert dict(zip(row.token_ids, row.probs, strict=True)) == pytest.approx(
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
async def test_drafts_equal_a_plain_loop(sampling: SamplingParams, channel, names, reference) -> None:
    """Over rounds with rejections, full acceptance and rollbacks; each round from what the worker should hold."""
    stream, text = Stream(channel, next(names), sampling), []
    for start, tokens in ((0, PROMPT), (6, [11]), (7, [12, 13]), (4, [1, 2]), (6, list(range(50, 80)))):
        text = [*text[:start], *tokens]
        answer = await stream.propose(start, tokens, 5)
        assert_same(decoded(answer, 5), expected(reference, text, 5, sampling))
        assert answer.cached_len == len(text) + 4, "the last draft token is not fed"


@in_module_loop
async def test_after_full_acceptance_the_draft_reads_its_own_last_token(channel, names, reference) -> None:
    stream, text = Stream(channel, next(names)), list(PROMPT)
    held = 0
    for _ in range(4):
        answer = await stream.propose(held, text[held:], 3)
        proposal = decoded(answer, 3)
        assert_same(proposal, expected(reference, text, 3))
        text += [*proposal.tokens, 17]
        held = min(answer.cached_len, len(text) - 1)


@in_module_loop
async def test_k_drafts_take_k_forwards(channel, names, fed: list[int]) -> None:
    stream = Stream(channel, next(names))
    await stream.propose(0, PROMPT, 5)
    assert fed == [6, 1, 1, 1, 1]
    await stream.propose(6, [1, 2], 1)
    assert fed[5:] == [2]
    answer = await stream.propose(8, [3], 0)
    assert fed[6:] == [1], "K = 0 brings the cache up to date"
    assert (answer.cached_len, list(answer.tokens), answer.distributions.sizes) == (9, [], b"")
    answer = await stream.propose(9, [], 0)
    assert (fed[7:], answer.cached_len) == ([], 9)


@in_module_loop
async def test_without_new_tokens_the_last_one_is_read_again(channel, names, reference, fed: list[int]) -> None:
    stream = Stream(channel, next(names))
    await stream.propose(0, PROMPT, 0)
    answer = await stream.propose(6, [], 4)
    assert_same(decoded(answer, 4), expected(reference, PROMPT, 4))
    assert fed == [6, 1, 1, 1, 1]


@in_module_loop
async def test_the_shipped_token_is_drawn_from_the_shipped_row(channel, names) -> None:
    """Bit for bit: the decoded row and the same uniform give the token, for every draft of many rounds."""
    stream, text = Stream(channel, next(names), SamplingParams(seed=99, temperature=1.5)), list(PROMPT)
    for _ in range(10):
        proposal = decoded(await stream.propose(0, text, 8), 8)
        for index, (token, row) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
            assert draw(row, uniform(99, Key(len(text), index, Purpose.DRAFT))) == token
            assert len(row.token_ids) <= SUPPORT_MAX
        text += proposal.tokens[:3]


@in_module_loop
async def test_a_repeated_message_has_the_same_answer_bit_for_bit(channel, names, fed: list[int]) -> None:
    stream = Stream(channel, next(names))
    for start, tokens in ((0, PROMPT), (6, [3, 4])):
        answers = [await stream.propose(start, tokens, 4) for _ in range(3)]
        assert (
            len({(bytes(answer.distributions.probs), tuple(answer.tokens), answer.cached_len) for answer in answers})
            == 1
        )
    assert fed == 3 * [6, 1, 1, 1] + 3 * [2, 1, 1, 1], "the same forwards: another shape would change the last bits"


@in_module_loop
async def test_sessions_at_once_get_what_they_get_alone(channel, names, reference) -> None:
    params = [SamplingParams(seed=seed, temperature=(0, 0.8, 1)[seed % 3]) for seed in range(9)]
    texts = [[(5 * place + seed) % 290 for place in range(6 + seed)] for seed in range(9)]
    answers = await asyncio.gather(
        *(
            Stream(channel, next(names), sampling).propose(0, text, 1 + sampling.seed % 4)
            for sampling, text in zip(params, texts, strict=True)
        )
    )
    for answer, sampling, text in zip(answers, params, texts, strict=True):
        count = 1 + sampling.seed % 4
        assert_same(decoded(answer, count), expected(reference, text, count, sampling))


@in_module_loop
async def test_drafts_end_with_the_context(channel, names) -> None:
    text = [token % 290 for token in range(CONTEXT_LENGTH - 2)]
    answer = await Stream(channel, next(names)).propose(0, text, 8)
    assert len(answer.tokens) == 3, "the last one is never fed"
    assert answer.cached_len == CONTEXT_LENGTH
    answer = await Stream(channel, next(names)).propose(0, [*text, 1, 2], 8)
    assert len(answer.tokens) == 1


@in_module_loop
async def test_takeover_and_close(channel, names, reference, fed: list[int]) -> None:
    """A new stream computes only what the cache does not hold; a closed session's cache is gone."""
    name = next(names)
    first = Stream(channel, name)
    drafted = decoded(await first.propose(0, [*PROMPT, *range(60, 90)], 3), 3).tokens
    await first.abandon()
    fed.clear()
    text = [*PROMPT, *range(60, 90), drafted[0], 299]
    second = Stream(channel, name, epoch=2)
    assert_same(decoded(await second.propose(0, text, 3), 3), expected(reference, text, 3))
    assert fed == [1, 1, 1]
    await second.close()
    assert (await Stream(channel, name, epoch=2).propose(3, [4], 3)).cached_len == 0


def test_a_task_that_begins_again_forgets_what_it_drew() -> None:
    """Its sequence was evicted in mid-draft: the engine prepares it anew."""
    cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8))
    task = ProposeTask(Session("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), match=False)
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


async def until_fed(session_id: str, forwards: list[int]) -> None:
    """Return once the session had as many forwards, which must be these."""
    while len(FED_BY[session_id]) < len(forwards):  # noqa: ASYNC110  # the engine tells nobody
        await asyncio.sleep(0.001)
    assert FED_BY[session_id] == forwards


def guess_of(reference: Reference, text: Sequence[int]) -> int:
    """Return the likeliest next token."""
    return int(reference(text)[0, :NUM_TOKENS].argmax())


@pytest.mark.parametrize(
    ("count", "later", "more"),
    [(4, 4, []), (4, 2, []), (4, 6, [1, 1]), (1, 1, []), (1, 3, [1, 1])],
    ids=["as many", "fewer", "more", "one", "more than one"],
)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@in_module_loop
async def test_a_round_drafted_ahead_is_the_round_that_would_be_drafted_now(
    count: int, later: int, more: list[int], heat: float, channel, ahead_channel, names, reference
) -> None:
    """Bit for bit, and with no forward that was done before."""
    sampling, name = SamplingParams(seed=11, temperature=heat), next(names)
    ahead, plain = Stream(ahead_channel, name, sampling), Stream(channel, next(names), sampling)
    drafted = decoded(await ahead.propose(0, PROMPT, count), count)
    before = [6, *[1] * (count - 1), 1, 2, *[1] * (count - 1)]  # the proposal, the guess, the round behind it
    await until_fed(name, before)
    length = len(PROMPT) + count
    following = [drafted.tokens[-1], guess_of(reference, [*PROMPT, *drafted.tokens])]
    answer = await ahead.propose(length - 1, following, later)
    assert FED_BY[name][len(before) : len(before) + len(more)] == more
    await plain.propose(0, PROMPT, count)
    wanted = await plain.propose(length - 1, following, later)
    for each in (answer, wanted):
        each.ClearField("timing")
    assert answer == wanted


@pytest.mark.parametrize("kept", range(4))
@in_module_loop
async def test_a_wrong_guess_leaves_no_trace(kept: int, ahead_channel, names, reference) -> None:
    """Whatever was accepted of the proposal, and closed by another token than was guessed."""
    name = next(names)
    stream = Stream(ahead_channel, name)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(name, [6, 1, 1, 1, 2, 1, 1])
    closing = (guess_of(reference, [*PROMPT, *drafted]) + 1) % NUM_TOKENS
    text = [*PROMPT, *drafted[:kept], closing]
    start = min(len(text) - 1, len(PROMPT) + 2)
    answer = await stream.propose(start, text[start:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3))


@in_module_loop
async def test_what_was_drafted_for_another_epoch_is_no_answer(ahead_channel, names, reference) -> None:
    """The new owner's seed is another here, so that its rounds are other rounds."""
    name, other = next(names), SamplingParams(seed=8)
    drafted = decoded(await Stream(ahead_channel, name).propose(0, PROMPT, 2), 2).tokens
    await until_fed(name, [6, 1, 1, 2, 1])
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    answer = await Stream(ahead_channel, name, other, epoch=2).propose(7, text[7:], 2)
    assert_same(decoded(answer, 2), expected(reference, text, 2, other))


@in_module_loop
async def test_penalties_count_what_was_drafted_ahead(ahead_channel, names, reference) -> None:
    sampling, name = SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.3), next(names)
    stream = Stream(ahead_channel, name, sampling)
    drafted = decoded(await stream.propose(0, PROMPT, 3), 3).tokens
    await until_fed(name, [6, 1, 1, 1, 2, 1, 1])
    context = SamplingContext(sampling, PROMPT, drafted)
    guess = int(next_token_distributions(reference([*PROMPT, *drafted]), [context], NUM_TOKENS).argmax())
    text = [*PROMPT, *drafted, guess]
    answer = await stream.propose(8, text[8:], 3)
    assert_same(decoded(answer, 3), expected(reference, text, 3, sampling))
    assert FED_BY[name][:8] != [6, 1, 1, 1, 2, 1, 1, 2], "it was drafted ahead"


@in_module_loop
async def test_drafting_ahead_ends_with_the_context(ahead_channel, names) -> None:
    name, text = next(names), [token % 290 for token in range(CONTEXT_LENGTH - 4)]
    stream = Stream(ahead_channel, name)
    await stream.propose(0, text, 2)
    await until_fed(name, [CONTEXT_LENGTH - 4, 1, 1, 2, 1])  # one token is left, and one that is never fed
    whole = next(names)
    stream = Stream(ahead_channel, whole)
    assert len((await stream.propose(0, [*text, 1, 2, 3], 5)).tokens) == 2
    await stream.close()
    assert FED_BY[whole] == [CONTEXT_LENGTH - 1, 1], "there is nothing to go on to"


@in_module_loop
async def test_none_drafts_ahead_while_somebody_asks_or_after_its_stream_ended(model_folder: Path) -> None:
    settings = DraftSettings(drafters="model", model=str(model_folder), dtype="float32", port=0)
    model, info = await load_model(settings, str(model_folder))
    engine = new_engine(settings, model, DraftProcessor(info.vocab_size, SUPPORT_MASS, SUPPORT_MAX))
    drafter = ModelDrafter(engine, info, drafts_ahead=True)
    engine.start()
    try:
        first, second = (Session(name, 1, PLAIN, len(PROMPT)) for name in ("first", "second"))
        ask = DraftRequest(0, PROMPT, 8)
        drafted = await drafter.propose(first, ask, match=False)
        asking = asyncio.create_task(drafter.propose(second, ask, match=False))
        await asyncio.sleep(0)  # it asks now
        drafter.draft_ahead(first, ask, drafted.proposal)
        await asking
        assert FED_BY["first"] == [6, *[1] * 7], "nothing was drafted ahead"

        for session in (first, second):
            drafter.draft_ahead(session, ask, drafted.proposal)
            await asyncio.sleep(0.001)
            drafter.abandon(session)
        while engine.load.num_running or engine.load.num_waiting:  # noqa: ASYNC110  # the engine tells nobody
            await asyncio.sleep(0.001)
    finally:
        engine.stop()


@in_module_loop
async def test_a_stream_that_leaves_stops_its_own_drafting_alone(ahead_channel, names, reference) -> None:
    name = next(names)
    old = Stream(ahead_channel, name)
    await old.propose(0, PROMPT, 2)
    await until_fed(name, [6, 1, 1, 2, 1])
    new = Stream(ahead_channel, name, epoch=2)
    drafted = decoded(await new.propose(0, PROMPT, 2), 2).tokens
    await until_fed(name, [6, 1, 1, 2, 1, 1, 1, 1, 2, 1])
    await old.fail(propose(start=6, tokens=[1]))
    text = [*PROMPT, *drafted, guess_of(reference, [*PROMPT, *drafted])]
    await new.propose(7, text[7:], 2)
    assert FED_BY[name][10:11] != [2], "what was drafted ahead is gone"


async def test_who_was_fenced_while_it_wrote_goes_on_with_nothing() -> None:
    """Its coordinator hangs, so that the answer is not read before another one owns the session."""
    asked_ahead: list[int] = []

    class Recorder(NgramDrafter):
        def draft_ahead(self, session: Session, ask: DraftRequest, proposal: Proposal) -> None:
            asked_ahead.append(session.epoch)

    class Context:
        def __init__(self) -> None:
            self.reads, self.wrote = asyncio.Event(), asyncio.Event()

        async def write(self, answer: pb.ProposeResponse) -> None:
            self.wrote.set()
            await self.reads.wait()

    async def requests(epoch: int) -> AsyncIterator[pb.ProposeRequest]:
        yield pb.ProposeRequest(open=pb.OpenDraft(session=session_stream.open_session("s", epoch, PLAIN, 2)))
        yield propose(tokens=[1, 2, 1], num_draft_tokens=1)

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


async def test_who_drafts_ahead_makes_way_after_the_forward_in_progress() -> None:
    """With the token that it was due: what was begun can be gone on from."""
    cache, asked = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8)), False
    task = ProposeTask(Session("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), False, interrupted=lambda: asked)
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


# ---- drafting by lookup


@in_module_loop
async def test_an_ngram_draft_is_what_followed_before(channel, names) -> None:
    stream = Stream(channel, next(names), drafter="ngram")
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
async def test_an_ngram_session_needs_no_vocabulary_and_no_model() -> None:
    async with served(None, drafters="ngram") as channel:
        large = 2**32 - 1
        answer = await Stream(channel, "s", drafter="").propose(0, [large, 5, large], 3)
        assert list(answer.tokens) == [5, large, 5]
        (drafter,) = (await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(pb.GetDraftRequest())).drafters
        assert (drafter.name, drafter.model.vocab_size, drafter.model.tokenizer_fingerprint) == ("ngram", 0, "")


def test_an_ngram_worker_never_imports_torch() -> None:
    """It serves, drafts, and ends, in a process of its own."""
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


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@in_module_loop
async def test_a_newer_epoch_fences_the_older_stream(drafter: str, channel, names) -> None:
    name = next(names)
    old, closing = (Stream(channel, name, drafter=drafter, epoch=1) for _ in range(2))
    for stream in (old, closing):
        await stream.propose(0, PROMPT, 2)
    new = Stream(channel, name, drafter=drafter, epoch=2)
    await new.propose(0, PROMPT, 2)
    failing = (
        old.fail(propose(start=6, tokens=[1])),
        closing.fail(pb.ProposeRequest(close=types_pb2.CloseSession())),
        Stream(channel, name, drafter=drafter, epoch=1).refused(),
    )
    for error in [await each for each in failing]:
        assert error.code() == grpc.StatusCode.ABORTED
    assert (await new.propose(6, [1], 0)).cached_len == 7, "the owner did not notice"


@in_module_loop
async def test_a_session_that_is_not_finite_fails_alone(model_folder: Path, tmp_path: Path, names) -> None:
    """One token's embedding is NaN: only the session that has it sees NaN."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
        model.get_input_embeddings().weight[42] = math.nan
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    async with served(save_tokenizer(tmp_path, NUM_TOKENS)) as channel:
        healthy = SamplingParams(seed=1, logit_bias={42: -100.0})
        alone = await Stream(channel, next(names), healthy).propose(0, PROMPT, 4)
        sick = propose(start=0, tokens=[5, 42, 6], num_draft_tokens=3)
        results = await asyncio.gather(
            *(Stream(channel, next(names), healthy).propose(0, PROMPT, 4) for _ in range(3)),
            *(Stream(channel, next(names), SamplingParams(seed=1, temperature=heat)).fail(sick) for heat in (0, 1)),
        )
        assert [answer.tokens for answer in results[:3]] == [alone.tokens] * 3
        assert [error.code() for error in results[3:]] == [grpc.StatusCode.FAILED_PRECONDITION] * 2


BAD_ROUNDS = {
    "token past the vocabulary": (propose(tokens=[NUM_TOKENS]), "propose.tokens has token id 300"),
    "too many draft tokens": (propose(tokens=[1], num_draft_tokens=33), "propose.num_draft_tokens is 33"),
    "past the context": (propose(tokens=[1] * (CONTEXT_LENGTH + 1)), "129 tokens"),
    "start past the context": (propose(start=2**32 - 1, tokens=[1]), "context"),
    "nothing to follow": (propose(num_draft_tokens=2), "propose.tokens is empty"),
    "empty message": (pb.ProposeRequest(), "empty where propose is due"),
    "open twice": (pb.ProposeRequest(open=pb.OpenDraft()), "open where propose is due"),
}


@pytest.mark.parametrize("name", BAD_ROUNDS)
@in_module_loop
async def test_a_bad_round_is_refused_and_harms_nobody(name: str, channel, names) -> None:
    message, words = BAD_ROUNDS[name]
    session = next(names)
    witness = await Stream(channel, session).propose(0, PROMPT, 3)
    error = await Stream(channel, session).fail(message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert words in (error.details() or "")
    assert (await Stream(channel, session).propose(0, PROMPT, 3)).tokens == witness.tokens


@in_module_loop
async def test_bad_openings_are_refused(channel) -> None:
    error = await Stream(channel, "s", drafter="oracle").refused()
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'oracle'; on offer: model, ngram" in (error.details() or "")
    biased = Stream(channel, "s", SamplingParams(seed=1, logit_bias={310: 1.0}))
    assert "sampling.logit_bias" in ((await biased.refused()).details() or "")
    call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
    await call.write(propose(tokens=[1]))
    with pytest.raises(grpc.aio.AioRpcError, match="propose where open is due"):
        await call.read()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafters": "oracle"}, "'oracle'; there are: model, ngram"),
        ({"drafters": ""}, "''; there are"),
        ({"drafters": "model"}, "--model is missing"),
        ({"drafters": "ngram", "ngram_min": 5, "ngram_max": 4}, "--ngram-min 5"),
    ],
)
def test_settings_that_clash_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_kinds(DraftSettings(**settings), registered())
