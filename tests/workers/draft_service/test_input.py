"""A draft worker without a model, and input and sessions that it refuses, each alone."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from draft_service.registry import registered
from draft_service.settings import SETTINGS as DraftSettings
from draft_service.settings import chosen_kinds
from specdec.exact.values import SparseDistribution
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb
from specdec.v1 import draft_pb2_grpc, types_pb2
from tests.support.architectures import CONTEXT_LENGTH
from tests.support.worker_streams import PROMPT, DraftStream, propose_request
from tests.workers.conftest import NUM_TOKENS
from tests.workers.draft_service.streams import decoded, in_module_loop, served


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
