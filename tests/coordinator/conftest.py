"""Session stores, and a Redis that loses replies."""

from collections.abc import AsyncIterator

import pytest

from tests.support.proxy import Proxy, running_proxy
from tests.support.redis_server import RedisServer
from tests.support.stored_sessions import OpenStore, opened


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """An empty store of each kind."""
    url = "memory" if request.param == "memory" else request.getfixturevalue("redis_url")
    async with opened(url) as store:
        yield store


@pytest.fixture
async def proxy(redis_server: RedisServer, redis_url: str) -> AsyncIterator[Proxy]:
    async with running_proxy(redis_server.port) as proxy:
        yield proxy
