"""The target worker, through real servers: scores, state, fencing, failures, and what it refuses."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.channel import MAX_MESSAGE_BYTES, open_channel
from specdec.engine import ContiguousPool, EngineError, EngineLoop, Feed, ForwardOutput, KvCache, LayerShape, Task
from specdec.errors import (
    ContextTooShortError,
    FencedError,
    InvalidArgumentError,
    UnavailableError,
    from_rpc_error,
)
from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.values import ObservationRequest, Proposal, Scores, SparseDistribution
from specdec.serving.model_worker import MAX_FAILED_FORWARDS, eos_token_ids, running
from specdec.serving.server import Server, serving
from specdec.serving.session_stream import EpochFence, SessionRounds, SessionStream, WorkerSession, serve_session
from specdec.serving.tokenizer import TokenizerMissing, fingerprint, load_tokenizer
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc, types_pb2
from target_service.__main__ import SERVICE
from target_service.scorer import Scorer, ScoreRound, ScoreTask
from target_service.settings import TargetSettings
from tests.support.architectures import CONTEXT_LENGTH, VOCAB_SIZE
from tests.support.cluster import save_tokenizer
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, connected_target, packed_supports, score_request
from tests.workers.conftest import NUM_TOKENS, Forwards, Reference

SUPPORTS = [[11, 12, 200], [13], [14, 15]]
DRAFT = [12, 13, 14]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with connected_target(model_folder) as connected:
        yield connected


in_module_loop = pytest.mark.asyncio(loop_scope="module")  # the event loop of the shared worker


def decoded(answer: pb.ScoreResponse, supports: Sequence[Sequence[int]] = SUPPORTS) -> Scores:
    """Check and unpack an answer as the coordinator does."""
    uniform_ones = tuple(SparseDistribution(tuple(ids), (1 / len(ids),) * len(ids)) for ids in supports)
    return codec.scores_from_proto(answer, Proposal(tuple(ids[0] for ids in supports), uniform_ones), NUM_TOKENS)


def values(answer: pb.ScoreResponse) -> tuple[object, ...]:
    """All fields of an answer except times."""
    return answer.support_probs, answer.tail_mass, answer.tail_tokens, answer.cached_len, list(answer.logprobs)


def assert_scores(scores: Scores, distributions: torch.Tensor, committed_length: int, seed: int = 7) -> None:
    """The scores are those of the distributions [K + 1, V], with the tail tokens drawn by their own keys."""
    supports = [*SUPPORTS[: len(distributions) - 1], []]
    for index, (position, distribution, support) in enumerate(
        zip(scores.positions, distributions, supports, strict=True)
    ):
        outside = distribution.double().clone()
        outside[support] = 0
        assert position.support_probs == pytest.approx(distribution[support].tolist(), abs=1e-5)
        assert position.tail_mass == pytest.approx(float(outside.sum()), abs=1e-5)
        assert np.float32(position.tail_mass) == position.tail_mass
        threshold = uniform(seed, Key(committed_length, index, Purpose.TAIL)) * outside.sum()
        begin, end = (
            outside.cumsum(0)[position.tail_token] - outside[position.tail_token],
            outside.cumsum(0)[position.tail_token],
        )
        assert begin - 1e-5 <= threshold <= end + 1e-5
        assert position.tail_token not in support


# ---- scores


@in_module_loop
async def test_scores_equal_transformers(channel: grpc.aio.Channel, names: Iterator[str], reference: Reference) -> None:
    stream = TargetStream(channel, next(names))
    answer = await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    distributions = reference(PROMPT + DRAFT).softmax(-1)[-4:]
    assert_scores(decoded(answer), distributions, len(PROMPT))
    assert answer.cached_len == len(PROMPT)
    assert answer.timing.forward_s > 0
    assert answer.timing.total_s >= answer.timing.forward_s
    assert 0 < answer.load.kv_cache_usage <= 1


@in_module_loop
async def test_plain_decoding_is_a_round_without_drafts(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    answer = await TargetStream(channel, next(names)).score(0, PROMPT)
    assert_scores(decoded(answer, []), reference(PROMPT).softmax(-1)[-1:], len(PROMPT))


@in_module_loop
async def test_greedy_distributions_are_one_hot(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    best = int(reference(PROMPT).argmax(-1)[-1])
    supports = [[best, 3], [13]]
    answer = await TargetStream(channel, next(names), SamplingParams(temperature=0, seed=1)).score(
        0, PROMPT, [3, 13], supports
    )
    first, second, last = decoded(answer, supports).positions
    assert (list(first.support_probs), first.tail_mass) == ([1.0, 0.0], 0.0)
    expected = reference([*PROMPT, 3, 13]).argmax(-1)[-2:].tolist()
    assert 13 not in expected, "the case is meant to reject"
    assert [(position.tail_mass, position.tail_token) for position in (second, last)] == [
        (1.0, token) for token in expected
    ]


@in_module_loop
async def test_penalties_see_the_history_of_each_position(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Position i counts the committed tokens and the first i draft tokens, also over several rounds."""
    sampling = SamplingParams(seed=7, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3)
    stream = TargetStream(channel, next(names), sampling)
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
    assert_scores(decoded(answer), logits.softmax(-1), len(PROMPT) + 2)


@in_module_loop
async def test_log_probabilities_are_the_models_own(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    sampling = SamplingParams(seed=7, temperature=0.3, top_k=2, num_logprobs=3)
    answer = await TargetStream(channel, next(names), sampling).score(0, PROMPT, DRAFT, SUPPORTS)
    scores = decoded(answer)
    expected = reference(PROMPT + DRAFT).log_softmax(-1)[-4:]
    for logprobs, distribution, position, support in zip(
        scores.logprobs, expected, scores.positions, [*SUPPORTS, []], strict=True
    ):
        assert set(logprobs.by_token) == {*support, position.tail_token}
        assert all(distribution[token] == pytest.approx(value, abs=1e-4) for token, value in logprobs.by_token.items())
        best = distribution.topk(3)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# ---- state


@in_module_loop
async def test_truncated_and_appended_text_scores_as_new(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Rejected draft tokens, deltas and prefixes: only the text matters."""
    stream = TargetStream(channel, next(names))
    await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    text = PROMPT
    for start, tokens in ((len(PROMPT), [12, 77]), (3, [1, 2, 3]), (6, [4]), (0, [9]), (1, list(range(40, 90)))):
        text = [*text[:start], *tokens]
        answer = await stream.score(start, tokens, DRAFT, SUPPORTS)
        assert_scores(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
        assert answer.cached_len == len(text)


@in_module_loop
async def test_repeated_messages_get_bitwise_equal_answers(
    channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    stream = TargetStream(channel, next(names), SamplingParams(seed=3, num_logprobs=2, frequency_penalty=0.1))
    answers = [await stream.score(0, PROMPT, DRAFT, SUPPORTS) for _ in range(3)]
    assert values(answers[0]) == values(answers[1]) == values(answers[2])
    deltas = [await stream.score(6, [12, 50], DRAFT, SUPPORTS) for _ in range(3)]
    assert values(deltas[0]) == values(deltas[1]) == values(deltas[2])
    # 12 was accepted: it is cached already, each time
    assert forwards.sizes == [9, 9, 9, 4, 4, 4], "the same forward: another shape would change the last bits"


@in_module_loop
async def test_different_seeds_draw_different_tail_tokens(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    answers = [
        await TargetStream(channel, next(names), SamplingParams(seed=seed)).score(0, PROMPT) for seed in range(20)
    ]
    assert len({answer.tail_tokens for answer in answers}) > 5


@in_module_loop
async def test_an_evicted_session_reports_its_cached_length(
    model_folder: Path, names: Iterator[str], reference: Reference
) -> None:
    """A cache of one long text: a second session evicts the first, which repeats from the beginning."""
    long = [token % 290 for token in range(100)]
    async with connected_target(model_folder, kv_cache_bytes=1 << 18) as channel:
        info = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model
        assert info.context_length == CONTEXT_LENGTH
        first = TargetStream(channel, next(names))
        await first.score(0, long)
        for _ in range(3):
            await TargetStream(channel, next(names)).score(0, long)
        answer = await first.score(100, [3], DRAFT, SUPPORTS)
        assert answer.cached_len == 0
        assert (answer.support_probs, answer.tail_tokens, answer.tail_mass) == (b"", b"", b"")
        again = await first.score(0, [*long, 3], DRAFT, SUPPORTS)
        assert_scores(decoded(again), reference([*long, 3, *DRAFT]).softmax(-1)[-4:], 101)


@in_module_loop
async def test_abandoned_streams_keep_the_cache_until_close(
    model_folder: Path, names: Iterator[str], reference: Reference
) -> None:
    async with connected_target(model_folder) as channel:
        name = next(names)
        first = TargetStream(channel, name)
        await first.score(0, PROMPT, DRAFT, SUPPORTS)
        await first.abandon()
        taken_over = TargetStream(channel, name, epoch=2)
        taken_over.text = list(PROMPT)
        answer = await taken_over.score(len(PROMPT), [12, 77], DRAFT, SUPPORTS)
        assert_scores(decoded(answer), reference([*PROMPT, 12, 77, *DRAFT]).softmax(-1)[-4:], 8)
        assert answer.load.kv_cache_usage > 0
        await taken_over.close()
        other = await TargetStream(channel, name, epoch=2).score(1, [3])
        assert (other.cached_len, other.load.kv_cache_usage) == (0, 0)


@in_module_loop
async def test_a_takeover_computes_only_new_tokens(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """A new stream sends the whole text; what the cache holds of it is kept, rejected draft tokens are not."""
    name = next(names)
    first = TargetStream(channel, name)
    await first.score(0, [*PROMPT, *range(100, 160)], DRAFT, SUPPORTS)
    await first.abandon()
    text = [*PROMPT, *range(100, 160), 12, 99]
    forwards.sizes.clear()
    answer = await TargetStream(channel, name, epoch=2).score(0, text, DRAFT, SUPPORTS)
    assert_scores(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
    assert sum(forwards.sizes) == 1 + len(DRAFT), "12 was held as a draft token, 99 is new"


@in_module_loop
async def test_batched_sessions_score_as_they_do_alone(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Different lengths, parameters and numbers of drafts in the same forwards."""
    params = [
        PLAIN,
        SamplingParams(seed=8, temperature=0),
        SamplingParams(seed=9, top_k=5, num_logprobs=1),
        SamplingParams(seed=10, top_p=0.7, presence_penalty=1.0),
    ]
    texts = [[(3 * place + length) % 290 for place in range(length)] for length in (1, 9, 30, 70)]

    def rounds() -> list[Coroutine[Any, Any, pb.ScoreResponse]]:
        return [
            TargetStream(channel, next(names), sampling, num_prompt=1).score(0, text, DRAFT[:count], SUPPORTS[:count])
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
async def test_a_newer_epoch_fences_the_older_stream(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    name = next(names)
    old = TargetStream(channel, name, epoch=3)
    await old.score(0, PROMPT)
    new = TargetStream(channel, name, epoch=4)
    await new.score(0, PROMPT)
    for message in (score_request(start=6, tokens=[1]), pb.ScoreRequest(close=types_pb2.CloseSession())):
        error = (
            await old.fail(message)
            if message.HasField("score")
            else await TargetStream(channel, name, epoch=3).fail(message)
        )
        assert error.code() == grpc.StatusCode.ABORTED
        assert isinstance(from_rpc_error(error), FencedError)
    late = await TargetStream(channel, name, epoch=2).fail(score_request(start=0, tokens=[1]))
    assert late.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7, "the owner is not disturbed"


@in_module_loop
async def test_closing_a_fenced_stream_frees_nothing(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    name = next(names)
    old = TargetStream(channel, name, epoch=1)
    await old.score(0, PROMPT)
    new = TargetStream(channel, name, epoch=2)
    await new.score(0, PROMPT)
    error = await old.fail(pb.ScoreRequest(close=types_pb2.CloseSession()))
    assert error.code() == grpc.StatusCode.ABORTED
    assert (await new.score(6, [3])).cached_len == 7


@in_module_loop
async def test_late_messages_of_an_older_stream_are_refused(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """A connection that its coordinator gave up may still deliver a round; its epoch is the current one."""
    name = next(names)
    given_up, closing = TargetStream(channel, name), TargetStream(channel, name)
    await given_up.score(0, PROMPT)
    await closing.score(0, PROMPT)
    current = TargetStream(channel, name)
    await current.score(0, [*PROMPT, 3])
    late = score_request(start=6, tokens=[1], draft_tokens=DRAFT, supports=packed_supports(*SUPPORTS))
    for stream, message in ((given_up, late), (closing, pb.ScoreRequest(close=types_pb2.CloseSession()))):
        assert (await stream.fail(message)).code() == grpc.StatusCode.UNAVAILABLE
    answer = await current.score(7, [4, 5])
    assert_scores(decoded(answer, []), reference([*PROMPT, 3, 4, 5]).softmax(-1)[-1:], len(PROMPT) + 3)


@in_module_loop
async def test_draft_tokens_are_not_a_committed_prefix(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    stream = TargetStream(channel, next(names))
    await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    assert (await stream.score(len(PROMPT) + 2, [3])).cached_len == len(PROMPT)


async def test_a_session_has_one_round_at_a_time() -> None:
    """A round of an older stream that has begun ends first; one that was only received is refused."""
    fence, events, proceed = EpochFence(), list[str](), asyncio.Event()

    class Rounds(SessionRounds):
        async def answer(self, message: pb.Score, is_first: bool) -> pb.ScoreResponse:
            events.append(f"{message.start} begins")
            await proceed.wait()
            events.append(f"{message.start} ends")
            return pb.ScoreResponse()

        def forget(self) -> None: ...

    async def serve(*starts: int) -> None:
        async def requests() -> AsyncIterator[pb.ScoreRequest]:
            yield pb.ScoreRequest(open=pb.OpenTarget())
            for start in starts:
                yield score_request(start=start)

        async def write(answer: object) -> None: ...

        session = WorkerSession("s", 1, PLAIN, 0)
        await serve_session(SessionStream(requests(), "score"), write, fence, lambda _: Rounds(session))

    older = asyncio.create_task(serve(1, 2))
    while not events:  # noqa: ASYNC110  # the round begins
        await asyncio.sleep(0)
    newer = asyncio.create_task(serve(3))
    for _ in range(10):  # turns of the event loop, more than a round needs to begin
        await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(UnavailableError):
        await older
    await newer
    assert events == ["1 begins", "1 ends", "3 begins", "3 ends"]


def test_the_fence_drops_the_least_recent_sessions() -> None:
    claims = EpochFence(max_sessions=2)

    def session(name: str, epoch: int) -> WorkerSession:
        return WorkerSession(name, epoch, PLAIN, 0)

    for name, epoch in (("a", 5), ("b", 5), ("a", 5), ("c", 5)):
        claims.enter(session(name, epoch))
    with pytest.raises(FencedError):
        claims.enter(session("a", 4))
    claims.enter(session("b", 4))


# ---- failures


@in_module_loop
async def test_a_session_with_nan_logits_fails_alone(nan_model_folder: Path, names: Iterator[str]) -> None:
    async with connected_target(nan_model_folder) as channel:
        alone = await TargetStream(channel, next(names)).score(0, PROMPT, DRAFT, SUPPORTS)
        sick = [next(names), next(names)]
        streams = [TargetStream(channel, next(names)) for _ in range(4)]
        answers, errors = await asyncio.gather(
            asyncio.gather(*(stream.score(0, PROMPT, DRAFT, SUPPORTS) for stream in streams)),
            asyncio.gather(
                *(
                    TargetStream(channel, name, SamplingParams(seed=1, temperature=heat)).fail(SICK)
                    for heat, name in enumerate(sick)
                )
            ),
        )
        for error in errors:
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "not finite" in (error.details() or "")
        for answer in answers:
            assert answer.tail_tokens == alone.tail_tokens
        assert (await streams[0].score(6, [3])).cached_len == 7
        assert (await TargetStream(channel, sick[0]).score(1, [3])).cached_len == 0, "nothing of it stays"


def test_non_finite_logits_fail_only_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sessions of the forward get the scores that they get alone."""
    finished: dict[ScoreTask, Scores] = {}
    failed: dict[ScoreTask, BaseException] = {}
    monkeypatch.setattr(ScoreTask, "finish", lambda task, scores: finished.update({task: scores}))
    monkeypatch.setattr(ScoreTask, "fail", lambda task, error: failed.update({task: error}))
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[3, 17] = math.nan
    scorer = Scorer(NUM_TOKENS, observation_window=8)
    given = ScoreRound(0, [5], [7], [[7, 8]])
    tasks = [scorer.task(WorkerSession(name, 1, PLAIN, 1), given, ObservationRequest(), match=False) for name in "abc"]
    scorer(tasks, logits)
    assert list(finished) == [tasks[0], tasks[2]]
    assert list(failed) == [tasks[1]]
    together = dict(finished)
    for task, rows in ((tasks[0], logits[:2]), (tasks[2], logits[4:])):
        scorer([task], rows)
        assert finished[task] == together[task]


@pytest.mark.parametrize(("num_layers", "hidden_size", "window"), [(3, 576, 256), (8, 8192, 64), (1, 16, 256)])
def test_observed_window_fits_into_an_answer(num_layers: int, hidden_size: int, window: int) -> None:
    scorer = Scorer(NUM_TOKENS, observation_window=256, hidden_size=hidden_size)
    asked = ObservationRequest(tuple(range(num_layers)))
    task = scorer.task(WorkerSession("a", 1, PLAIN, 1), ScoreRound(0, [5], [], []), asked, match=False)
    assert task.watch.window == window
    assert 2 * window * num_layers * hidden_size <= MAX_MESSAGE_BYTES // 2


SICK = score_request(start=0, tokens=[5, 42, 6], draft_tokens=[7], supports=packed_supports([7, 8]))


def opened(**fields: Any) -> pb.ScoreRequest:
    """Return the first message of a good session, but for these fields."""
    good: dict[str, Any] = {"session_id": "bad input", "epoch": 1, "sampling": types_pb2.SamplingParams(seed=1)}
    return pb.ScoreRequest(open=pb.OpenTarget(session=types_pb2.OpenSession(**good | fields)))


BAD_ROUNDS = {
    "no tokens": (score_request(start=0), "score.tokens"),
    "token past the vocabulary": (score_request(tokens=[NUM_TOKENS]), "score.tokens has token id 300"),
    "draft token past the vocabulary": (
        score_request(tokens=[1], draft_tokens=[310], supports=packed_supports([310])),
        "score.draft_tokens has token id 310",
    ),
    "support past the vocabulary": (
        score_request(tokens=[1], draft_tokens=[3], supports=packed_supports([3, 319])),
        "score.supports has token id 319",
    ),
    "too many draft tokens": (
        score_request(tokens=[1], draft_tokens=[1] * 33, supports=packed_supports(*[[1]] * 33)),
        "score.draft_tokens has 33",
    ),
    "past the context": (
        score_request(tokens=[1] * CONTEXT_LENGTH, draft_tokens=[1], supports=packed_supports([1])),
        "129 tokens",
    ),
    "start past the context": (score_request(start=2**32 - 1, tokens=[1]), "context"),
    "supports missing": (score_request(tokens=[1], draft_tokens=[3]), "malformed proposal"),
    "too many supports": (
        score_request(tokens=[1], draft_tokens=[3], supports=packed_supports([3], [4])),
        "more than one support",
    ),
    "own token not in the support": (
        score_request(tokens=[1], draft_tokens=[3], supports=packed_supports([4])),
        "its own draft token",
    ),
    "token twice": (score_request(tokens=[1], draft_tokens=[3], supports=packed_supports([3, 3])), "twice"),
    "sizes that do not fit": (
        score_request(
            tokens=[1],
            draft_tokens=[3],
            supports=types_pb2.SparseDistributions(
                sizes=(2).to_bytes(4, "little"), token_ids=(3).to_bytes(4, "little")
            ),
        ),
        "malformed",
    ),
    "half a number": (
        score_request(
            tokens=[1], draft_tokens=[3], supports=types_pb2.SparseDistributions(sizes=b"\1\0\0\0", token_ids=b"\3")
        ),
        "malformed",
    ),
    "huge support": (
        score_request(
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
async def test_bad_rounds_are_refused_without_side_effects(
    name: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    message, words = BAD_ROUNDS[name]
    session = next(names)
    witness = await TargetStream(channel, session).score(0, PROMPT, DRAFT, SUPPORTS)
    error = await TargetStream(channel, session).fail(message)
    expected = ContextTooShortError if "past the context" in name else InvalidArgumentError
    assert type(from_rpc_error(error)) is expected, error
    assert words in (error.details() or "")
    again = await TargetStream(channel, session).score(0, PROMPT, DRAFT, SUPPORTS)
    assert again.tail_tokens == witness.tail_tokens


BAD_OPENINGS = {
    "round first": (score_request(tokens=[1]), "score where open is due"),
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
async def test_a_bad_opening_is_refused(name: str, channel: grpc.aio.Channel) -> None:
    message, words = BAD_OPENINGS[name]
    call = target_pb2_grpc.TargetServiceStub(channel).Score()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")


@in_module_loop
async def test_an_empty_stream_ends_without_error(channel: grpc.aio.Channel) -> None:
    call = target_pb2_grpc.TargetServiceStub(channel).Score()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


# ---- what it is


@in_module_loop
async def test_get_target_describes_the_model(channel: grpc.aio.Channel, model_folder: Path) -> None:
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
    """This is checked first: the epoch of the refused opening is not recorded."""
    name = next(names)
    served = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model.fingerprint
    assert len(served) == 32
    refusal = await TargetStream(channel, name, epoch=9, model_fingerprint="of another model").refused()
    assert refusal.code() == grpc.StatusCode.FAILED_PRECONDITION
    error = from_rpc_error(refusal)
    assert (error.reason, error.metadata) == ("MODEL_MISMATCH", {"served": served})
    assert (await TargetStream(channel, name, epoch=1).score(0, PROMPT)).cached_len == len(PROMPT)


@in_module_loop
async def test_an_engine_without_progress_is_not_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is NOT_SERVING while a forward hangs, and SERVING again when it continues."""
    monkeypatch.setattr("specdec.serving.model_worker.EXIT_AFTER_STALL_FACTOR", math.inf)
    hanging, loop = asyncio.Event(), asyncio.get_running_loop()
    model = HungModel(lambda: loop.call_soon_threadsafe(hanging.set))
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build_hung(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, stalled_s=0.01, watch_s=0.001):
            try:
                yield
            finally:
                model.gate.set()  # otherwise a failing test would wait for the engine forever

    async with (
        serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build_hung) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        states = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == states.SERVING
        task = asyncio.ensure_future(engine.run(Task("a", 0, [1], 1)))
        assert (await watch.read()).status == states.NOT_SERVING
        assert hanging.is_set()
        model.gate.set()
        assert (await watch.read()).status == states.SERVING
        await task
        watch.cancel()


async def test_a_worker_that_hangs_ends() -> None:
    model = HungModel(lambda: None)
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, stalled_s=0.02, watch_s=0.001):
            try:
                yield
            finally:
                model.gate.set()

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        task = asyncio.ensure_future(engine.run(Task("a", 0, [1], 1)))
        assert "hangs" in await server.failure
    with suppress(EngineError):
        await task


async def test_a_worker_whose_forwards_all_fail_ends() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error")

    engine: EngineLoop[Any] = EngineLoop(HungModel(broken), finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, 60.0, watch_s=0.001):
            yield

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        with pytest.raises(EngineError, match="CUDA error"):
            await engine.run(Task("session", 0, [1], 1))  # the worker finds out by itself that all others fail too
        assert await server.failure == (
            "the last 8 forwards have failed; the log has the cause, a new process the remedy"
        )


async def test_a_session_whose_forwards_fail_does_not_end_its_worker() -> None:
    """However often it comes again: a check in between shows that it is not the worker's fault."""

    class PoisonedModel(HungModel):
        def forward(self, feeds: list[Feed]) -> ForwardOutput:
            if any(feed.sequence.key == "poisoned" for feed in feeds):
                raise RuntimeError("CUDA out of memory")
            return super().forward(feeds)

    model = PoisonedModel(lambda: None)
    model.gate.set()
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, 60.0, watch_s=0.001):
            yield

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        for _ in range(3 * MAX_FAILED_FORWARDS):
            with pytest.raises(EngineError, match="out of memory"):
                await engine.run(Task("poisoned", 0, [1], 1))
            async with asyncio.timeout(10):
                while engine.num_failed_forwards:  # noqa: ASYNC110  # the state of another thread
                    await asyncio.sleep(0.001)
        assert not server.failure.done()
        assert model.cache.open("poisoned").length == 0


def finish_all(tasks: list[Any], logits: torch.Tensor) -> None:
    """End every task without a result."""
    for task in tasks:
        task.finish(None)


class HungModel:
    """Its forward hangs until the gate opens."""

    def __init__(self, entered: Callable[[], object]) -> None:
        self.cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 16, block_tokens=8))
        self.gate = threading.Event()
        self._entered = entered

    def check(self, feed: Feed) -> None:
        """Accept every feed."""

    def forward(self, feeds: list[Feed]) -> ForwardOutput:
        self._entered()
        self.gate.wait()
        for feed in feeds:
            feed.sequence.append(feed.tokens)
        return ForwardOutput(torch.zeros(len(feeds), 3), (None,) * len(feeds))
