"""A session store with the Redis that it is in, and the rounds that tests commit to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from coordinator.generation import OutputToken, Round
from coordinator.prompts import EncodedPrompt
from coordinator.sessions import SessionStore
from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.opening import open_redis
from coordinator.stores.routes import FixedRoute
from specdec.exact.prefix import chain
from specdec.types import FinishReason, Statistics, TokenLogprobs, TokenOrigin

TTL_S = 1000.0
SESSION = "a-session"
PROMPT = (7, 8, 2**32 - 1)
LOGPROBS = TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0)))


async def create(store: SessionStore, session_id: str = SESSION, fingerprint: bytes = b"one") -> None:
    await store.create(session_id, fingerprint, b"request", EncodedPrompt(PROMPT, chain(b"", PROMPT)))


def round_after(
    before: tuple[int, ...],
    tokens: tuple[int, ...],
    finish: FinishReason | None = None,
    logprobs: TokenLogprobs | None = None,
) -> Round:
    """The round that commits `tokens` after `before`, prompt included."""
    origins = [TokenOrigin.ACCEPTED] * (len(tokens) - 1) + [TokenOrigin.BONUS]
    emitted = tuple(OutputToken(token, origin, logprobs) for token, origin in zip(tokens, origins, strict=True))
    digest = chain(b"", before)
    statistics = Statistics(num_rounds=1, num_tokens=len(tokens), draft_s=0.5, num_drafts_per_depth=(1, 1))
    return Round(len(before), digest, emitted, chain(digest, tokens), finish, statistics)


async def commit(store: SessionStore, epoch: int, played: Round) -> None:
    await store.commit(SESSION, epoch, played, played.statistics)


def tokens_of(played: Round) -> tuple[int, ...]:
    return tuple(entry.token for entry in played.emitted)


class OpenStore(SessionStore):
    """A store, and the Redis that it is in."""

    def __init__(self, client: RedisClient, ttl_s: float) -> None:
        super().__init__(client, ttl_s)
        assert isinstance(client.route, FixedRoute)
        self.redis = Redis(connection_pool=client.route.node.pool)


@asynccontextmanager
async def opened(url: str, ttl_s: float = TTL_S, patience_s: float = PATIENCE_S) -> AsyncIterator[OpenStore]:
    store = OpenStore(open_redis(url, patience_s=patience_s), ttl_s)
    try:
        yield store
    finally:
        await store.close()
