"""Streams whose token is withdrawn, expires or loses its key: they end, and their sessions can be resumed."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from specdec import AsyncClient, SamplingParams, SpeculationParams, UnauthenticatedError
from specdec.errors import UnavailableError
from specdec.serving.security import key_set, running_calls
from specdec.serving.security.json_web_tokens import LEEWAY_S
from specdec.serving.security.running_calls import RunningCalls
from tests.support.fake_issuer import AUDIENCE, fake_issuer
from tests.support.guarded_coordinator import guarded_coordinator
from tests.support.secure_cluster import write_tokens
from tests.support.toy_coordinator import LENGTH, PROMPT, SEED, Gate, ToyCoordinator, generation_tasks

SAMPLING = SamplingParams(seed=SEED, max_new_tokens=LENGTH)
PLAIN = SpeculationParams(num_draft_tokens=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at running calls often; files are looked at once in a second as ever."""
    monkeypatch.setattr(running_calls, "CHECK_PERIOD_S", 0.01)


def stream(client: AsyncClient) -> Any:
    return client.generate(prompt_token_ids=PROMPT, sampling=SAMPLING, speculation=PLAIN)


async def undisturbed(coordinator: ToyCoordinator, client: AsyncClient) -> tuple[int, ...]:
    completion = await client.complete(prompt_token_ids=PROMPT, sampling=SAMPLING, speculation=PLAIN)
    return completion.tokens


async def until_parked(coordinator: ToyCoordinator) -> None:
    while len(coordinator.running) or generation_tasks() or len(coordinator.admission):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_withdrawn_token_ends_its_streams_alone(tmp_path: Path) -> None:
    """The session is left as by a client that goes away, and the tenant's next token resumes it to the same text."""
    file = write_tokens(tmp_path / "tokens.toml", {"acme": ["old", "new"], "example": ["other"]})
    async with (
        guarded_coordinator(tokens_file=file) as (coordinator, server, address),
        AsyncClient(address, token="old") as old,
        AsyncClient(address, token="new") as new,
        AsyncClient(address, token="other") as other,
    ):
        expected = await undisturbed(coordinator, new)
        coordinator.toys.before = gate = Gate(6)
        async with stream(old) as ending, stream(other) as staying:
            first, theirs = await anext(ending), await anext(staying)
            seen = list(first.tokens)
            write_tokens(file, {"acme": ["new"], "example": ["other"]})
            with pytest.raises(UnauthenticatedError, match="withdrawn"):
                await read_into(seen, ending)
            assert len(server.calls) == 1
            coordinator.toys.before = Gate()
            gate.opened.set()
            assert (*theirs.tokens, *[token async for chunk in staying for token in chunk.tokens]) == expected
        await until_parked(coordinator)
        with pytest.raises(UnauthenticatedError):
            await old.get_session(first.session_id)
        rest = [token async for chunk in new.resume(first.session_id, offset=len(seen)) for token in chunk.tokens]
        assert (*seen, *rest) == expected
        assert not len(server.calls)


async def test_client_with_a_new_token_notices_nothing(tmp_path: Path) -> None:
    """It asks for the token at each attempt: the stream goes on with the one of the moment."""
    file, token = write_tokens(tmp_path / "tokens.toml", {"acme": ["old", "new"]}), "old"
    async with (
        guarded_coordinator(tokens_file=file) as (coordinator, _, address),
        AsyncClient(address, token=lambda: token, max_retries=0) as client,
    ):
        expected = await undisturbed(coordinator, client)
        coordinator.toys.before = gate = Gate(6)
        async with stream(client) as chunks:
            tokens = list((await anext(chunks)).tokens)
            token = "new"
            write_tokens(file, {"acme": ["new"]})
            following = asyncio.create_task(rest_of(chunks))
            while len(coordinator.toys.scorers) < 3:  # noqa: ASYNC110  # the second session was opened again
                await asyncio.sleep(0.001)
            gate.opened.set()
            assert (*tokens, *await following) == expected


async def read_into(seen: list[int], chunks: Any) -> None:
    async for chunk in chunks:
        seen += chunk.tokens


async def rest_of(chunks: Any) -> list[int]:
    return [token async for chunk in chunks for token in chunk.tokens]


async def test_streams_end_when_their_token_expires() -> None:
    with fake_issuer() as issuer:
        async with guarded_coordinator(jwt_issuer=issuer.url, jwt_audience=AUDIENCE) as (coordinator, _, address):
            coordinator.toys.before = Gate(4)
            soon = issuer.sign(exp=time.time() - LEEWAY_S + 2.0)
            async with AsyncClient(address, token=soon) as client:
                with pytest.raises(UnauthenticatedError, match="expired"):
                    await rest_of(stream(client))
            await until_parked(coordinator)


async def test_streams_end_when_their_key_is_no_longer_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "MIN_REFRESH_S", 0.0)
    monkeypatch.setattr(key_set, "REFRESH_S", 0.1)
    with fake_issuer() as issuer:
        async with guarded_coordinator(jwt_issuer=issuer.url, jwt_audience=AUDIENCE) as (coordinator, _, address):
            coordinator.toys.before = Gate(4)
            async with AsyncClient(address, token=issuer.sign()) as client, stream(client) as chunks:
                await anext(chunks)
                issuer.stop()
                asked = dict(issuer.asked)
                await asyncio.sleep(0.3)
                issuer.rotate()
                issuer.forget()
                issuer.start()
                with pytest.raises(UnauthenticatedError, match="does not publish"):
                    await rest_of(chunks)
            assert asked
            await until_parked(coordinator)


class Uncertain:
    """A credential whose validity nobody can tell at first."""

    tenant = "acme"
    answers: list[Exception | None]

    async def check(self) -> None:
        answer = self.answers.pop(0)
        if answer:
            raise answer


async def test_calls_go_on_while_nobody_can_tell() -> None:
    calls, credential = RunningCalls(), Uncertain()
    credential.answers = [UnavailableError("the issuer is away"), None, UnauthenticatedError("withdrawn")]

    async def call() -> None:
        async with calls.during(credential):
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    for _ in range(2):
        await calls.check()
        await asyncio.sleep(0)
        assert len(calls) == 1
    await calls.check()
    with pytest.raises(UnauthenticatedError, match="withdrawn"):
        await running
    assert not len(calls)


async def test_caller_that_leaves_meanwhile_is_cancelled() -> None:
    calls, credential = RunningCalls(), Uncertain()
    credential.answers = [UnauthenticatedError("withdrawn")]

    async def call() -> None:
        async with calls.during(credential):
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    await calls.check()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
