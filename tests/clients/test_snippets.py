"""The Go and Java snippets of docs/client.md: the Python client's text, also when a stream breaks."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from specdec import AsyncClient, SpeculationParams
from tests.support.running_up import Up, up
from tests.support.toolchains import SOURCES, missing, program_of

ROOT = Path(__file__).parents[2]
PROMPT = "def main("
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Services:
    """A running `specdec up`, and where its coordinator listens."""

    running: Up
    address: str


@pytest.fixture(scope="module", params=SOURCES)
def program(request: pytest.FixtureRequest) -> Path:
    language: str = request.param
    if reason := missing(language):
        pytest.skip(reason)
    return program_of(language)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(program: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    models = ("--target", str(ROOT / "models/target"), "--draft", str(ROOT / "models/draft"))
    async with up(*models, "--state-dir", str(tmp_path_factory.mktemp("state"))) as running:
        yield Services(running, await running.ready())


async def expected(address: str, seed: int) -> str:
    """Return what the Python client gets."""
    speculation = SpeculationParams(num_draft_tokens=4, drafter="model")
    async with AsyncClient(address) as client:
        completion = await client.complete(
            PROMPT, max_new_tokens=200, ignore_eos=True, seed=seed, speculation=speculation
        )
    return completion.text


async def test_text_is_whole_after_a_killed_coordinator(program: Path, services: Services) -> None:
    """The target waits while its coordinator is killed, so that the stream is in its middle for certain."""
    own, running = await expected(services.address, 7), services.running
    process = await asyncio.create_subprocess_exec(
        *(program, services.address, PROMPT, "", "7"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout
    first = await process.stdout.read(1)
    children = running.children
    os.kill(children["target_service"], signal.SIGSTOP)
    os.kill(children["coordinator"], signal.SIGKILL)
    await running.logged("service_lost.*coordinator")
    os.kill(children["target_service"], signal.SIGCONT)
    rest, errors = await process.communicate()
    assert (first + rest).decode() == own
    assert "broken after" in errors.decode()
    assert errors.decode().endswith("FINISH_REASON_LENGTH, 200 tokens\n")


async def test_a_refusal_ends_the_program(program: Path, services: Services) -> None:
    process = await asyncio.create_subprocess_exec(
        *(program, services.address, "", "", "7"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert "give at least one token" in errors.decode()
