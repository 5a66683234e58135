"""Cancelling during a long prompt: at once for the client, and the worker stops reading it and frees its cache."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from prometheus_client import REGISTRY

from coordinator.pool.resolving import resolver
from coordinator.pool.watching import watching
from coordinator.streams import SessionOpening
from coordinator.target import TargetWorkers, target_watch
from specdec import AsyncClient, SamplingParams, SessionStatus, SpeculationParams
from specdec.engine import LanguageModel
from specdec.exact.values import Proposal
from specdec.serving import session_stream
from specdec.serving.channels import open_worker_channel
from specdec.types import FinishReason
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer, serving_coordinator, serving_target

CHUNK_TOKENS = 64
PROMPT = [7] * 120


class SlowForwards:
    """Lets some of a model's forwards pass, and the others when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_passing: int = 0) -> None:
        self.num_begun = 0
        self._turns = threading.Semaphore(num_passing)
        self._is_open = False
        forward = LanguageModel.forward

        def slow(model: LanguageModel, feeds: Any, when_prepared: Callable[[], None]) -> Any:
            self.num_begun += 1
            when_prepared()  # else nobody is told of the rounds before this one while it hangs
            if not self._is_open:
                self._turns.acquire()
            return forward(model, feeds, when_prepared)

        monkeypatch.setattr(LanguageModel, "forward", slow)

    def open(self) -> None:
        """Let all pass from now on."""
        self._is_open = True
        self._turns.release()


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    model = save_tokenizer(build("llama", tmp_path / "model"), VOCAB_SIZE)
    settings = {"prefill_chunk_tokens": CHUNK_TOKENS, "max_batch_tokens": CHUNK_TOKENS}
    async with serving_target(model, **settings) as address:
        yield address, model


MakeSlow: TypeAlias = Callable[..., SlowForwards]


@pytest.fixture
def slow_forwards(target: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSlow]:
    """Make forwards slow; at the end all pass, so that a test that fails does not hang as well."""
    made = list[SlowForwards]()

    def make(num_passing: int = 0) -> SlowForwards:
        made.append(SlowForwards(monkeypatch, num_passing))
        return made[-1]

    yield make
    for forwards in made:
        forwards.open()


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110  # the state of another thread
        await asyncio.sleep(0.001)


def kv_usage() -> float:
    return REGISTRY.get_sample_value("specdec_target_kv_cache_usage") or 0.0


@pytest.mark.parametrize("elsewhere", [False, True], ids=["at the owner", "at another coordinator"])
async def test_cancelling_stops_a_long_prefill(
    target: tuple[str, Path], redis_url: str, slow_forwards: MakeSlow, elsewhere: bool
) -> None:
    address, model = target
    forwards = slow_forwards()
    settings = {"target": address, "draft": "", "tokenizer": str(model), "store": redis_url}
    async with (
        serving_coordinator(**settings) as one,
        serving_coordinator(**settings) as two,
        AsyncClient(one) as client,
        AsyncClient(two if elsewhere else one) as canceller,
    ):
        stream = client.generate(
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_new_tokens=4),
            speculation=SpeculationParams(num_draft_tokens=0),
            request_id="long",
        )
        following = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda: forwards.num_begun)
        session_id = await session_of(redis_url)
        assert await canceller.cancel(session_id) is SessionStatus.CANCELLED
        chunk = await following  # while the forward still hangs
        assert chunk.finish
        assert (chunk.finish.reason, chunk.tokens) == (FinishReason.CANCELLED, ())
        forwards.open()
        await until(lambda: kv_usage() == 0)
        assert forwards.num_begun == 1, "the second half of the prompt is not read"
        await stream.cancel()


async def test_a_worker_says_that_a_round_is_in_progress(
    target: tuple[str, Path], slow_forwards: MakeSlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_stream, "IN_PROGRESS_S", 0.01)
    forwards = slow_forwards()
    async with watching(target_watch(resolver(target[0]), open_worker_channel)) as pool:
        workers = TargetWorkers(pool, timeout_s=20, patience_s=0)
        scorer = workers.open(
            SessionOpening("slow", 1, SamplingParams(seed=1), len(PROMPT), lambda length: b""), VOCAB_SIZE
        )
        scoring = asyncio.ensure_future(scorer.score(PROMPT, Proposal()))
        await until(lambda: workers.loads.load.prompt_s > 0 or workers.loads.load.num_resident)
        assert not scoring.done()
        forwards.open()
        assert (await scoring).scores.positions
        await scorer.close()


async def test_cancelling_frees_the_cache(target: tuple[str, Path], slow_forwards: MakeSlow) -> None:
    """Of rounds that were committed before the one that is cut."""
    address, model = target
    forwards = slow_forwards(num_passing=5)
    async with (
        serving_coordinator(target=address, draft="", tokenizer=str(model)) as served,
        AsyncClient(served) as client,
    ):
        sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
        stream = client.generate(
            prompt_token_ids=[7] * 10, sampling=sampling, speculation=SpeculationParams(num_draft_tokens=0)
        )
        chunks = [await anext(stream)]
        while sum(len(chunk.tokens) for chunk in chunks) < 5:  # the target goes on before these are committed
            chunks.append(await anext(stream))
        await until(lambda: forwards.num_begun == 6)
        assert kv_usage() > 0
        await client.cancel(chunks[0].session_id)
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish
        assert chunks[-1].finish.reason is FinishReason.CANCELLED
        assert sum(len(chunk.tokens) for chunk in chunks) == 5
        forwards.open()
        await until(lambda: kv_usage() == 0)


async def session_of(redis_url: str) -> str:
    """The only session in the store."""
    from redis.asyncio import Redis

    async with Redis.from_url(redis_url) as redis:
        (key,) = [key async for key in redis.scan_iter("specdec:*:meta")]
    return str(key.decode().split("{")[1].split("}")[0])
