"""A scripted service, a client of it, and a port where nobody listens."""

import socket
from collections.abc import AsyncIterator

import pytest

from specdec import AsyncClient
from tests.support.scripted import Service, served


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    """Where the service listens."""
    async with served(service) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
