"""Bad input: each gets its status code and a message with the value and the remedy, and affects no other session."""

import asyncio
import math
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch

from specdec import AsyncClient, SamplingParams
from specdec.channel import REQUEST_BYTES, open_channel
from specdec.errors import InvalidArgumentError, ModelMismatchError, from_rpc_error
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from specdec.v1.types_pb2 import SamplingParams as Sampling
from specdec.v1.types_pb2 import SpeculationParams as Speculation
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import Cluster, cluster, save_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

Stub = Any  # the asynchronous one, which grpcio's types do not distinguish from the other
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GOOD = pb.TokenSequence(ids=[1, 2, 3])


def request(**fields: object) -> pb.GenerateRequest:
    """Return a request that is good but for the given fields."""
    sampling = Sampling(temperature=0, max_new_tokens=4)
    return pb.GenerateRequest(**{"tokens": GOOD, "sampling": sampling, **fields})  # type: ignore[arg-type]


def sampled(**fields: object) -> pb.GenerateRequest:
    """Return a request whose sampling parameters are bad."""
    return request(sampling=Sampling(**fields))  # type: ignore[arg-type]


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
BAD_REQUESTS = {
    "token past the vocabulary": (request(tokens=pb.TokenSequence(ids=[1, 999_999])), ["tokens.ids", "999999"]),
    "no prompt": (pb.GenerateRequest(), ["prompt", "text, tokens, chat"]),
    "empty text": (request(text=""), ["text", "empty"]),
    "empty tokens": (request(tokens=pb.TokenSequence()), ["tokens", "empty"]),
    "chat without template": (request(chat=CHAT), ["chat", "template", "send text"]),
    "prompt past the context": (request(tokens=pb.TokenSequence(ids=[1] * 100_000)), ["prompt", "100000", "context"]),
    "temperature -1": (sampled(temperature=-1), ["sampling.temperature", "-1", "[0, 100]"]),
    "temperature NaN": (sampled(temperature=math.nan), ["sampling.temperature", "nan", "[0, 100]"]),
    "temperature infinity": (sampled(temperature=math.inf), ["sampling.temperature", "inf", "[0, 100]"]),
    "top_p 0": (sampled(top_p=0), ["sampling.top_p", "0", "(0, 1]"]),
    "top_p 1.5": (sampled(top_p=1.5), ["sampling.top_p", "1.5", "(0, 1]"]),
    "min_p 2": (sampled(min_p=2), ["sampling.min_p", "2", "[0, 1]"]),
    "repetition_penalty 0": (sampled(repetition_penalty=0), ["sampling.repetition_penalty", "[0.01, 100]"]),
    "max_new_tokens 0": (sampled(max_new_tokens=0), ["sampling.max_new_tokens", "at least 1"]),
    "max_new_tokens past the limit": (sampled(max_new_tokens=10**9), ["sampling.max_new_tokens", "1000000000"]),
    "K of 1,000": (request(speculation=Speculation(num_draft_tokens=1000)), ["num_draft_tokens", "1000", "32"]),
    "10,000 stop strings": (sampled(stop=["x"] * 10_000), ["sampling.stop", "10000", "16"]),
    "empty stop string": (sampled(stop=[""]), ["sampling.stop", "0 characters"]),
    "stop token past the vocabulary": (sampled(stop_token_ids=[10**6]), ["sampling.stop_token_ids", "1000000"]),
    "logit_bias past the vocabulary": (sampled(logit_bias={10**6: 1.0}), ["sampling.logit_bias", "1000000"]),
    "logit_bias NaN": (sampled(logit_bias={1: math.nan}), ["sampling.logit_bias", "[-100, 100]"]),
    "unknown drafter": (request(speculation=Speculation(drafter="oracle")), ["speculation.drafter", "oracle", "model"]),
    "long drafter": (request(speculation=Speculation(drafter="x" * 10_000)), ["speculation.drafter", "10000", "64"]),
    "K past the server's limit": (request(speculation=Speculation(num_draft_tokens=9)), ["num_draft_tokens", "9", "8"]),
    "long request_id": (request(request_id="x" * 1000), ["request_id", "1000", "255"]),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for all tests that must not affect it."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tokenizer(build("llama", folder / "target"), VOCAB_SIZE)
    draft = save_tokenizer(build("llama", folder / "draft", seed=1), VOCAB_SIZE)
    async with cluster(target, draft, max_draft_tokens=8) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def stub(served: Cluster) -> AsyncIterator[Stub]:
    """A client without a library around it."""
    async with open_channel(served.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def outcome(call: Any) -> grpc.aio.AioRpcError:
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def good_tokens(stub: Stub) -> list[int]:
    """Return what a good request generates."""
    return [token async for chunk in stub.Generate(request()) for token in chunk.tokens]


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_request(name: str, stub: Stub) -> None:
    bad, words = BAD_REQUESTS[name]
    before = await good_tokens(stub)
    error = await outcome(stub.Generate(bad))
    assert error.code() == INVALID, error
    assert isinstance(from_rpc_error(error), InvalidArgumentError)
    assert all(word in (error.details() or "") for word in words), error.details()
    assert await good_tokens(stub) == before
    assert len(before) == 4


async def test_invalid_utf8(served: Cluster, stub: Stub) -> None:
    async with open_channel(served.address) as channel:
        raw: Any = channel.unary_stream("/specdec.v1.GenerationService/Generate")
        error = await outcome(raw(b"\x12\x02\xff\xfe"))
    assert error.code() == INVALID
    assert "UTF-8" in (error.details() or "")
    assert await good_tokens(stub)


@pytest.mark.parametrize("method", ["Generate", "Resume", "GetSession", "CancelSession", "GetModel"])
async def test_call_without_its_message_ends(method: str, served: Cluster) -> None:
    """It would wait for ever if grpc were left to expect one message."""
    async with open_channel(served.address) as channel:
        raw: Any = channel.stream_stream(f"/specdec.v1.GenerationService/{method}")
        call = raw()
        await call.done_writing()
        error = await outcome(call)
    assert error.code() == INVALID
    assert "without its message" in (error.details() or "")


async def test_unknown_session(stub: Stub) -> None:
    for call in (
        stub.GetSession(pb.GetSessionRequest(session_id="nobody")),
        stub.CancelSession(pb.CancelSessionRequest(session_id="nobody")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    error = await outcome(stub.Resume(pb.ResumeRequest(session_id="nobody")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "Generate" in (error.details() or "")


async def test_long_session_ids_are_refused_and_not_logged(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * (1 << 19)
    for call in (
        stub.GetSession(pb.GetSessionRequest(session_id=name)),
        stub.CancelSession(pb.CancelSessionRequest(session_id=name)),
        stub.Resume(pb.ResumeRequest(session_id=name)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert (caught.value.code(), len(caught.value.details() or "") < 200) == (INVALID, True)
    logged = capsys.readouterr()
    assert max(map(len, (logged.out + logged.err).splitlines()), default=0) < 1000


async def test_request_id_with_other_parameters(stub: Stub) -> None:
    first = [chunk async for chunk in stub.Generate(request(request_id="once"))]
    again = [chunk async for chunk in stub.Generate(request(request_id="once"))]
    assert [t for c in first for t in c.tokens] == [t for c in again for t in c.tokens]
    assert first[0].session_id == again[0].session_id
    other = request(request_id="once", tokens=pb.TokenSequence(ids=[5]))
    error = await outcome(stub.Generate(other))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "new request_id" in (error.details() or "")


async def test_message_of_100_mb(served: Cluster, stub: Stub) -> None:
    error = await outcome(stub.Generate(request(text="x" * (100 << 20))))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    async with AsyncClient(served.address) as client:
        with pytest.raises(InvalidArgumentError, match="shorten the prompt"):
            await client.complete("x" * (100 << 20))
    assert await good_tokens(stub)


async def test_messages_past_the_largest_request_are_refused(served: Cluster, stub: Stub) -> None:
    """Answers and messages between services may be larger."""
    error = await outcome(stub.Generate(request(text="x" * REQUEST_BYTES)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    async with AsyncClient(served.address) as client:
        with pytest.raises(InvalidArgumentError, match=r"has \d+ bytes; the maximum is \d+ .*; send a shorter prompt"):
            await client.complete("x" * REQUEST_BYTES)
    error = await outcome(stub.Generate(request(text="x" * (REQUEST_BYTES - 1000))))
    assert error.code() == INVALID


async def test_leaving_client_pauses_its_session(served: Cluster, stub: Stub) -> None:
    """A client that leaves after the first token pauses its session; another client resumes it to the same end."""
    async with AsyncClient(served.address) as client:
        greedy = SamplingParams(temperature=0, max_new_tokens=100)
        whole = await client.complete(prompt_token_ids=[1, 2, 3], sampling=greedy)
        stream = client.generate(prompt_token_ids=[1, 2, 3], sampling=greedy)
        first = await anext(stream)
        await stream.close()
        rest = [c async for c in client.resume(first.session_id, offset=first.end, digest=first.digest)]
        assert (*first.tokens, *(t for c in rest for t in c.tokens)) == whole.tokens
    assert await good_tokens(stub)


async def test_cancelled_session(served: Cluster) -> None:
    async with AsyncClient(served.address) as client:
        endless = SamplingParams(temperature=1, max_new_tokens=100, ignore_eos=True)
        stream = client.generate(prompt_token_ids=[1, 2, 3], sampling=endless)
        first = await anext(stream)
        await client.cancel(first.session_id)
        last = [first, *[chunk async for chunk in stream]][-1]
        session = await client.get_session(first.session_id)
        assert last.finish
        assert session.finish
        assert session.finish.reason == last.finish.reason
        assert len(session.tokens) == last.end


async def test_different_tokenizers(tmp_path: Path) -> None:
    target, draft = build("llama", tmp_path / "target"), build("llama", tmp_path / "draft")
    save_tokenizer(target, 300)
    save_tokenizer(draft, 300, prefix="other")
    async with cluster(target, draft, drafters="model") as running, AsyncClient(running.address) as client:
        with pytest.raises(
            ModelMismatchError, match=r"differ in tokenizer.*--target-tokenizer target, or.*num_draft_tokens"
        ):
            await client.complete(prompt_token_ids=[1, 2], sampling=SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["target_service", "--model", "./no/such/folder"], ["no/such/folder"]),
        (["target_service", "--model", "{pickle}"], ["safetensors"]),
        (["target_service", "--model", "{model}", "--port", "{taken}"], ["in use", "{taken}"]),
        (["coordinator", "--tokenizer", "{model}", "--store", "redis://127.0.0.1:{closed}", "--port", "0"], ["store"]),
        (["coordinator", "--tokenizer", "{model}", "--store", "mysql://x", "--port", "0"], ["redis://"]),
        (["draft_service", "--drafters", "oracle"], ["oracle", "ngram"]),
        (["draft_service", "--drafters", "model"], ["--model"]),
    ],
)
@pytest.mark.long(but=("arguments0-words0", "arguments4-words4", "arguments5-words5", "arguments6-words6"))
async def test_a_start_that_cannot_be(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    """One sentence on standard error, and no traceback."""
    model = save_tokenizer(build("llama", tmp_path / "model"), 320)
    pickle = tmp_path / "pickle"
    pickle.mkdir()
    (pickle / "config.json").write_text((model / "config.json").read_text())
    torch.save({}, pickle / "pytorch_model.bin")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        names = {"model": model, "pickle": pickle, "taken": taken.getsockname()[1], "closed": closed.getsockname()[1]}
        command = [sys.executable, "-m", *(argument.format(**names) for argument in arguments)]
        ended = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
        )
    sentence = [line for line in ended.stderr.splitlines() if not line.startswith(("{", "E0", "E1", "I0", "I1"))]
    assert ended.returncode in (1, 2), ended.stderr
    assert len(sentence) == 1, ended.stderr
    assert all(word.format(**names) in sentence[0] for word in words), sentence
    assert "Traceback" not in ended.stderr


async def test_concurrent_bad_and_good(served: Cluster, stub: Stub) -> None:
    """Bad requests among good ones change nothing of the good ones."""
    alone = await good_tokens(stub)
    bad = [outcome(stub.Generate(each)) for each, _ in BAD_REQUESTS.values()]
    good = [good_tokens(stub) for _ in bad]
    results = await asyncio.gather(*bad, *good)
    assert all(tokens == alone for tokens in results[len(bad) :])
