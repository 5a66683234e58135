"""Signed tokens of an issuer whose keys are looked up: rotation, absence, and tokens that somebody else made."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from specdec import AsyncClient, UnauthenticatedError, UnavailableError
from specdec.serving.security import key_set
from specdec.serving.security.discovery import WELL_KNOWN, discovered
from specdec.watched import WatchedError
from tests.support.fake_issuer import AUDIENCE, KEYS, FakeIssuer, fake_issuer
from tests.support.guarded_coordinator import guarded_coordinator

ISSUER = "https://issuer.example"


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIssuer]:
    monkeypatch.setattr(key_set, "MIN_REFRESH_S", 0.0)
    with fake_issuer() as running:
        yield running


def trusting(issuer: FakeIssuer) -> Any:
    """Serve a coordinator that knows nothing of the issuer but its name."""
    return guarded_coordinator(jwt_issuer=issuer.url, jwt_audience=AUDIENCE)


async def test_keys_are_found_by_the_issuers_name(issuer: FakeIssuer) -> None:
    async with trusting(issuer) as (_, _, address), AsyncClient(address, token=issuer.sign()) as client:
        await asyncio.gather(*(client.get_model() for _ in range(20)))
    assert issuer.asked == {WELL_KNOWN: 1, KEYS: 1}, "once for all calls"


async def test_rotation_under_load_refuses_nobody(issuer: FakeIssuer) -> None:
    num_rotations, num_clients, num_done = 5, 4, 0

    async def call(client: AsyncClient) -> None:
        nonlocal num_done
        while True:
            await client.get_model()
            num_done += 1

    async with trusting(issuer) as (_, _, address), AsyncClient(address, token=issuer.sign, max_retries=0) as client:
        calls = [asyncio.create_task(call(client)) for _ in range(num_clients)]
        for _ in range(num_rotations):
            goal = num_done + 2 * num_clients
            while num_done < goal and not any(task.done() for task in calls):  # noqa: ASYNC110  # other tasks count
                await asyncio.sleep(0.001)
            issuer.rotate()
        for task in calls:
            task.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    assert issuer.asked[KEYS] <= num_rotations + 1, "not once a call"


async def test_issuer_that_is_away_at_the_start_is_asked_again(issuer: FakeIssuer) -> None:
    issuer.stop()
    async with trusting(issuer) as (_, _, address), AsyncClient(address, token=issuer.sign, max_retries=0) as client:
        with pytest.raises(UnavailableError, match="keys cannot be fetched; try again") as caught:
            await client.get_model()
        assert caught.value.retry_after_s
        issuer.start()
        await client.get_model()


async def test_known_keys_outlive_their_issuer(issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "REFRESH_S", 0.0)
    async with trusting(issuer) as (_, _, address), AsyncClient(address, token=issuer.sign, max_retries=0) as client:
        await client.get_model()
        issuer.stop()
        for _ in range(5):
            await client.get_model()
        issuer.rotate()
        with pytest.raises(UnauthenticatedError, match="does not publish"):
            await client.get_model()


def forgeries(issuer: FakeIssuer) -> dict[str, tuple[str, str]]:
    """Return tokens that somebody else could make, each with what its caller is told."""
    stranger = ec.generate_private_key(ec.SECP256R1())
    return {
        "another audience": (issuer.sign(aud="another"), "another audience"),
        "another issuer": (issuer.sign(iss=ISSUER), "another issuer"),
        "no expiry": (issuer.sign(exp=None), "lacks a claim"),
        "expired": (issuer.sign(exp=1.0), "expired"),
        "no signature": (issuer.sign(algorithm="none"), "is not valid"),
        "another's key": (issuer.sign(key=stranger), "is not valid"),
        "the public key as a secret": (issuer.sign(algorithm="HS256", key=issuer.public_key), "is not valid"),
        "no tenant": (issuer.sign(sub=None), "lacks a claim"),
        "a tenant of other letters": (issuer.sign(sub="a b"), "names no tenant"),
    }


async def test_forged_tokens_are_refused(issuer: FakeIssuer) -> None:
    async with trusting(issuer) as (_, _, address):
        for token, words in forgeries(issuer).values():
            async with AsyncClient(address, token=token, max_retries=0) as client:
                with pytest.raises(UnauthenticatedError, match=words):
                    await client.get_model()


DOCUMENTS = {
    "of another issuer": (json.dumps({"issuer": "https://other.example", "jwks_uri": ISSUER}), "of another issuer"),
    "no JSON": ("<html>", "no discovery document"),
    "a list": ("[]", "no discovery document"),
    "too long": (" " * (2 << 20), "no discovery document"),
    "no keys": (json.dumps({"issuer": ISSUER}), "no https address of keys"),
    "keys in plain text": (
        json.dumps({"issuer": ISSUER, "jwks_uri": "http://issuer.example/keys"}),
        "no https address",
    ),
    "keys in a file": (json.dumps({"issuer": ISSUER, "jwks_uri": "file:///etc/passwd"}), "no https address"),
    "half an address": (json.dumps({"issuer": ISSUER, "jwks_uri": "https://[::1"}), "no https address"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_discovery_documents_that_cannot_be_trusted_are_refused(name: str) -> None:
    document, words = DOCUMENTS[name]
    asked: list[str] = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        return document.encode()

    with pytest.raises(WatchedError, match=words):
        discovered(ISSUER, fetch)
    assert asked == [ISSUER + WELL_KNOWN], "nothing else is fetched"
