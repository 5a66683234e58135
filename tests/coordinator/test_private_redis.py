"""The embedded store: sessions outlive every process, one owner has the folder, and nothing is left behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coordinator.sessions import open_store
from coordinator.stores.private_redis import private_redis
from specdec.retry import RetryPolicy
from specdec.serving.restarts import Restarts
from specdec.serving.state_folder import FolderInUse, FolderLock, redis_server, store_folder
from tests.coordinator.test_sentinel import TTL_S, Writer
from tests.support.redis_server import executable

# a coordinator's part in it: it commits tokens and says so, until it is killed
OWNER = """
import asyncio, sys
from pathlib import Path
from coordinator.sessions import open_store
from coordinator.stores.private_redis import private_redis
from tests.coordinator.test_sentinel import Writer

async def main():
    async with private_redis(Path(sys.argv[1]), sys.argv[2], print) as address:
        writer = Writer(open_store(address, 1000.0), "s")
        await writer.begin()
        for token in range(100_000):
            await writer.commit(token)
            print(token, flush=True)

asyncio.run(main())
"""


def failed(sentence: str) -> None:
    """What a server that ends for good does to these tests."""
    raise AssertionError(sentence)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def servers_of(folder: Path) -> list[int]:
    """The processes that run in a folder."""
    found = []
    for entry in filter(lambda entry: entry.name.isdecimal(), Path("/proc").iterdir()):
        with suppress(OSError):
            if (entry / "cwd").resolve() == folder and b"redis-server" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


async def stored(address: str) -> list[int]:
    store = open_store(address, TTL_S)
    try:
        return [entry.token for entry in (await store.read("s")).emitted]
    finally:
        await store.close()


async def test_sessions_outlive_the_server(folder: Path) -> None:
    async with private_redis(folder, executable(), failed) as address:
        writer = Writer(open_store(address, TTL_S), "s")
        await writer.begin()
        for token in range(3):
            await writer.commit(token)
        await writer.store.close()
    assert servers_of(folder) == []
    async with private_redis(folder, executable(), failed) as address:
        assert await stored(address) == [0, 1, 2]


async def test_nothing_acknowledged_is_lost_when_everything_is_killed(folder: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(folder), executable()]
    owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert owner.stdout
    for _ in range(20):
        last = int(await owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in (await owner.stdout.read()).split() if line)])
    await owner.wait()
    async with private_redis(folder, executable(), failed) as address:  # it waits for its predecessor's end
        tokens = await stored(address)
        assert tokens == list(range(len(tokens)))
        assert len(tokens) > last
        assert len(servers_of(folder)) == 1
    assert servers_of(folder) == []


async def test_a_server_that_is_killed_is_started_again(folder: Path) -> None:
    async with private_redis(folder, executable(), failed) as address:
        writer = Writer(open_store(address, TTL_S), "s")
        await writer.begin()
        await writer.commit(0)
        for number in range(1, 4):
            [server] = servers_of(folder)
            os.kill(server, signal.SIGKILL)
            await writer.commit(number)
        assert await writer.stored() == [0, 1, 2, 3]
        assert writer.errors == []
        await writer.store.close()


async def test_a_server_that_ends_again_and_again_is_given_up(folder: Path) -> None:
    given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    restarts = Restarts(max_deaths=3, policy=RetryPolicy(first_s=0.0))
    async with private_redis(folder, executable(), given_up.set_result, restarts):
        killed = set[int]()
        while not given_up.done():
            for server in set(servers_of(folder)) - killed:
                killed.add(server)
                os.kill(server, signal.SIGKILL)
            await asyncio.wait([given_up], timeout=0.01)
    assert len(killed) == 3
    assert given_up.result().startswith(f"the embedded store ended 3 times in a row; see {folder}/redis.log, or give")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


async def test_a_folder_has_one_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.stores.private_redis.LOCK_PATIENCE_S", 0.1)
    sentence = rf"another specdec \(process {os.getpid()}\) has the state folder {folder}; give another"
    with locked(folder), pytest.raises(FolderInUse, match=sentence):
        async with private_redis(folder, executable(), failed):
            pass
    async with private_redis(folder, executable(), failed):
        with pytest.raises(FolderInUse):
            FolderLock(folder)
    FolderLock(folder).release()


def modes(*places: Path) -> list[int]:
    return [stat.S_IMODE(place.stat().st_mode) for place in places]


async def test_only_the_user_may_enter(folder: Path) -> None:
    async with private_redis(folder, executable(), failed) as address:
        assert modes(folder, Path(address.removeprefix("unix://"))) == [0o700, 0o700]


async def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); give another one with --state-dir"):
        FolderLock(tmp_path / "file" / "store")
    with pytest.raises(ValueError, match="too long a name for a socket in it; give another one"):
        async with private_redis(tmp_path / ("x" * 100), executable(), failed):
            pass


async def test_a_file_that_is_damaged_is_not_replaced(folder: Path) -> None:
    async with private_redis(folder, executable(), failed):
        pass
    [file] = (folder / "appendonlydir").glob("*.base.rdb")
    file.write_bytes(b"REDIS0010 but then nothing of the kind")
    with pytest.raises(ValueError, match=rf"the embedded store did not start; see {folder}/redis.log, or give another"):
        async with private_redis(folder, executable(), failed):
            pass
    assert file.read_bytes().endswith(b"of the kind")
    FolderLock(folder).release()


def test_the_folder_is_where_users_expect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert store_folder(None) == Path("/state/specdec/store")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert store_folder(None) == Path("/home/me/.local/state/specdec/store")
    assert store_folder(Path("~/here")) == Path("/home/me/here/store")
    monkeypatch.setenv("PATH", "")
    assert redis_server() is None
