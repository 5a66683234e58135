"""Keys and certificates: the coordinator decides on keys, and the gateway serves and asks over TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from specdec.tls import TlsFiles
from tests.support.certificates import Authority
from tests.support.gateway import COMPLETION, MODEL, asked, openai_client, serving_gateway
from tests.support.guarded_coordinator import guarded_coordinator
from tests.support.scripted import TEXT, WHOLE, Service, sends
from tests.support.secure_cluster import TOKENS, write_tokens

ACME, EXAMPLE = TOKENS["acme"], TOKENS["example"]
GREEDY = COMPLETION | {"temperature": 0, "specdec": {}}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[int]:
    """A gateway in front of a coordinator that wants keys."""
    tokens = write_tokens(tmp_path / "tokens.toml", {tenant: [token] for tenant, token in TOKENS.items()})
    async with guarded_coordinator(tokens_file=tokens) as (_, _, address), serving_gateway(address) as port:
        yield port


async def test_keys_are_checked_by_the_coordinator(guarded: int) -> None:
    async with openai_client(guarded, ACME) as client:
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.completions.create(**COMPLETION, temperature=0)).usage.completion_tokens == 16
    async with openai_client(guarded, "another") as client:
        with pytest.raises(openai.AuthenticationError, match="the token is unknown") as failed:
            await client.completions.create(**COMPLETION)
        assert failed.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("header", ["", "Bearer ", "bearer"])
async def test_requests_without_a_key_are_refused(guarded: int, header: str) -> None:
    for path, content, method in (("/v1/completions", COMPLETION, "POST"), ("/v1/models", None, "GET")):
        answer = await asked(guarded, path, content, method, authorization=header)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "the call carries no token" in answer.json["error"]["message"]


async def test_gateway_is_ready_without_a_key(guarded: int) -> None:
    assert (await asked(guarded, "/readyz", None, "GET")).status == 200


async def test_tenants_share_no_session(guarded: int) -> None:
    sessions = []
    for key in (ACME, ACME, EXAMPLE):
        answer = await asked(guarded, "/v1/completions", GREEDY, authorization=f"Bearer {key}", x_request_id="same")
        sessions.append(answer.json["choices"][0]["specdec"]["session_id"])
    assert sessions[0] == sessions[1] != sessions[2]


def https(authority: Path) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(authority)))


async def complete_over_tls(port: int, files: TlsFiles) -> str:
    """Return a completion over a new connection that trusts the authority of these files."""
    url = f"https://127.0.0.1:{port}/v1"
    async with (
        https(Path(str(files.ca))) as transport,
        openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=transport) as client,
    ):
        answer: Any = await client.completions.create(**COMPLETION)
        return str(answer.choices[0].text)


async def test_gateway_serves_tls_and_renews_it(service: Service, coordinator: str, tmp_path: Path) -> None:
    first = Authority().files(tmp_path / "mine")
    service.handlers = [MODEL, *[sends(*WHOLE)] * 2]
    settings = {"tls_certificate": first.certificate, "tls_key": first.key}
    async with serving_gateway(coordinator, **settings) as port:
        assert await complete_over_tls(port, first) == TEXT
        second = Authority().files(tmp_path / "mine")
        while True:  # a connection fails until the certificate has been read again
            try:
                assert await complete_over_tls(port, second) == TEXT
                break
            except openai.APIConnectionError:
                await asyncio.sleep(0.1)


async def test_gateway_asks_over_tls(tmp_path: Path) -> None:
    files = Authority().files(tmp_path)
    tls = {"tls_certificate": files.certificate, "tls_key": files.key}
    async with (
        guarded_coordinator(**tls) as (_, _, address),
        serving_gateway(address, coordinator_tls_ca=files.ca) as port,
    ):
        assert (await asked(port, "/v1/completions", GREEDY)).json["usage"]["completion_tokens"] == 16
