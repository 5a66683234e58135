"""`specdec up` is killed with all that belongs to it, and started again: a client's stream goes on."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.client import AsyncClient
from specdec.types import SamplingParams
from tests.coordinator.test_private_redis import servers_of
from tests.support.architectures import build
from tests.support.cluster import save_tokenizer
from tests.support.ports import free_port

NUM_TOKENS = 120
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@asynccontextmanager
async def up(model: Path, port: int, state_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run it; yield once it serves. Killed at the end, if it has not ended."""
    flags = ["--target", str(model), "--draft", "none", "--dtype", "float32", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec", "up", *flags, "--state-dir", str(state_dir)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout
    try:
        assert await process.stdout.readline() == f"specdec ready on 127.0.0.1:{port}\n".encode()
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def refusal(model: Path, state_dir: Path) -> str:
    """What a second one on the same folder says."""
    flags = ["--target", str(model), "--port", "0", "--state-dir", str(state_dir)]
    command = [sys.executable, "-m", "specdec", "up", *flags]
    second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await second.communicate()
    assert second.returncode == 1
    return said.decode()


@pytest.mark.long
async def test_a_stream_outlives_the_whole_service(tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path / "model"), 320)
    state_dir, port = tmp_path / "state", free_port()
    async with AsyncClient(f"127.0.0.1:{port}", timeout_s=200) as client:
        async with up(model, port, state_dir):
            assert "another specdec (process " in await refusal(model, state_dir)
            stream = client.generate(prompt_token_ids=[1, 2, 3], sampling=SAMPLING, request_id="r").__aiter__()
            chunks = [await anext(stream)]
        async with up(model, port, state_dir) as again:
            assert len((await client.get_session(chunks[0].session_id)).tokens) < NUM_TOKENS
            chunks += [chunk async for chunk in stream]
            tokens = [token for chunk in chunks for token in chunk.tokens]
            undisturbed = await client.complete(prompt_token_ids=[1, 2, 3], sampling=SAMPLING)
            assert tokens == list(undisturbed.tokens)
            assert len(tokens) == NUM_TOKENS
            again.send_signal(signal.SIGTERM)
            await again.wait()
    assert servers_of(state_dir / "store") == []
