"""Two stores on one worker pool, with sessions of the same ids: each text is its own.

`python -m tests.coordinator.test_two_stores 1000` runs a thousand sessions on each store.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.session_ids import SECRET_BYTES
from coordinator.sessions import SECRET_KEY
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.errors import SpecdecError
from tests.simulation.mistakes import NO_INCARNATION, NO_PROOF, Change
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer, serving_coordinator, serving_draft, serving_target
from tests.support.redis_server import RedisServer, running_redis

NUM_SESSIONS = 12
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
DRAFTED, PLAIN = SpeculationParams(num_draft_tokens=3), SpeculationParams(num_draft_tokens=0)
AT_ONCE = 12  # sessions of each store
ANY_STREAM = Change(
    "specdec.serving.session_stream:EpochFence.check",
    "if claim.epoch == epoch and claim.stream_number < latest:",
    "if False:",
)

Text = tuple[int, ...] | None  # None: the session ended with an error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


def saved_model(folder: Path) -> Path:
    return save_tokenizer(build("llama", folder), VOCAB_SIZE)


@asynccontextmanager
async def clients(model: Path, stores: list[RedisServer]) -> AsyncIterator[list[AsyncClient]]:
    """Serve a target, a draft, and a coordinator for each store; stores with one secret give one id to one request."""
    for store in stores:
        with store.client() as connection:
            connection.flushall()
            connection.set(SECRET_KEY, bytes(SECRET_BYTES))
    async with serving_target(model) as target, serving_draft(model, drafters="model,ngram") as draft:
        facts = {"target": target, "draft": draft, "tokenizer": str(model)}
        async with (
            serving_coordinator(**facts, store=stores[0].url) as first,
            serving_coordinator(**facts, store=stores[1].url) as second,
            AsyncClient(first) as to_first,
            AsyncClient(second) as to_second,
        ):
            yield [to_first, to_second]


def prompts(count: int) -> list[list[list[int]]]:
    """Return each store's prompts: of the same lengths, so that sessions of one id are easily confused."""
    chance = random.Random(1)
    lengths = [chance.randrange(3, 9) for _ in range(count)]
    return [[[chance.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths] for _ in range(2)]


async def generated(client: AsyncClient, prompt: list[int], speculation: SpeculationParams, name: str = "") -> Text:
    try:
        completion = await client.complete(
            prompt_token_ids=prompt, sampling=GREEDY, speculation=speculation, request_id=name or None
        )
    except SpecdecError:
        return None
    return tuple(completion.tokens)


async def wrong_texts(model: Path, stores: list[RedisServer], count: int) -> int:
    """Run sessions of the same ids on both stores at once; return how many texts differ from what they are alone."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def is_wrong(client: AsyncClient, prompt: list[int], number: int) -> bool:
        async with turns:
            text = await generated(client, prompt, DRAFTED, f"request {number}")
            return text != await generated(client, prompt, PLAIN)

    async with clients(model, stores) as (first, second):
        pairs = enumerate(zip(*prompts(count), strict=True))
        checks = [
            is_wrong(client, prompt, number)
            for number, both in pairs
            for client, prompt in zip((first, second), both, strict=True)
        ]
        return sum(await asyncio.gather(*checks))


async def test_stores_on_one_worker_pool_do_not_mix(model: Path) -> None:
    with running_redis() as first, running_redis() as second:
        assert await wrong_texts(model, [first, second], NUM_SESSIONS) == 0


@pytest.mark.long
async def test_stores_would_mix_without_proof(model: Path) -> None:
    """The control: this test sees what it is about."""
    with running_redis() as first, running_redis() as second, ExitStack() as mistakes:
        for change in (NO_INCARNATION, NO_PROOF, ANY_STREAM):
            mistakes.enter_context(change.made())
        assert await wrong_texts(model, [first, second], NUM_SESSIONS) > 0


if __name__ == "__main__":
    with running_redis() as one, running_redis() as other, tempfile.TemporaryDirectory() as place:
        num = int(sys.argv[1])
        wrong = asyncio.run(wrong_texts(saved_model(Path(place)), [one, other], num))
        print(f"{wrong} of {2 * num} texts of two stores with the same ids on one worker pool were wrong")
