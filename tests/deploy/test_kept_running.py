"""`specdec up` keeps its services running: a stream goes on through the death of any of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.client import AsyncClient
from specdec.retry import RetryPolicy
from specdec.serving.child import LogLine
from specdec.serving.local import CannotRun, Command, Options, Stack, running
from specdec.serving.local.part import Part
from specdec.serving.restarts import Restarts
from specdec.types import SamplingParams, SpeculationParams
from tests.coordinator.test_private_redis import servers_of
from tests.support.architectures import build
from tests.support.cluster import save_tokenizer

SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
SPECULATION = SpeculationParams(num_draft_tokens=4, drafter="ngram")
QUICK = RetryPolicy(first_s=0.0)
# a service that says what it is told to, and ends
TOY = """
import sys
print('{"event": "listening", "port": 7}\\n{"event": "ready", "port": 7}\\nlast words', *sys.argv[1:], flush=True)
sys.exit(3)
"""


class Log:
    """What the services say, as it is said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, LogLine]] = []
        self._said = asyncio.Event()

    def __call__(self, name: str, entry: LogLine) -> None:
        self.lines.append((name, entry))
        self._said.set()

    def count(self, name: str, event: str) -> int:
        return sum((name, event) == (who, entry.get("event")) for who, entry in self.lines)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._said.clear()
            await self._said.wait()


@asynccontextmanager
async def stack(folder: Path, log: Log) -> AsyncIterator[Stack]:
    model = save_tokenizer(build("llama", folder / "model"), 320)
    options = Options(
        str(model), "ngram", port=0, state_dir=str(folder / "state"), dtype="float32", target_threads=1, drain_s=0.0
    )
    async with running(options, log) as services:
        yield services


async def test_a_stream_goes_on_through_the_death_of_any_part(tmp_path: Path) -> None:
    log = Log()
    async with stack(tmp_path, log) as services, AsyncClient(services.address, timeout_s=250) as client:

        async def tokens_with(kill: Callable[[], None]) -> list[int]:
            tokens: list[int] = []
            async for chunk in client.generate(prompt_token_ids=[1, 2, 3], sampling=SAMPLING, speculation=SPECULATION):
                if not tokens:
                    kill()
                tokens += chunk.tokens
            return tokens

        undisturbed = await tokens_with(lambda: None)
        assert len(undisturbed) == SAMPLING.max_new_tokens
        first = {child.name: (child.pid, child.port.result()) for child in services.children}
        assert set(first) == {"target worker", "draft worker", "coordinator"}
        store = tmp_path / "state" / "store"

        def kill_store() -> None:
            [server] = servers_of(store)
            os.kill(server, signal.SIGKILL)

        assert await tokens_with(kill_store) == undisturbed
        await log.until(lambda: log.count("coordinator", "embedded_store_ended") == 1)
        for name, (number, _) in first.items():
            assert await tokens_with(lambda number=number: os.kill(number, signal.SIGKILL)) == undisturbed  # type: ignore[misc]
            await log.until(lambda name=name: log.count(name, "ready") == 2)  # type: ignore[misc]
            assert log.count(name, "service_lost") == 1
        last = {child.name: (child.pid, child.port.result()) for child in services.children}
        assert {name: port for name, (_, port) in last.items()} == {name: port for name, (_, port) in first.items()}
        assert all(last[name][0] != first[name][0] for name in first)
        assert len(servers_of(store)) == 1
    assert servers_of(store) == []


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A service that ends as soon as it serves."""
    package = tmp_path / "toy_service"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(TOY)
    (package / "settings.py").write_text("from specdec.serving.settings import ServiceSettings as SETTINGS")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return Command("target worker", "toy_service", ("--host", "here"))


async def test_a_part_that_ends_again_and_again_ends_everything(toy: Command) -> None:
    log = Log()
    part = Part(toy, log, Restarts(max_deaths=3, policy=QUICK))
    part.is_kept = True
    with pytest.raises(CannotRun) as caught:
        await part.run()
    assert str(caught.value) == (
        "the target worker ended 3 times in a row, each within 60 s of being ready; at last the target worker ended "
        "with exit code 3: last words --host here --port 7; it said:\n"
        "  listening port=7\n  ready port=7\n  last words --host here --port 7"
    )
    assert [log.count("target worker", event) for event in ("ready", "service_lost")] == [3, 2]


async def test_a_draft_worker_is_started_without_end(toy: Command) -> None:
    restarts = Part(Command("draft worker", toy.module, toy.flags), Log())._restarts
    assert all(restarts.pause_s() is not None for _ in range(100))


async def test_a_part_that_cannot_start_ends_everything_at_once(toy: Command) -> None:
    """Its port is taken, its model is no model: another start would end like the first."""
    with pytest.raises(CannotRun, match=r"^the target worker ended with exit code 3: last words --host here$"):
        await Part(toy, Log(), Restarts(policy=QUICK)).run()
