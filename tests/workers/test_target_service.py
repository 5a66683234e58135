"""The target worker, through real servers: rows, state, fencing, failures, and what it refuses."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForCausalLM

from specdec.channel import open_channel
from specdec.engine import ContiguousPool, EngineLoop, ForwardOutput, KvCache, LanguageModel, LayerShape, Task
from specdec.errors import FencedError, from_rpc_error
from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.values import ObservationRequest, Proposal, Scores, SparseDistribution
from specdec.serving import session_stream
from specdec.serving.model_worker import eos_token_ids, running
from specdec.serving.server import Server, serving
from specdec.serving.session_stream import EpochFence, Session
from specdec.serving.tokenizer import TokenizerMissing, fingerprint, load_tokenizer
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc, types_pb2
from target_service.__main__ import SERVICE, built
from target_service.scorer import Scorer, ScoreRound, ScoreTask
from target_service.settings import TargetSettings
from tests.support.architectures import CONTEXT_LENGTH, VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer

NUM_TOKENS = 300  # of the tokenizer; the model pads its logits up to VOCAB_SIZE
PROMPT = [5, 6, 7, 8, 9, 10]
SUPPORTS = [[11, 12, 200], [13], [14, 15]]
DRAFT = [12, 13, 14]
PLAIN = SamplingParams(seed=7)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("target")), NUM_TOKENS)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits [len(tokens), NUM_TOKENS] by transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, :, :NUM_TOKENS]
        return result

    return logits


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a target worker and connect to it."""
    worker = TargetSettings(
        model=str(folder), port=0, dtype="float32", drain_s=0, **{"kv_cache_bytes": 8 << 20} | settings
    )
    async with (
        serving(worker, SERVICE, lambda server: built(worker, server)) as server,
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


in_module_loop = pytest.mark.asyncio(loop_scope="module")  # where the shared worker lives


class Stream:
    """One session's stream."""

    def __init__(self, channel: grpc.aio.Channel, session_id: str, sampling: SamplingParams = PLAIN, **options: int):
        self._call = target_pb2_grpc.TargetServiceStub(channel).Score()
        epoch, num_prompt = options.get("epoch", 1), options.get("num_prompt", len(PROMPT))
        opening = session_stream.open_session(session_id, epoch, sampling, num_prompt)
        self._opening: pb.ScoreRequest | None = pb.ScoreRequest(open=pb.OpenTarget(session=opening))

    async def send(self, message: pb.ScoreRequest) -> Any:
        """Send, after `open` if that was not sent; return the answer, or EOF."""
        if self._opening is not None:
            await self._call.write(self._opening)
            self._opening = None
        await self._call.write(message)
        return await self._call.read()

    async def score(
        self,
        start: int,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        supports: Sequence[Sequence[int]] = (),
    ) -> pb.ScoreResponse:
        """Play one round."""
        rows = codec.distributions_to_proto([SparseDistribution(ids, ()) for ids in supports], with_probs=False)
        score = pb.Score(start=start, tokens=tokens, draft_tokens=draft, supports=rows)
        answer = await self.send(pb.ScoreRequest(score=score))
        assert answer is not grpc.aio.EOF
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None:
        """End the session."""
        assert await self.send(pb.ScoreRequest(close=types_pb2.CloseSession())) is grpc.aio.EOF
        assert await self._call.code() == grpc.StatusCode.OK

    async def abandon(self) -> None:
        """End the stream alone."""
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    async def fail(self, message: pb.ScoreRequest) -> grpc.aio.AioRpcError:
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


def decoded(answer: pb.ScoreResponse, supports: Sequence[Sequence[int]] = SUPPORTS) -> Scores:
    """Check and unpack an answer as the coordinator does."""
    rows = tuple(SparseDistribution(tuple(ids), (1 / len(ids),) * len(ids)) for ids in supports)
    return codec.scores_from_proto(answer, Proposal(tuple(ids[0] for ids in supports), rows), NUM_TOKENS)


def values(answer: pb.ScoreResponse) -> tuple[object, ...]:
    """Everything of an answer but times."""
    return answer.support_probs, answer.tail_mass, answer.tail_tokens, answer.cached_len, list(answer.logprobs)


def assert_rows(scores: Scores, distributions: torch.Tensor, committed_length: int, seed: int = 7) -> None:
    """The scores are those of the distributions [K + 1, V], with the tail tokens drawn by their own keys."""
    supports = [*SUPPORTS[: len(distributions) - 1], []]
    for index, (row, distribution, support) in enumerate(zip(scores.positions, distributions, supports, strict=True)):
        outside = distribution.double().clone()
        outside[support] = 0
        assert row.support_probs == pytest.approx(distribution[support].tolist(), abs=1e-5)
        assert row.tail_mass == pytest.approx(float(outside.sum()), abs=1e-5)
        assert np.float32(row.tail_mass) == row.tail_mass
        threshold = uniform(seed, Key(committed_length, index, Purpose.TAIL)) * outside.sum()
        begin, end = outside.cumsum(0)[row.tail_token] - outside[row.tail_token], outside.cumsum(0)[row.tail_token]
        assert begin - 1e-5 <= threshold <= end + 1e-5
        assert row.tail_token not in support


# ---- rows


@in_module_loop
async def test_rows_equal_transformers(channel, names, reference) -> None:
    stream = Stream(channel, next(names))
    answer = await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    distributions = reference(PROMPT + DRAFT).softmax(-1)[-4:]
    assert_rows(decoded(answer), distributions, len(PROMPT))
    assert answer.cached_len == len(PROMPT)
    assert answer.timing.forward_s > 0
    assert answer.timing.total_s >= answer.timing.forward_s
    assert 0 < answer.load.kv_cache_usage <= 1


@in_module_loop
async def test_plain_decoding_is_a_round_without_drafts(channel, names, reference) -> None:
    answer = await Stream(channel, next(names)).score(0, PROMPT)
    assert_rows(decoded(answer, []), reference(PROMPT).softmax(-1)[-1:], len(PROMPT))


@in_module_loop
async def test_greedy_rows_are_one_hot(channel, names, reference) -> None:
    best = int(reference(PROMPT).argmax(-1)[-1])
    supports = [[best, 3], [13]]
    answer = await Stream(channel, next(names), SamplingParams(temperature=0, seed=1)).score(
        0, PROMPT, [3, 13], supports
    )
    first, second, last = decoded(answer, supports).positions
    assert (list(first.support_probs), first.tail_mass) == ([1.0, 0.0], 0.0)
    expected = reference([*PROMPT, 3, 13]).argmax(-1)[-2:].tolist()
    assert 13 not in expected, "the case is meant to reject"
    assert [(row.tail_mass, row.tail_token) for row in (second, last)] == [(1.0, token) for token in expected]


@in_module_loop
async def test_penalties_see_the_history_of_each_row(channel, names, reference) -> None:
    """SparseDistribution i counts the committed tokens and the first i draft tokens, also over several rounds."""
    sampling = SamplingParams(seed=7, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3)
    stream = Stream(channel, next(names), sampling)
    await stream.score(0, PROMPT, [9, 9], [[9], [9]])
    answer = await stream.score(len(PROMPT), [20, 20], DRAFT, SUPPORTS)
    text = [*PROMPT, 20, 20, *DRAFT]
    logits = reference(text)[-4:]
    for index in range(4):
        completion = [20, 20, *DRAFT[:index]]
        seen = list({*PROMPT, *completion})
        logits[index, seen] = torch.where(logits[index, seen] > 0, logits[index, seen] / 1.3, logits[index, seen] * 1.3)
        for token in set(completion):
            logits[index, token] -= 1.5 + 0.5 * completion.count(token)
    assert_rows(decoded(answer), logits.softmax(-1), len(PROMPT) + 2)


@in_module_loop
async def test_log_probabilities_are_the_models_own(channel, names, reference) -> None:
    sampling = SamplingParams(seed=7, temperature=0.3, top_k=2, num_logprobs=3)
    answer = await Stream(channel, next(names), sampling).score(0, PROMPT, DRAFT, SUPPORTS)
    scores = decoded(answer)
    expected = reference(PROMPT + DRAFT).log_softmax(-1)[-4:]
    for logprobs, distribution, row, support in zip(
        scores.logprobs, expected, scores.positions, [*SUPPORTS, []], strict=True
    ):
        assert set(logprobs.by_token) == {*support, row.tail_token}
        assert all(distribution[token] == pytest.approx(value, abs=1e-4) for token, value in logprobs.by_token.items())
        best = distribution.topk(3)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# ---- state


@in_module_loop
async def test_truncating_and_appending(channel, names, reference) -> None:
    """Rejected draft tokens, deltas and prefixes: only the text counts."""
    stream = Stream(channel, next(names))
    await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    text = PROMPT
    for start, tokens in ((len(PROMPT), [12, 77]), (3, [1, 2, 3]), (6, [4]), (0, [9]), (1, list(range(40, 90)))):
        text = [*text[:start], *tokens]
        answer = await stream.score(start, tokens, DRAFT, SUPPORTS)
        assert_rows(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
        assert answer.cached_len == len(text)


@in_module_loop
async def test_a_repeated_message_has_the_same_answer_bit_for_bit(channel, names) -> None:
    stream, begin = (
        Stream(channel, next(names), SamplingParams(seed=3, num_logprobs=2, frequency_penalty=0.1)),
        len(FED),
    )
    answers = [await stream.score(0, PROMPT, DRAFT, SUPPORTS) for _ in range(3)]
    assert values(answers[0]) == values(answers[1]) == values(answers[2])
    deltas = [await stream.score(6, [12, 50], DRAFT, SUPPORTS) for _ in range(3)]
    assert values(deltas[0]) == values(deltas[1]) == values(deltas[2])
    # 12 was accepted: it is cached already, each time
    assert FED[begin:] == [9, 9, 9, 4, 4, 4], "the same forward: another shape would change the last bits"


@in_module_loop
async def test_two_seeds_draw_differently(channel, names) -> None:
    answers = [await Stream(channel, next(names), SamplingParams(seed=seed)).score(0, PROMPT) for seed in range(20)]
    assert len({answer.tail_tokens for answer in answers}) > 5


@in_module_loop
async def test_an_evicted_session_says_what_is_left(model_folder, names, reference) -> None:
    """A cache of one long text: a second session evicts the first, which repeats from the beginning."""
    long = [token % 290 for token in range(100)]
    async with served(model_folder, kv_cache_bytes=1 << 18) as channel:
        info = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model
        assert info.context_length == CONTEXT_LENGTH
        first = Stream(channel, next(names))
        await first.score(0, long)
        for _ in range(3):
            await Stream(channel, next(names)).score(0, long)
        answer = await first.score(100, [3], DRAFT, SUPPORTS)
        assert answer.cached_len == 0
        assert (answer.support_probs, answer.tail_tokens, answer.tail_mass) == (b"", b"", b"")
        again = await first.score(0, [*long, 3], DRAFT, SUPPORTS)
        assert_rows(decoded(again), reference([*long, 3, *DRAFT]).softmax(-1)[-4:], 101)


@in_module_loop
async def test_an_abandoned_stream_leaves_its_cache_and_close_frees_it(model_folder, names, reference) -> None:
    async with served(model_folder) as channel:
        name = next(names)
        first = Stream(channel, name)
        await first.score(0, PROMPT, DRAFT, SUPPORTS)
        await first.abandon()
        taken_over = Stream(channel, name, epoch=2)
        answer = await taken_over.score(len(PROMPT), [12, 77], DRAFT, SUPPORTS)
        assert_rows(decoded(answer), reference([*PROMPT, 12, 77, *DRAFT]).softmax(-1)[-4:], 8)
        assert answer.load.kv_cache_usage > 0
        await taken_over.close()
        other = await Stream(channel, name, epoch=2).score(1, [3])
        assert (other.cached_len, other.load.kv_cache_usage) == (0, 0)


@in_module_loop
async def test_who_takes_a_session_over_computes_only_what_is_new(channel, names, reference) -> None:
    """A new stream sends the whole text; what the cache holds of it is kept, rejected draft tokens are not."""
    name = next(names)
    first = Stream(channel, name)
    await first.score(0, [*PROMPT, *range(100, 160)], DRAFT, SUPPORTS)
    await first.abandon()
    text = [*PROMPT, *range(100, 160), 12, 99]
    before = await tokens_scored(channel)
    answer = await Stream(channel, name, epoch=2).score(0, text, DRAFT, SUPPORTS)
    assert_rows(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
    assert await tokens_scored(channel) - before == 1 + len(DRAFT), "12 was held as a draft token, 99 is new"


FED: list[int] = []


async def tokens_scored(channel: grpc.aio.Channel) -> int:
    """Tokens fed to any model of this process so far."""
    return sum(FED)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the tokens that forwards compute."""
    forward = LanguageModel.forward

    def counting(self: LanguageModel, feeds: Any) -> ForwardOutput:
        feeds = list(feeds)
        FED.append(sum(len(feed.tokens) for feed in feeds))
        return forward(self, feeds)

    monkeypatch.setattr(LanguageModel, "forward", counting)


@in_module_loop
async def test_sessions_at_once_get_what_they_get_alone(channel, names, reference) -> None:
    """Different lengths, parameters and numbers of drafts in the same forwards."""
    params = [
        PLAIN,
        SamplingParams(seed=8, temperature=0),
        SamplingParams(seed=9, top_k=5, num_logprobs=1),
        SamplingParams(seed=10, top_p=0.7, presence_penalty=1.0),
    ]
    texts = [[(3 * place + length) % 290 for place in range(length)] for length in (1, 9, 30, 70)]

    def rounds() -> list[Any]:
        return [
            Stream(channel, next(names), sampling, num_prompt=1).score(0, text, DRAFT[:count], SUPPORTS[:count])
            for sampling, text in zip(params, texts, strict=True)
            for count in range(4)
        ]

    alone = [await each for each in rounds()]
    together = await asyncio.gather(*rounds())
    for one, other in zip(alone, together, strict=True):
        assert one.tail_tokens == other.tail_tokens
        assert np.frombuffer(one.support_probs, "<f4") == pytest.approx(
            np.frombuffer(other.support_probs, "<f4"), abs=1e-5
        )
        assert np.frombuffer(one.tail_mass, "<f4") == pytest.approx(np.frombuffer(other.tail_mass, "<f4"), abs=1e-5)


# ---- fencing


@in_module_loop
async def test_a_newer_epoch_fences_the_older_stream(channel, names) -> None:
    name = next(names)
    old = Stream(channel, name, epoch=3)
    await old.score(0, PROMPT)
    new = Stream(channel, name, epoch=4)
    await new.score(0, PROMPT)
    for message in (score(start=6, tokens=[1]), pb.ScoreRequest(close=types_pb2.CloseSession())):
        error = (
            await old.fail(message) if message.HasField("score") else await Stream(channel, name, epoch=3).fail(message)
        )
        assert error.code() == grpc.StatusCode.ABORTED
        assert isinstance(from_rpc_error(error), FencedError)
    late = await Stream(channel, name, epoch=2).fail(score(start=0, tokens=[1]))
    assert late.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7, "the owner did not notice"


@in_module_loop
async def test_the_close_of_a_fenced_stream_frees_nothing(channel, names) -> None:
    name = next(names)
    old = Stream(channel, name, epoch=1)
    await old.score(0, PROMPT)
    new = Stream(channel, name, epoch=2)
    await new.score(0, PROMPT)
    error = await old.fail(pb.ScoreRequest(close=types_pb2.CloseSession()))
    assert error.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7


def test_claims_remember_the_sessions_heard_of_last() -> None:
    claims = EpochFence(max_sessions=2)

    def session(name: str, epoch: int) -> Session:
        return Session(name, epoch, PLAIN, 0)

    for name, epoch in (("a", 5), ("b", 5), ("a", 5), ("c", 5)):
        claims.check(session(name, epoch))
    with pytest.raises(FencedError):
        claims.check(session("a", 4))
    claims.check(session("b", 4))


# ---- failures


@in_module_loop
async def test_a_session_that_is_not_finite_fails_alone(model_folder, tmp_path, names) -> None:
    """One token's embedding is NaN: only the session that has it sees NaN."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
        model.get_input_embeddings().weight[42] = math.nan
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    async with served(save_tokenizer(tmp_path, NUM_TOKENS)) as channel:
        alone = await Stream(channel, next(names)).score(0, PROMPT, DRAFT, SUPPORTS)
        sick = next(names)
        streams = [Stream(channel, next(names)) for _ in range(4)]
        results = await asyncio.gather(
            *(stream.score(0, PROMPT, DRAFT, SUPPORTS) for stream in streams),
            *(Stream(channel, sick, SamplingParams(seed=1, temperature=heat)).fail(SICK) for heat in (0, 1)),
        )
        for error in results[4:]:
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "not finite" in error.details()
        for answer in results[:4]:
            assert answer.tail_tokens == alone.tail_tokens
        assert (await streams[0].score(6, [3])).cached_len == 7
        assert (await Stream(channel, sick).score(1, [3])).cached_len == 0, "nothing of it stays"


def test_of_the_sessions_in_one_forward_only_the_one_that_is_not_finite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shares the arithmetic with NaN gets the rows that it gets alone."""
    finished: dict[ScoreTask, Scores] = {}
    failed: dict[ScoreTask, BaseException] = {}
    monkeypatch.setattr(ScoreTask, "finish", lambda task, scores: finished.update({task: scores}))
    monkeypatch.setattr(ScoreTask, "fail", lambda task, error: failed.update({task: error}))
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[3, 17] = math.nan
    scorer = Scorer(NUM_TOKENS, observation_window=8)
    given = ScoreRound(0, [5], [7], [[7, 8]])
    tasks = [scorer.task(Session(name, 1, PLAIN, 1), given, ObservationRequest(), match=False) for name in "abc"]
    scorer(tasks, logits)
    assert list(finished) == [tasks[0], tasks[2]]
    assert list(failed) == [tasks[1]]
    together = dict(finished)
    for task, rows in ((tasks[0], logits[:2]), (tasks[2], logits[4:])):
        scorer([task], rows)
        assert finished[task] == together[task]


def score(**fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(score=pb.Score(**fields))


def supports(*rows: Sequence[int]) -> types_pb2.SparseDistributions:
    return codec.distributions_to_proto([SparseDistribution(ids, ()) for ids in rows], with_probs=False)


SICK = score(start=0, tokens=[5, 42, 6], draft_tokens=[7], supports=supports([7, 8]))

GOOD = types_pb2.OpenSession(session_id="bad input", epoch=1, sampling=types_pb2.SamplingParams(seed=1))


def opened(**fields: Any) -> pb.ScoreRequest:
    session = types_pb2.OpenSession()
    session.CopyFrom(GOOD)
    for name, value in fields.items():
        session.ClearField(name)
        session.MergeFrom(types_pb2.OpenSession(**{name: value}))
    return pb.ScoreRequest(open=pb.OpenTarget(session=session))


BAD_ROUNDS = {
    "no tokens": (score(start=0), "score.tokens"),
    "token past the vocabulary": (score(tokens=[NUM_TOKENS]), "score.tokens has token id 300"),
    "draft token past the vocabulary": (
        score(tokens=[1], draft_tokens=[310], supports=supports([310])),
        "score.draft_tokens has token id 310",
    ),
    "support past the vocabulary": (
        score(tokens=[1], draft_tokens=[3], supports=supports([3, 319])),
        "score.supports has token id 319",
    ),
    "too many draft tokens": (
        score(tokens=[1], draft_tokens=[1] * 33, supports=supports(*[[1]] * 33)),
        "score.draft_tokens has 33",
    ),
    "past the context": (score(tokens=[1] * CONTEXT_LENGTH, draft_tokens=[1], supports=supports([1])), "129 tokens"),
    "start past the context": (score(start=2**32 - 1, tokens=[1]), "context"),
    "supports missing": (score(tokens=[1], draft_tokens=[3]), "malformed proposal"),
    "too many supports": (score(tokens=[1], draft_tokens=[3], supports=supports([3], [4])), "malformed proposal"),
    "own token not in the support": (
        score(tokens=[1], draft_tokens=[3], supports=supports([4])),
        "its own draft token",
    ),
    "token twice": (score(tokens=[1], draft_tokens=[3], supports=supports([3, 3])), "twice"),
    "sizes that do not fit": (
        score(
            tokens=[1],
            draft_tokens=[3],
            supports=types_pb2.SparseDistributions(
                sizes=(2).to_bytes(4, "little"), token_ids=(3).to_bytes(4, "little")
            ),
        ),
        "malformed",
    ),
    "half a number": (
        score(tokens=[1], draft_tokens=[3], supports=types_pb2.SparseDistributions(sizes=b"\1\0\0\0", token_ids=b"\3")),
        "malformed",
    ),
    "huge support": (
        score(
            tokens=[1],
            draft_tokens=[3],
            supports=types_pb2.SparseDistributions(sizes=(1025).to_bytes(4, "little"), token_ids=bytes(4 * 1025)),
        ),
        "more than 1024",
    ),
    "open twice": (opened(), "open where score is due"),
    "empty message": (pb.ScoreRequest(), "empty where score is due"),
}


@pytest.mark.parametrize("name", BAD_ROUNDS)
@in_module_loop
async def test_a_bad_round_is_refused_and_harms_nobody(name: str, channel, names) -> None:
    message, words = BAD_ROUNDS[name]
    session = next(names)
    witness = await Stream(channel, session).score(0, PROMPT, DRAFT, SUPPORTS)
    error = await Stream(channel, session).fail(message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert words in (error.details() or "")
    again = await Stream(channel, session).score(0, PROMPT, DRAFT, SUPPORTS)
    assert again.tail_tokens == witness.tail_tokens


BAD_OPENINGS = {
    "round first": (score(tokens=[1]), "score where open is due"),
    "close first": (pb.ScoreRequest(close=types_pb2.CloseSession()), "close where open is due"),
    "no session": (opened(session_id=""), "session_id"),
    "epoch 0": (opened(epoch=0), "epoch"),
    "no seed": (opened(sampling=types_pb2.SamplingParams()), "seed"),
    "bad temperature": (opened(sampling=types_pb2.SamplingParams(seed=1, temperature=-1)), "sampling.temperature"),
    "bias past the vocabulary": (
        opened(sampling=types_pb2.SamplingParams(seed=1, logit_bias={310: 1.0})),
        "sampling.logit_bias",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
@in_module_loop
async def test_a_bad_opening_is_refused(name: str, channel) -> None:
    message, words = BAD_OPENINGS[name]
    call = target_pb2_grpc.TargetServiceStub(channel).Score()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")


@in_module_loop
async def test_a_stream_without_a_message_is_nothing(channel) -> None:
    call = target_pb2_grpc.TargetServiceStub(channel).Score()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


# ---- what it is


@in_module_loop
async def test_the_model_says_what_it_is(channel, model_folder) -> None:
    model = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model
    assert (model.name, model.vocab_size, model.context_length) == (model_folder.name, NUM_TOKENS, CONTEXT_LENGTH)
    assert (model.dtype, model.device, list(model.eos_token_ids)) == ("float32", "cpu", [0])
    assert model.vocab_size < VOCAB_SIZE, "the case is meant to have padding"
    assert model.tokenizer_fingerprint == fingerprint(load_tokenizer(str(model_folder)))


def test_tokenizers_differ_by_their_vocabulary(tmp_path: Path) -> None:
    prints = set()
    for name, size, prefix in (("a", 300, "t"), ("b", 300, "t"), ("c", 301, "t"), ("d", 300, "u")):
        (tmp_path / name).mkdir()
        prints.add(fingerprint(load_tokenizer(str(save_tokenizer(tmp_path / name, size, prefix)))))
    assert len(prints) == 3


@pytest.mark.parametrize(("name", "words"), [("./nowhere", "does not exist"), ("{empty}", "has no tokenizer.json")])
def test_a_missing_tokenizer_is_named(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=words):
        load_tokenizer(name.format(empty=tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ('{"eos_token_id": [1, 2]}', '{"eos_token_id": 3}', (1, 2)),
        ('{"eos_token_id": 4}', None, (4,)),
        (None, '{"eos_token_id": 0}', (0,)),
        ("{}", '{"text_config": {"eos_token_id": [7]}}', (7,)),
        (None, '{"eos_token_id": null}', ()),
    ],
)
def test_eos_tokens(generation: str | None, config: str | None, expected: tuple[int, ...], tmp_path: Path) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert eos_token_ids(tmp_path) == expected


@in_module_loop
async def test_a_session_of_another_model_is_refused(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Before anything else: the epoch that it came with is not remembered either."""
    stub, name = target_pb2_grpc.TargetServiceStub(channel), next(names)
    served = (await stub.GetTarget(pb.GetTargetRequest())).model.fingerprint
    assert len(served) == 32
    opening = session_stream.open_session(name, 9, PLAIN, len(PROMPT))
    call = stub.Score()
    await call.write(pb.ScoreRequest(open=pb.OpenTarget(session=opening, model_fingerprint="of another model")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    error = from_rpc_error(caught.value)
    assert (error.reason, error.metadata) == ("MODEL_MISMATCH", {"served": served})
    assert (await Stream(channel, name, epoch=1).score(0, PROMPT)).cached_len == len(PROMPT)


@in_module_loop
async def test_an_engine_without_progress_is_not_serving() -> None:
    """While a forward hangs the service says so, and when it goes on again, that."""
    settings = TargetSettings(model="none", port=0, drain_s=0)
    hanging = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = HungModel(lambda: loop.call_soon_threadsafe(hanging.set))
    engine: EngineLoop[Any] = EngineLoop(release, lambda tasks, _: [task.finish(None) for task in tasks])

    @asynccontextmanager
    async def build_hung(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, stalled_s=0.01, watch_s=0.001):
            try:
                yield
            finally:
                release.gate.set()  # else a failure of this test would wait for the engine for ever

    async with (
        serving(settings, SERVICE, build_hung) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        states = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == states.SERVING
        task = asyncio.ensure_future(engine.run(Task("a", 0, [1], 1)))
        assert (await watch.read()).status == states.NOT_SERVING
        assert hanging.is_set()
        release.gate.set()
        assert (await watch.read()).status == states.SERVING
        await task
        watch.cancel()


class HungModel:
    """Its forward hangs until the gate opens."""

    def __init__(self, entered: Callable[[], object]) -> None:
        import threading

        self.cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 16, block_tokens=8))
        self.gate = threading.Event()
        self._entered = entered

    def check(self, feed: Any) -> None:
        """Everything is good."""

    def forward(self, feeds: list[Any]) -> ForwardOutput:
        self._entered()
        self.gate.wait()
        for feed in feeds:
            feed.sequence.append(feed.tokens)
        return ForwardOutput(torch.zeros(len(feeds), 3), (None,) * len(feeds))
