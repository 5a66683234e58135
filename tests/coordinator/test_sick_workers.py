"""Target workers that are sick, stopped, or gone: real processes, and a coordinator that goes on with the others."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from specdec import AsyncClient, SamplingParams, SpeculationParams
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer, serving_coordinator
from tests.support.ports import free_port
from tests.support.target_process import target_process

in_module_loop = pytest.mark.asyncio(loop_scope="module")
PLAIN = SpeculationParams(num_draft_tokens=0)
NUM_TOKENS = 60
BUSY = 3  # how many times longer a busy machine may take than it took a moment ago


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)


def at(*ports: int) -> str:
    return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def generate(client: AsyncClient, number: int, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
    prompt = [number + 1, 7, 3 * number + 2]
    return (await client.complete(prompt_token_ids=prompt, sampling=sampling, speculation=PLAIN)).tokens


async def seconds_of_wave(client: AsyncClient, expected: list[tuple[int, ...]]) -> float:
    """Return how long all sessions take together; fail if one of them generates something else."""
    began_s = time.monotonic()
    assert await asyncio.gather(*(generate(client, number) for number in range(12))) == expected
    return time.monotonic() - began_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(model: Path) -> AsyncIterator[list[tuple[int, ...]]]:
    """What an undisturbed target generates."""
    async with (
        target_process(model) as (_, port),
        serving_coordinator(target=at(port), draft="", tokenizer=str(model)) as address,
        AsyncClient(address) as client,
    ):
        yield [await generate(client, number) for number in range(12)]


@in_module_loop
@pytest.mark.long
async def test_a_worker_whose_forwards_all_fail_costs_no_session(model: Path, expected: list[tuple[int, ...]]) -> None:
    """And its process ends with an error, so that its supervisor starts another."""
    async with (
        target_process(model, num_forwards=40) as (sick, port),
        target_process(model) as (_, other),
        serving_coordinator(target=at(port, other), draft="", tokenizer=str(model)) as address,
        AsyncClient(address) as client,
    ):
        async with asyncio.timeout(120):
            # until the sick one, which is on trial in between, has failed often enough
            while sick.returncode is None:
                await seconds_of_wave(client, expected)
            assert await sick.wait() == 1


@in_module_loop
@pytest.mark.long
async def test_a_stopped_worker_costs_seconds(model: Path, expected: list[tuple[int, ...]]) -> None:
    async with (
        target_process(model) as (stopped, port),
        target_process(model) as (_, other),
        serving_coordinator(target=at(port, other), draft="", tokenizer=str(model)) as address,
        AsyncClient(address) as client,
    ):
        await generate(client, 0)
        calm_s = await seconds_of_wave(client, expected)
        stopped.send_signal(signal.SIGSTOP)
        assert await seconds_of_wave(client, expected) < 2.5 + BUSY * calm_s
        later_s = [await seconds_of_wave(client, expected) for _ in range(2)]
        assert min(later_s) < BUSY * calm_s, "nobody tries the stopped worker again, wave after wave"


@in_module_loop
@pytest.mark.long
async def test_a_target_that_returns_serves_within_seconds(model: Path, expected: list[tuple[int, ...]]) -> None:
    """The session waits for it; what else waits there has no worker to ask, and no connection to set up."""
    port = free_port()
    async with target_process(model, port) as (first, _):
        running = serving_coordinator(target=at(port), draft="", tokenizer=str(model), target_patience_s=120)
        address = await running.__aenter__()
    try:
        assert await first.wait() < 0
        async with AsyncClient(address) as client:
            waiting = asyncio.create_task(generate(client, 1))
            await asyncio.sleep(4.0)  # pauses between probes, and between attempts to connect, have grown
            async with target_process(model, port):
                began_s = time.monotonic()
                assert await waiting == expected[1]
                assert time.monotonic() - began_s < 5.0
    finally:
        await running.__aexit__(None, None, None)
