"""What a target worker says about itself, and how one that is sick ends."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.channel import open_channel
from specdec.engine import ContiguousPool, EngineError, EngineLoop, Feed, ForwardOutput, KvCache, LayerShape, Task
from specdec.errors import (
    from_rpc_error,
)
from specdec.serving.model_worker import MAX_FAILED_FORWARDS, eos_token_ids, running
from specdec.serving.server import Server, serving
from specdec.serving.tokenizer import TokenizerMissing, fingerprint, load_tokenizer
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc
from target_service.__main__ import SERVICE
from target_service.settings import TargetSettings
from tests.support.architectures import CONTEXT_LENGTH, VOCAB_SIZE
from tests.support.cluster import save_tokenizer
from tests.support.worker_streams import PROMPT, TargetStream
from tests.workers.conftest import NUM_TOKENS
from tests.workers.target_service.streams import in_module_loop


@in_module_loop
async def test_get_target_describes_the_model(channel: grpc.aio.Channel, model_folder: Path) -> None:
    model = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model
    assert (model.name, model.vocab_size, model.context_length) == (model_folder.name, NUM_TOKENS, CONTEXT_LENGTH)
    assert (model.dtype, model.device, list(model.eos_token_ids)) == ("float32", "cpu", [0])
    assert model.vocab_size < VOCAB_SIZE, "the case is meant to have padding"
    assert model.tokenizer_fingerprint == fingerprint(load_tokenizer(str(model_folder)))


def test_tokenizers_differ_by_their_vocabulary(tmp_path: Path) -> None:
    prints = set()
    for name, size, prefix in (("a", 300, "t"), ("b", 300, "t"), ("c", 301, "t"), ("d", 300, "u")):
        (tmp_path / name).mkdir()
        prints.add(fingerprint(load_tokenizer(str(save_tokenizer(tmp_path / name, size, prefix)))))
    assert len(prints) == 3


@pytest.mark.parametrize(("name", "words"), [("./nowhere", "does not exist"), ("{empty}", "has no tokenizer.json")])
def test_a_missing_tokenizer_is_named(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=words):
        load_tokenizer(name.format(empty=tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ('{"eos_token_id": [1, 2]}', '{"eos_token_id": 3}', (1, 2)),
        ('{"eos_token_id": 4}', None, (4,)),
        (None, '{"eos_token_id": 0}', (0,)),
        ("{}", '{"text_config": {"eos_token_id": [7]}}', (7,)),
        (None, '{"eos_token_id": null}', ()),
    ],
)
def test_eos_tokens(generation: str | None, config: str | None, expected: tuple[int, ...], tmp_path: Path) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert eos_token_ids(tmp_path) == expected


@in_module_loop
async def test_a_session_of_another_model_is_refused(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """This is checked first: the epoch of the refused opening is not recorded."""
    name = next(names)
    served = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model.fingerprint
    assert len(served) == 32
    refusal = await TargetStream(channel, name, epoch=9, model_fingerprint="of another model").refused()
    assert refusal.code() == grpc.StatusCode.FAILED_PRECONDITION
    error = from_rpc_error(refusal)
    assert (error.reason, error.metadata) == ("MODEL_MISMATCH", {"served": served})
    assert (await TargetStream(channel, name, epoch=1).score(0, PROMPT)).cached_len == len(PROMPT)


@in_module_loop
async def test_an_engine_without_progress_is_not_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is NOT_SERVING while a forward hangs, and SERVING again when it continues."""
    monkeypatch.setattr("specdec.serving.model_worker.EXIT_AFTER_STALL_FACTOR", math.inf)
    hanging, loop = asyncio.Event(), asyncio.get_running_loop()
    model = HungModel(lambda: loop.call_soon_threadsafe(hanging.set))
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build_hung(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, stalled_s=0.01, watch_s=0.001):
            try:
                yield
            finally:
                model.gate.set()  # otherwise a failing test would wait for the engine forever

    async with (
        serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build_hung) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        states = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == states.SERVING
        task = asyncio.ensure_future(engine.run(Task("a", 0, [1], 1)))
        assert (await watch.read()).status == states.NOT_SERVING
        assert hanging.is_set()
        model.gate.set()
        assert (await watch.read()).status == states.SERVING
        await task
        watch.cancel()


async def test_a_worker_that_hangs_ends() -> None:
    model = HungModel(lambda: None)
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, stalled_s=0.02, watch_s=0.001):
            try:
                yield
            finally:
                model.gate.set()

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        task = asyncio.ensure_future(engine.run(Task("a", 0, [1], 1)))
        assert "hangs" in await server.failure
    with suppress(EngineError):
        await task


async def test_a_worker_whose_forwards_all_fail_ends() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error")

    engine: EngineLoop[Any] = EngineLoop(HungModel(broken), finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, 60.0, watch_s=0.001):
            yield

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        with pytest.raises(EngineError, match="CUDA error"):
            await engine.run(Task("session", 0, [1], 1))  # the worker finds out by itself that all others fail too
        assert await server.failure == (
            "the last 8 forwards have failed; the log has the cause, a new process the remedy"
        )


async def test_a_session_whose_forwards_fail_does_not_end_its_worker() -> None:
    """However often it comes again: a check in between shows that it is not the worker's fault."""

    class PoisonedModel(HungModel):
        def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
            if any(feed.sequence.key == "poisoned" for feed in feeds):
                raise RuntimeError("CUDA out of memory")
            return super().forward(feeds, when_prepared)

    model = PoisonedModel(lambda: None)
    model.gate.set()
    engine: EngineLoop[Any] = EngineLoop(model, finish_all)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with running(engine, server, 60.0, watch_s=0.001):
            yield

    async with serving(TargetSettings(model="none", port=0, drain_s=0), SERVICE, build) as server:
        for _ in range(3 * MAX_FAILED_FORWARDS):
            with pytest.raises(EngineError, match="out of memory"):
                await engine.run(Task("poisoned", 0, [1], 1))
            async with asyncio.timeout(10):
                while engine.num_failed_forwards:  # noqa: ASYNC110  # the state of another thread
                    await asyncio.sleep(0.001)
        assert not server.failure.done()
        assert model.cache.open("poisoned").length == 0


def finish_all(tasks: list[Any], logits: torch.Tensor) -> None:
    """End every task without a result."""
    for task in tasks:
        task.finish(None)


class HungModel:
    """Its forward hangs until the gate opens."""

    def __init__(self, entered: Callable[[], object]) -> None:
        self.cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 16, block_tokens=8))
        self.gate = threading.Event()
        self._entered = entered

    def check(self, feed: Feed) -> None:
        """Accept every feed."""

    def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
        when_prepared()
        self._entered()
        self.gate.wait()
        for feed in feeds:
            feed.sequence.append(feed.tokens)
        return ForwardOutput(torch.zeros(len(feeds), 3), (None,) * len(feeds))
