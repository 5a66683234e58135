"""Fixtures of several test files."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import structlog

from tests.support.redis_server import RedisServer, running_redis

# servers in the test's own process log a line a request, as they do by default, not one a round
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))

# what a shell started in the background ignores SIGINT, and so would the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests, and what they start, out of the user's state folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One redis-server for all tests that do not break it; its data are wiped between tests by `redis_url`."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes share the test files: one more than cores, as many tests wait for what they started."""
    return (os.cpu_count() or 1) + 1
