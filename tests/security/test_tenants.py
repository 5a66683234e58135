"""Another tenant's session, and a guessed one, look exactly like one that never was."""

import hashlib
import os
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from coordinator.session_ids import SessionName
from specdec import AlreadyExistsError, AsyncClient, NotFoundError, SamplingParams
from specdec.connection import Stub
from specdec.tls import channel_credentials
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from tests.support.secure_cluster import TOKENS, SecureCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
UNKNOWN = "00000000000000000000000000000000"
NUM_GUESSES = int(os.environ.get("SECURITY_GUESSES", "500"))


@pytest_asyncio.fixture(loop_scope="module")
async def acme(secure: SecureCluster) -> AsyncIterator[AsyncClient]:
    """A client of one tenant."""
    async with AsyncClient(secure.address, tls=secure.client, token=TOKENS["acme"]) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def example(secure: SecureCluster) -> AsyncIterator[AsyncClient]:
    """A client of another tenant."""
    async with AsyncClient(secure.address, tls=secure.client, token=TOKENS["example"]) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def stub(secure: SecureCluster) -> AsyncIterator[Stub]:
    """The service without a client library in between."""
    credentials = channel_credentials(secure.client.read())
    async with grpc.aio.secure_channel(secure.address, credentials) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def as_tenant(tenant: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a tenant's calls."""
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


async def test_tenants_do_not_share_request_ids(acme: AsyncClient, example: AsyncClient) -> None:
    first = await acme.complete(prompt_token_ids=PROMPT, sampling=SAMPLING, request_id="order-1")
    again = await acme.complete(prompt_token_ids=PROMPT, sampling=SAMPLING, request_id="order-1")
    other = await example.complete(prompt_token_ids=[9], sampling=SAMPLING, request_id="order-1")
    assert first.session_id == again.session_id != other.session_id
    with pytest.raises(AlreadyExistsError):
        await acme.complete(prompt_token_ids=[9], sampling=SAMPLING, request_id="order-1")


async def ending(call: Any) -> tuple[grpc.StatusCode, str | None, Any]:
    """Return everything that a caller sees of a failed call."""
    answer = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    trailing = tuple(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details(), trailing


@pytest.mark.parametrize("method", ["Resume", "GetSession", "CancelSession"])
async def test_another_tenants_session_looks_unknown(method: str, acme: AsyncClient, stub: Stub) -> None:
    """Code, message and trailers are the same to the byte, for a session that has ended and for one that runs."""
    ended = await acme.complete(prompt_token_ids=PROMPT, sampling=SAMPLING)
    longer = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
    async with acme.generate(prompt_token_ids=PROMPT, sampling=longer) as stream:
        await anext(aiter(stream))
        assert stream.session_id
        seen = []
        for session_id in (ended.session_id, stream.session_id, UNKNOWN):
            request: Message = getattr(pb, f"{method}Request")(session_id=session_id)
            seen.append(await ending(getattr(stub, method)(request, metadata=as_tenant("example"))))
        assert seen[0] == seen[1] == seen[2]
        assert seen[0][0] == grpc.StatusCode.NOT_FOUND
    assert (await acme.get_session(ended.session_id)).tokens == ended.tokens


async def test_names_of_the_store_open_nothing(acme: AsyncClient, example: AsyncClient) -> None:
    """A client that knows how the store names sessions cannot name another tenant's."""
    ended = await acme.complete(prompt_token_ids=PROMPT, sampling=SAMPLING)
    stored = SessionName.of("acme", ended.session_id).stored
    assert stored != ended.session_id
    for client in (acme, example):
        with pytest.raises(NotFoundError):
            await client.get_session(stored)


async def test_guessed_request_ids_find_nothing(acme: AsyncClient, stub: Stub) -> None:
    """Guesses are the unkeyed hashes of real request ids. Each second call asks for another tenant's real session."""
    real = [await acme.complete(prompt_token_ids=PROMPT, sampling=SAMPLING, request_id=f"job-{n}") for n in range(5)]
    times: dict[str, list[float]] = {"acme": [], "example": []}
    for number in range(NUM_GUESSES):
        guess = hashlib.blake2b(f"job-{number}".encode(), digest_size=16).hexdigest()
        for tenant, session_id in (("acme", guess), ("example", real[number % 5].session_id)):
            begin = time.perf_counter()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetSession(pb.GetSessionRequest(session_id=session_id), metadata=as_tenant(tenant))
            times[tenant].append(time.perf_counter() - begin)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    # figures, not a condition: no test depends on the machine's load
    guessed, foreign = (1e3 * statistics.median(times[tenant]) for tenant in ("acme", "example"))
    print(f"median of {NUM_GUESSES}: guessed {guessed:.3f} ms, another tenant's {foreign:.3f} ms")
