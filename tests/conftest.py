"""Fixtures of several test files."""

import faulthandler
import gc
import logging
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType

import pytest
import structlog

from tests.support.redis_server import RedisServer, running_redis

# servers in the test's own process log a line a request, as they do by default, not one a round
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))

# what a shell started in the background ignores SIGINT, and so would the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A timeout raises in the test, where an event loop may swallow it, and is not set again for what a fixture does at the
# end. What outlasts it by so much says where it is and has its process ended: xdist goes on with another one.
HANGS_AFTER_S = 120.0
GRACE_S = 10.0  # for what needs the interpreter; after it the stacks are printed without


class Watch:
    """Ends the process of a test that hangs."""

    def __init__(self, out: int) -> None:
        self._out = out  # a file descriptor
        self._timer = threading.Timer(0, self._end)

    def start(self, item: pytest.Item, seconds: float) -> None:
        """Give a test so long from now, instead of what it was given before."""
        self.stop()
        self._timer = threading.Timer(seconds, self._end, (item.nodeid, seconds))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=self._out)

    def stop(self) -> None:
        """Watch no more."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _end(self, test: str, seconds: float) -> None:
        faulthandler.dump_traceback(self._out)
        with open(self._out, "w", closefd=False) as file:
            for frame in filter(None, map(_suspended, gc.get_objects())):
                code = frame.f_code
                print(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}', file=file)
            print(f"{test} hangs: not over after {seconds:g} s; above are threads, then what awaits", file=file)
        os._exit(1)


def _suspended(thing: object) -> FrameType | None:
    if type(thing) is CoroutineType:  # not isinstance, which asks some proxies for more than they can say
        return thing.cr_frame
    return thing.ag_frame if type(thing) is AsyncGeneratorType else None


WATCH = pytest.StashKey[Watch]()
LONG = "long(*cases, but=()): takes long: all its cases, or those named, or all but those; `--short` leaves it out"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test` take minutes: of what is marked as long it runs the cases that are not."""
    parser.addoption("--short", action="store_true", help="leave out what is marked as long")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way out, which is captured later, for the watch; say what marks mean."""
    config.stash[WATCH] = Watch(os.dup(2))
    config.addinivalue_line("markers", LONG)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as long, if only the others are wanted. Raises UsageError for a mark of no case."""
    if config.getoption("short"):
        check_marks(items)
        config.hook.pytest_deselected(items=[item for item in items if is_long(item)])
        items[:] = [item for item in items if not is_long(item)]


def is_long(item: pytest.Item) -> bool:
    """Return whether a test, or this case of it, is marked as long."""
    marker, case = item.get_closest_marker("long"), _case(item)
    if marker is None:
        return False
    return case in marker.args if marker.args else case not in marker.kwargs.get("but", ())


def check_marks(items: list[pytest.Item]) -> None:
    """Raise UsageError for marks that name a case which its test, collected as a whole, does not have."""
    cases = defaultdict[str, set[str]](set)
    for item in items:
        cases[item.nodeid.partition("[")[0]].add(_case(item))
    for item in items:
        test, marker = item.nodeid.partition("[")[0], item.get_closest_marker("long")
        unknown = {*marker.args, *marker.kwargs.get("but", ())} - cases[test] if marker else set()
        if unknown and len(cases[test]) > 1:
            raise pytest.UsageError(
                f"{test} has no case {', '.join(sorted(unknown))}; name its cases in its mark `long`"
            )


def _case(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let no test hold up all others."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker and marker.args else item.config.getoption("timeout", None)
    item.config.stash[WATCH].start(item, float(given or item.config.getini("timeout")) + HANGS_AFTER_S)
    try:
        return (yield)
    finally:
        item.config.stash[WATCH].stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Watch over fixtures that end: pytest has stopped watching where a test failed."""
    item.config.stash[WATCH].start(item, HANGS_AFTER_S)
    return (yield)


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
