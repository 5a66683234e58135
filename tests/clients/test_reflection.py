"""Tools that know no specdec call every service by reflection, as grpcurl does: `buf curl`, and a pool of messages."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import Cluster, cluster, save_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUF = Path(__file__).parents[2] / "clients/typescript/node_modules/.bin/buf"
METHODS = {
    "GenerationService/GetModel": "address",
    "StatusService/GetStatus": "address",
    "TargetService/GetTarget": "target_address",
    "DraftService/GetDraft": "draft_address",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Services that describe themselves."""
    model = save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    asked: dict[str, Any] = {"reflection": True}
    async with cluster(model, model, draft_settings=asked, target_settings=asked, reflection=True) as running:
        yield running


def called(address: str, path: str) -> dict[str, Any]:
    """Call a method with an empty message, by what the server says of itself."""
    service, method = path.split("/")
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {f"specdec.v1.{service}", "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        described = pool.FindServiceByName(f"specdec.v1.{service}").FindMethodByName(method)
        sent, answer = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        call: Any = channel.unary_unary(
            f"/specdec.v1.{path}", lambda message: message.SerializeToString(), answer.FromString
        )
        return MessageToDict(call(ParseDict({}, sent()), timeout=30))


@pytest.mark.parametrize("path", METHODS)
async def test_every_service_is_called_by_what_it_says_of_itself(served: Cluster, path: str) -> None:
    assert await asyncio.to_thread(called, getattr(served, METHODS[path]), path)


def buf_curl(address: str, *words: str) -> str:
    """Run `buf curl` without any schema but the server's own."""
    target = f"http://{address}{words[-1]}"
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *words[:-1], target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed; `make clients` installs it from the npm registry")
@pytest.mark.parametrize("path", METHODS)
async def test_a_command_line_tool_calls_every_service(served: Cluster, path: str) -> None:
    said = await asyncio.to_thread(buf_curl, getattr(served, METHODS[path]), "--data", "{}", f"/specdec.v1.{path}")
    assert json.loads(said)


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed; `make clients` installs it from the npm registry")
async def test_a_command_line_tool_generates(served: Cluster) -> None:
    request = {"text": "t5 t7", "sampling": {"maxNewTokens": 12, "ignoreEos": True}}
    said = await asyncio.to_thread(
        buf_curl, served.address, "--data", json.dumps(request), "/specdec.v1.GenerationService/Generate"
    )
    decoder, position, chunks = json.JSONDecoder(), 0, []
    while said[position:].strip():
        position += len(said[position:]) - len(said[position:].lstrip())
        chunk, position = decoder.raw_decode(said, position)
        chunks.append(chunk)
    assert sum(len(chunk.get("tokens", [])) for chunk in chunks) == 12
    assert chunks[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"
