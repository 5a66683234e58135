"""Fixtures of several test files."""

import faulthandler
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


# A timeout raises in the test, where an event loop may swallow it, and is not set again for what a fixture does at the
# end. What outlasts it by so much has its stacks printed and its process ended: xdist goes on with another one.
HANGS_AFTER_S = 300.0
STDERR = pytest.StashKey[int]()  # which is not captured


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way out for what `_watch` prints."""
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let no test hold up all others."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker and marker.args else item.config.getoption("timeout", None)
    _watch(item, float(given or item.config.getini("timeout")) + HANGS_AFTER_S)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Watch over fixtures that end: pytest has stopped watching where a test failed."""
    _watch(item, HANGS_AFTER_S)
    return (yield)


def _watch(item: pytest.Item, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[STDERR])


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
