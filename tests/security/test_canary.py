"""Nothing of prompts, texts, tokens and passwords reaches a log, a metric, an error or, after its time, the store."""

import asyncio
import json
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import pytest
import pytest_asyncio
import structlog

from specdec import AsyncClient, Completion, SamplingParams, SpecdecError, SpeculationParams
from specdec.errors import UnauthenticatedError
from specdec.serving.telemetry import configure_logs
from specdec.tls import channel_credentials
from tests.support.certificates import Authority
from tests.support.secure_cluster import TOKENS, SecureCluster, secure_cluster
from tests.support.secure_redis import SecureRedis, secure_redis

NUM_PROMPTS = int(os.environ.get("SECURITY_PROMPTS", "30"))
PASSWORD = f"password-{secrets.token_hex(8)}"
GUESSED = f"guessed-{secrets.token_hex(8)}"
LETTERS = re.compile(r"[a-z]+")


def canary() -> str:
    """Return a word that is nowhere else."""
    return f"canary{secrets.token_hex(8)}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SecureRedis]:
    with secure_redis(Authority().files(tmp_path / "redis", "redis"), PASSWORD) as running:
        yield running


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """All logs of the process, once they are configured."""
    monkeypatch.setattr(sys, "stderr", StringIO())
    assert isinstance(sys.stderr, StringIO)
    return sys.stderr


@pytest_asyncio.fixture
async def talkative(pair: Path, tmp_path: Path, store: SecureRedis, logs: StringIO) -> AsyncIterator[SecureCluster]:
    """All three services, which log everything that they can, with sessions that live for seconds."""
    hooks, before = (sys.excepthook, sys.unraisablehook, threading.excepthook), structlog.get_config()
    handlers, level = logging.root.handlers[:], logging.root.level
    configure_logs("test", "debug", "json")
    url = {"store": store.url(PASSWORD), "session_ttl_s": 10.0}
    async with secure_cluster(pair, pair, tmp_path / "secure", **url) as running:
        yield running
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.captureWarnings(False)
    structlog.configure(**before)


async def test_canaries_are_found_nowhere(talkative: SecureCluster, store: SecureRedis, logs: StringIO) -> None:
    words = [canary() for _ in range(NUM_PROMPTS)]
    async with AsyncClient(talkative.address, tls=talkative.client, token=TOKENS["acme"], timeout_s=30) as client:
        texts = [each for some in batches(words) for each in await asyncio.gather(*(complete(client, w) for w in some))]
        await client.complete("t5", max_new_tokens=1, request_id="reused")
        errors = [await refused(client, given) for given in refused_requests(words[0])]
    errors.append(await wrong_token(talkative))
    metrics = prometheus_client.generate_latest().decode()
    forbidden = {*words, PASSWORD, GUESSED, *TOKENS.values(), *map(sentence, texts)}
    for name, said in {"logs": logs.getvalue(), "metrics": metrics, "errors": "\n".join(errors)}.items():
        assert said.count("\n") > 2, f"nothing was found in {name}, for there was nothing"
        assert [word for word in forbidden if word in said] == [], name
    assert "round_scored" in logs.getvalue(), "the logs are not those of level debug"
    assert_no_token_ids(logs.getvalue())
    await until_forgotten(store, words)


def batches(words: list[str], size: int = 10) -> Iterator[list[str]]:
    """Give a few words at a time: a session must not wait for longer than it lives."""
    for begin in range(0, len(words), size):
        yield words[begin : begin + size]


async def complete(client: AsyncClient, word: str) -> Completion:
    """Complete a prompt with a word in it: in the prompt, or in the stop string."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, stop=(word,), num_logprobs=2)
    return await client.complete(f"t5 {word} t7", sampling=sampling, request_id=f"request {word}")


def sentence(completion: Completion) -> str:
    """Return the text, or what cannot be in a log where it has no letters."""
    return completion.text if LETTERS.search(completion.text) else canary()


def refused_requests(word: str) -> list[dict[str, Any]]:
    """Return requests with a canary that are refused, each for another reason."""
    prompt = f"t5 {word}"
    return [
        # first, as that session lives for seconds; short, so that no machine is too slow to let it in
        {"prompt": prompt, "request_id": "reused", "max_new_tokens": 2},
        {"prompt": prompt, "request_id": "x" * 300},
        {"prompt": prompt, "max_new_tokens": 10**6},
        {"prompt": prompt, "logit_bias": {10**6: 1.0}},
        {"prompt": prompt, "speculation": SpeculationParams(drafter="nothing")},
        {"messages": [("user", prompt)]},
    ]


async def refused(client: AsyncClient, given: dict[str, Any]) -> str:
    """Return everything that the error about a refused request tells."""
    call: Any = client.chat if "messages" in given else client.complete
    with pytest.raises(SpecdecError) as caught:
        await call(**given)
    cause: Any = caught.value.__cause__
    return f"{caught.value} {caught.value.metadata} {cause and cause.trailing_metadata()}\n"


async def wrong_token(secure: SecureCluster) -> str:
    """Return what is said about a token that is a guess."""
    async with AsyncClient(secure.address, tls=secure.client, token=GUESSED) as client:
        with pytest.raises(UnauthenticatedError) as caught:
            await client.get_model()
    credentials = channel_credentials(secure.client.read())
    async with grpc.aio.secure_channel(secure.address, credentials) as channel:
        metadata = (("authorization", GUESSED),)
        get_model: Any = channel.unary_unary("/specdec.v1.GenerationService/GetModel")
        call = get_model(b"\xff", metadata=metadata)
        return f"{caught.value}\n{await call.details()}\n"


def assert_no_token_ids(logs: str) -> None:
    """No event has a list of numbers, which would be token ids."""
    events = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    assert len(events) > NUM_PROMPTS
    for event in events:
        numbers = [
            name for name, value in event.items() if isinstance(value, list) and value and isinstance(value[0], int)
        ]
        assert not numbers, event


async def until_forgotten(store: SecureRedis, words: list[str]) -> None:
    """Wait until the store holds its secret and nothing else; before that it holds the sessions."""
    with store.admin() as admin:
        async with asyncio.timeout(20):
            while (names := admin.keys("*")) != [b"specdec:secret"]:
                assert not [word for word in words if any(word.encode() in name for name in names)], "ids of clients"
                await asyncio.sleep(0.1)
