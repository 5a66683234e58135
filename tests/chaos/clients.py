"""Clients of the service: they follow sessions, leave and return, follow together, cancel, and note what they get."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from specdec.client import AsyncClient
from specdec.completion import Chunk, SessionStatus
from specdec.errors import OverloadedError, SpecdecError
from specdec.retry import Retry
from specdec.stream import AsyncStream
from specdec.types import SamplingParams, SpeculationParams
from tests.chaos.ledger import LOST, Ledger, Session, Text, View
from tests.chaos.service import Service
from tests.support.architectures import VOCAB_SIZE

TIMEOUT_S = 300.0  # until a client gives up, which is a violation
MAX_TEXTS = 48  # different requests: each is run once without faults first


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the clients of one session do."""

    coordinator: int  # that the first one asks first
    leaves_after: int | None  # chunks; then it returns by `resume`, at another coordinator
    away_s: float
    second_after_s: float | None  # another client follows the same session from then on
    cancels: bool  # instead of returning


def drawn_texts(chance: random.Random, num_sessions: int) -> list[Text]:
    """Return different requests."""
    return [_text(chance) for _ in range(min(num_sessions, MAX_TEXTS))]


def _text(chance: random.Random) -> Text:
    prompt = tuple(chance.randrange(1, VOCAB_SIZE) for _ in range(chance.randrange(4, 40)))
    sampling = SamplingParams(max_new_tokens=chance.randrange(40, 121), ignore_eos=True, seed=chance.getrandbits(32))
    kind = chance.choice(("greedy", "greedy", "seeded", "free"))
    if kind == "greedy":
        drafter = chance.choice((None, "model", "ngram"))
        num_draft_tokens = chance.choice((None, 1, 4)) if drafter else chance.choice((None, 0))
        return Text(
            prompt,
            replace(sampling, temperature=0.0),
            SpeculationParams(num_draft_tokens=num_draft_tokens, drafter=drafter),
        )
    if kind == "seeded":
        return Text(prompt, sampling, SpeculationParams(num_draft_tokens=chance.choice((0, 2, 4)), drafter="model"))
    return Text(prompt, sampling, SpeculationParams())


def drawn_behaviour(chance: random.Random) -> Behaviour:
    """Return what the clients of one session do."""
    leaves = chance.random() < 0.25
    return Behaviour(
        coordinator=chance.randrange(1 << 16),
        leaves_after=chance.randrange(1, 12) if leaves else None,
        away_s=chance.uniform(0.0, 2.0),
        second_after_s=chance.uniform(0.0, 1.0) if chance.random() < 0.125 else None,
        cancels=leaves and chance.random() < 0.2,
    )


async def undisturbed(service: Service, texts: list[Text]) -> list[Text]:
    """Return the requests with what they give without faults."""
    async with service.client(0, TIMEOUT_S) as client:

        async def completed(text: Text) -> Text:
            if not text.has_fixed_text:
                return text
            stream = client.generate(prompt_token_ids=text.prompt, sampling=text.sampling, speculation=text.speculation)
            return replace(text, undisturbed=await stream.result())

        return list(await asyncio.gather(*map(completed, texts)))


class Clients:
    """The clients of all sessions; one connection to each order of coordinators."""

    def __init__(self, service: Service, ledger: Ledger, mistake: str = "") -> None:
        self._ledger, self._mistake = ledger, mistake
        count = len(service.coordinator_ports)
        self._clients = [service.client(number, TIMEOUT_S, on_retry=self._note_retry) for number in range(count)]

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    async def follow(self, session: Session, behaviour: Behaviour) -> None:
        """Let the clients of one session do what they do; compare what they got with its log."""
        self._ledger.sessions.append(session)
        following = [self._first(session, behaviour)]
        if behaviour.second_after_s is not None:
            following.append(self._second(session, behaviour))
        await asyncio.gather(*following)

    async def compare(self, session: Session) -> None:
        """Compare what the clients of a session got with its log, as it is now."""
        if not session.session_id:
            return self._ledger.finish(session, None if session.is_lost else [])
        try:
            found = await self._clients[0].get_session(session.session_id)
        except LOST:
            self._ledger.finish(session, None)
        else:
            session.is_cancelled = session.is_cancelled or found.status is SessionStatus.CANCELLED
            self._ledger.finish(session, found.tokens)

    async def _first(self, session: Session, behaviour: Behaviour) -> None:
        client = self._client(behaviour.coordinator)
        stream = self._generated(client, session)
        view = self._ledger.began(session, time.monotonic())
        try:
            digest = await self._read(stream, view, behaviour.leaves_after)
            if view.end_s is None:
                await asyncio.sleep(behaviour.away_s)
                await self._return(session, view, behaviour, digest)
        except SpecdecError as error:
            self._ledger.failed(session, error)

    async def _return(self, session: Session, view: View, behaviour: Behaviour, digest: bytes) -> None:
        client = self._client(behaviour.coordinator + 1)
        if behaviour.cancels:
            session.is_cancelled = True
            await client.cancel(session.session_id)
        again = client.resume(session.session_id, offset=len(view.tokens), digest=digest)
        await self._read(again, view, None)

    async def _second(self, session: Session, behaviour: Behaviour) -> None:
        await asyncio.sleep(behaviour.second_after_s or 0.0)
        view = self._ledger.began(session, time.monotonic())
        try:
            await self._read(self._generated(self._client(behaviour.coordinator + 1), session), view, None)
        except SpecdecError as error:
            self._ledger.failed(session, error)

    async def _read(self, stream: AsyncStream, view: View, num_chunks: int | None) -> bytes:
        """Read so many chunks, or to the end; return the last digest."""
        digest = b""
        async with stream, aclosing(TAMPERED[self._mistake](stream)) as chunks:
            async for chunk in chunks:
                self._ledger.observed(view, chunk, time.monotonic())
                digest = chunk.digest
                if chunk.finish:
                    view.end_s = time.monotonic()
                    self._ledger.endings[chunk.finish.reason.name.lower()] += 1
                elif num_chunks is not None:
                    num_chunks -= 1
                    if num_chunks == 0:
                        break
        return digest

    def _generated(self, client: AsyncClient, session: Session) -> AsyncStream:
        text = session.text
        return client.generate(
            prompt_token_ids=text.prompt,
            sampling=text.sampling,
            speculation=text.speculation,
            request_id=session.name,
        )

    def _client(self, number: int) -> AsyncClient:
        return self._clients[number % len(self._clients)]

    def _note_retry(self, retry: Retry) -> None:
        self._ledger.num_retries += 1
        self._ledger.num_refused += isinstance(retry.failure, OverloadedError)


# ---- mistakes of clients, which the ledger must find


async def _as_it_is(stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
    async for chunk in stream:
        yield chunk


async def _again(stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
    async for chunk in stream:
        yield chunk
        if chunk.offset:
            yield chunk


async def _without_one(stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
    last = None
    async for chunk in stream:
        if chunk.finish or chunk.offset == 0 or last is not None:
            yield chunk
        last = chunk


async def _with_another(stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
    async for chunk in stream:
        yield replace(chunk, tokens=tuple(token ^ 1 for token in chunk.tokens)) if chunk.offset else chunk


TAMPERED: dict[str, Callable[[AsyncStream], AsyncGenerator[Chunk, None]]] = {
    "": _as_it_is,
    "emits a chunk again": _again,
    "loses a chunk": _without_one,
    "changes a token": _with_another,
}
