"""A gateway in front of a scripted service, and OpenAI's client of it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import coordinators
from tests.support.gateway import MODEL, openai_client, serving_gateway
from tests.support.scripted import Service, served


@pytest.fixture(autouse=True)
def _model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gateway ask for the model once, however slow the machine is."""
    monkeypatch.setattr(coordinators, "KNOWN_S", 1e9)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def coordinator(service: Service) -> AsyncIterator[str]:
    """Where the scripted service listens."""
    async with served(service) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def port(service: Service, coordinator: str) -> AsyncIterator[int]:
    """Where the gateway listens; it has asked for the model once, and knows it for some seconds."""
    service.handlers.append(MODEL)
    async with serving_gateway(coordinator) as port:
        service.requests.clear()
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[Any]:
    async with openai_client(port) as client:
        yield client
