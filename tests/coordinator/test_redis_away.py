"""Redis is away for longer than a coordinator's patience: clients wait, and no stream fails or differs.

REDIS_AWAY_S makes it as long as `make chaos` wants it; it is short here, and so is the coordinator's patience.
"""

import asyncio
import os
from pathlib import Path

import pytest

from coordinator.__main__ import STORE_DELAY_S
from specdec.client import AsyncClient
from specdec.errors import UnavailableError
from specdec.types import SamplingParams
from tests.support.architectures import build
from tests.support.cluster import cluster, save_tokenizer
from tests.support.redis_server import RedisServer, running_redis

AWAY_S = float(os.environ.get("REDIS_AWAY_S", "3"))
NUM_STREAMS = 6
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)


async def texts(client: AsyncClient, begun: asyncio.Event) -> list[tuple[int, ...]]:
    """Generate all streams at once; `begun` is set with the first chunk of the last one."""
    missing = set(range(NUM_STREAMS))

    async def text(number: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for chunk in client.generate(prompt_token_ids=[1, 2, 3 + number], sampling=SAMPLING):
            missing.discard(number)
            if not missing:
                begun.set()
            tokens += chunk.tokens
        return tuple(tokens)

    return await asyncio.gather(*map(text, range(NUM_STREAMS)))


async def be_away(server: RedisServer, how: str) -> None:
    if how == "paused":
        with server.paused():
            await asyncio.sleep(AWAY_S)
    else:
        server.kill()
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(server.start)


@pytest.mark.parametrize("how", ["paused", "killed"])
@pytest.mark.long(but=("paused",))
async def test_streams_outlast_an_absence_of_redis(how: str, tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path / "model"), 320)
    with running_redis(append_only=True) as server:
        settings = {"store": server.url, "store_patience_s": AWAY_S / 6, "drafters": "ngram"}
        async with (
            cluster(model, **settings) as services,  # type: ignore[arg-type]
            AsyncClient(services.address, timeout_s=AWAY_S + 120) as client,
        ):
            undisturbed = await texts(client, asyncio.Event())
            begun = asyncio.Event()
            disturbed = asyncio.create_task(texts(client, begun))
            await begun.wait()
            await be_away(server, how)
            late = asyncio.create_task(texts(client, asyncio.Event()))
            assert await disturbed == undisturbed == await late


async def test_a_coordinator_that_starts_meanwhile_waits_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As long as any call does; and says what it waits for, as the address may be wrong."""
    model = save_tokenizer(build("llama", tmp_path / "model"), 320)
    with running_redis(append_only=True) as server:
        server.kill()

        async def start() -> None:
            await asyncio.sleep(STORE_DELAY_S + 1)
            await asyncio.to_thread(server.start)

        starting = asyncio.create_task(start())
        async with (
            cluster(model, store=server.url, drafters="ngram") as services,
            AsyncClient(services.address) as client,
        ):
            assert starting.done()
            await texts(client, asyncio.Event())
    assert "store_does_not_answer" in capfd.readouterr().out


async def test_a_coordinator_gives_up_at_the_end_of_its_patience(tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path / "model"), 320)
    with running_redis() as server:
        server.kill()
        with pytest.raises(UnavailableError, match="the session store does not answer"):
            async with cluster(model, store=server.url, store_patience_s=0.1):
                pass
