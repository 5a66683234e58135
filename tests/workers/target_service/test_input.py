"""Rounds, openings and logits that a target worker refuses, each alone."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from specdec.channel import MAX_MESSAGE_BYTES
from specdec.errors import (
    ContextTooShortError,
    InvalidArgumentError,
    from_rpc_error,
)
from specdec.exact.values import ObservationRequest, Scores
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc, types_pb2
from target_service.scorer import Scorer, ScoreRound, ScoreTask
from tests.support.architectures import CONTEXT_LENGTH, VOCAB_SIZE
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, connected_target, packed_supports, score_request
from tests.workers.conftest import NUM_TOKENS
from tests.workers.target_service.streams import DRAFT, SUPPORTS, in_module_loop


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
    "too many draft lengths": (
        score_request(tokens=[1], next_round=pb.NextRound(draft_lengths=[1] * 16)),
        "score.next_round has 16 draft lengths; at most 15",
    ),
    "too long a draft in the next round": (
        score_request(tokens=[1], next_round=pb.NextRound(draft_lengths=[1, 33])),
        "score.next_round has a draft length of 33; at most 32",
    ),
    "too many draft tokens to offer": (
        score_request(tokens=[1], next_round=pb.NextRound(num_offered=33)),
        "score.next_round has 33 draft tokens to offer; at most 32",
    ),
    "no chance": (
        score_request(tokens=[1], next_round=pb.NextRound(stop_below=math.nan)),
        "score.next_round has a chance of nan; a chance is 0 to 1",
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
