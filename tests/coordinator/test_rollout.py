"""A rolling change of the target's weights: each text is one model's alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.capabilities import ServedModels
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.errors import ModelMismatchError
from specdec.types import ModelInfo
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer, serving_coordinator, serving_target
from tests.support.redis_server import free_port

NUM_SESSIONS = 20
NUM_TOKENS = 300
PLAIN = SpeculationParams(num_draft_tokens=0)
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[number + 1, 7, 3 * number + 2] for number in range(NUM_SESSIONS)]
PATIENCE_S = 2.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape and tokenizer, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return tuple(_model(folder / name, seed) for seed, name in enumerate(("old", "new")))  # type: ignore[return-value]


def _model(folder: Path, seed: int) -> Path:
    save_tokenizer(build("llama", folder, seed=seed), VOCAB_SIZE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


class Fleet:
    """Target workers on fixed ports behind one address; each starts and stops when it is told."""

    def __init__(self, size: int) -> None:
        self._ports = [free_port() for _ in range(size)]
        self._stacks: dict[int, AsyncExitStack] = {}

    @property
    def address(self) -> str:
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self._ports)

    async def start(self, number: int, model: Path) -> None:
        self._stacks[number] = AsyncExitStack()
        await self._stacks[number].enter_async_context(serving_target(model, port=self._ports[number]))

    async def stop(self, number: int) -> None:
        await self._stacks.pop(number).aclose()

    async def close(self) -> None:
        for number in list(self._stacks):
            await self.stop(number)


@asynccontextmanager
async def fleet(size: int) -> AsyncIterator[Fleet]:
    running = Fleet(size)
    try:
        yield running
    finally:
        await running.close()


async def texts(model: Path) -> list[tuple[int, ...]]:
    """What the model generates alone."""
    async with (
        serving_target(model) as target,
        serving_coordinator(target=target, draft="", tokenizer=str(model)) as address,
        AsyncClient(address) as client,
    ):
        calls = [client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=PLAIN) for prompt in PROMPTS]
        return [completion.tokens for completion in await asyncio.gather(*calls)]


class Follower:
    """One session, followed to its end."""

    def __init__(self, client: AsyncClient, prompt: list[int]) -> None:
        self._chunks = client.generate(prompt_token_ids=prompt, sampling=GREEDY, speculation=PLAIN)
        self.tokens: list[int] = []
        self.session_id = ""
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for chunk in self._chunks:
            self.session_id = chunk.session_id
            self.tokens += chunk.tokens


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the state of another server
        await asyncio.sleep(0.01)


async def new_model_serves(client: AsyncClient, old: str) -> None:
    while (await client.get_model()).target.fingerprint == old:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_a_rolling_change_splits_no_text(models: tuple[Path, Path]) -> None:
    old, new = models
    old_texts, new_texts = await texts(old), await texts(new)
    assert not set(old_texts) & set(new_texts)
    async with fleet(4) as workers:
        await workers.start(0, old)
        await workers.start(1, old)
        settings = {"target": workers.address, "draft": "", "tokenizer": str(old), "target_patience_s": PATIENCE_S}
        async with serving_coordinator(**settings) as address, AsyncClient(address) as client:
            fingerprint = (await client.get_model()).target.fingerprint
            followers = [Follower(client, prompt) for prompt in PROMPTS]
            await until(lambda: all(follower.tokens for follower in followers))
            await workers.start(2, new)
            await workers.stop(0)
            await workers.start(3, new)
            assert not any(follower.task.done() for follower in followers)
            await new_model_serves(client, fingerprint)
            created: list[Completion] = await asyncio.gather(
                *(
                    client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=PLAIN)
                    for prompt in PROMPTS[:4]
                )
            )
            await asyncio.gather(*(follower.task for follower in followers))
    assert [tuple(follower.tokens) for follower in followers] == old_texts
    assert [completion.tokens for completion in created] == new_texts[:4]


async def test_a_model_that_is_gone_ends_its_sessions(models: tuple[Path, Path], redis_url: str) -> None:
    """At the coordinator that ran the session, and after a takeover."""
    old, new = models
    async with fleet(2) as workers:
        await workers.start(0, old)
        settings = {"target": workers.address, "draft": "", "tokenizer": str(old), "target_patience_s": PATIENCE_S}
        async with (
            serving_coordinator(**settings, store=redis_url) as address,
            serving_coordinator(**settings, store=redis_url) as elsewhere,
            AsyncClient(address) as client,
            AsyncClient(elsewhere) as other,
        ):
            follower = Follower(client, PROMPTS[0])
            await until(lambda: bool(follower.tokens))
            await workers.start(1, new)
            await workers.stop(0)
            with pytest.raises(ModelMismatchError, match="model of this session's text"):
                await follower.task
            with pytest.raises(ModelMismatchError, match="model of this session's text"):
                async for _ in other.resume(follower.session_id, offset=len(follower.tokens)):
                    pass
            assert (await other.get_session(follower.session_id)).tokens == tuple(follower.tokens)


def model(fingerprint: str) -> ModelInfo:
    return ModelInfo("model", fingerprint=fingerprint)


def newest(*rounds: str) -> str:
    """The newest model after rounds of answers, one letter an answer."""
    served = ServedModels()
    for answers in rounds:
        served.observe([model(fingerprint) for fingerprint in answers])
    return served.newest.fingerprint if served.newest else ""


def test_the_model_that_answered_last_is_the_newest() -> None:
    assert newest("aa", "ab", "aa", "ab") == "b"
    assert newest("aa", "ab", "bb") == "b"
    assert newest("aa", "ab", "aa", "aa") == "a", "b has gone, as when a rollout is undone"


def test_silence_changes_nothing() -> None:
    assert newest("") == ""
    assert newest("ab", "", "", "") == newest("ab")


def test_the_most_frequent_of_new_models_counts() -> None:
    assert newest("abb") == newest("bba") == "b"
