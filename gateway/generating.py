"""The two calls that generate: a request's sessions as one answer, or as a stream of events."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from gateway import metrics
from gateway.asked import CHAT_NAMES, COMPLETION_NAMES, Asked, chat_asked, completion_asked
from gateway.choices import ChatForm, Choice, CompletionForm, Content, Form, Part
from gateway.coordinators import Coordinators, Offer, set_caller
from gateway.exchange import Exchange, request_name
from gateway.problems import HttpProblem, problem_of
from gateway.sessions import Sessions
from gateway.settings import GatewaySettings
from specdec.completion import Chunk
from specdec.errors import SpecdecError
from specdec.serving.tracing import spans

T = TypeVar("T")
Parse = Callable[[Any, int], Asked]
FORMS: dict[bool, type[Form]] = {True: ChatForm, False: CompletionForm}  # by whether it is a chat
NAMES = {True: CHAT_NAMES, False: COMPLETION_NAMES}
PARSERS: dict[bool, Parse] = {True: chat_asked, False: completion_asked}


class Generating:
    """One of the two calls."""

    def __init__(self, is_chat: bool, coordinators: Coordinators, settings: GatewaySettings) -> None:
        self._is_chat, self._coordinators, self._settings = is_chat, coordinators, settings

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request. Raises HttpProblem, SpecdecError, ClientLeft."""
        try:
            await self._answer(exchange)
        except SpecdecError as error:
            raise problem_of(error, NAMES[self._is_chat]) from error

    async def _answer(self, exchange: Exchange) -> None:
        key, given_id = exchange.key(), exchange.take_request_id()
        body, content = await exchange.json()
        asked = self._checked(content)
        set_caller(key)
        offer = await self._coordinators.checked_offer(asked.model)
        name = request_name(key, given_id, exchange.scope["path"], body)
        answer = Answer(asked, offer, self._coordinators, FORMS[self._is_chat](), name)
        sessions = Sessions(self._coordinators, asked, name, client_may_return=given_id is not None)
        if asked.is_streamed:
            await exchange.unless_client_leaves(answer.stream(exchange, sessions, self._settings.keep_alive_s))
        else:
            await exchange.answer(200, await exchange.unless_client_leaves(answer.whole(sessions)))

    def _checked(self, content: Any) -> Asked:
        """Return what a body asks for. Raises HttpProblem."""
        try:
            return PARSERS[self._is_chat](content, self._settings.max_choices)
        except RecursionError:  # of an error that shows a value
            raise HttpProblem(400, "the body is nested too deeply", code="invalid_json") from None


class Answer:
    """What a request's choices become."""

    def __init__(self, asked: Asked, offer: Offer, coordinators: Coordinators, form: Form, name: str) -> None:
        texts = coordinators.token_texts(offer) if asked.with_logprobs else None
        self._asked, self._offer, self._form = asked, offer, form
        self._begin_s = time.monotonic()
        self._num_prompt_tokens: dict[int, int] = {}  # by the prompt's number: its choices have it in common
        self._num_completion_tokens = 0
        self._choices = [Choice(index, form, texts, asked.with_details) for index in range(asked.total_choices)]
        self._common = {
            "id": f"{form.id_prefix}{name}",
            "created": int(time.time()),
            "model": offer.name,
            "system_fingerprint": offer.system_fingerprint,
        }

    async def whole(self, sessions: Sessions) -> Content:
        """Return the answer once all choices have finished."""
        async with sessions:
            async for index, chunk in sessions:
                self._choices[index].keep(self._part(index, chunk))
        choices = [choice.whole() for choice in self._choices]
        return self._written(self._form.whole_object, choices) | {"usage": self._usage()}

    async def stream(self, exchange: Exchange, sessions: Sessions, keep_alive_s: float) -> None:
        """Send the pieces as they arrive. What fails before the first of them is an answer with its own status."""
        async with sessions, aclosing(with_silences(sessions, keep_alive_s)) as arriving:
            async for arrived in arriving:
                if exchange.status is None:
                    await self._open(exchange)
                if arrived is None:
                    await exchange.comment()
                    continue
                index, chunk = arrived
                for piece in self._choices[index].pieces(self._part(index, chunk)):
                    await self._send(exchange, piece)
        if self._asked.with_usage:
            await exchange.event(self._written(self._form.piece_object, []) | {"usage": self._usage()})
        await exchange.end_events(is_whole=True)

    async def _open(self, exchange: Exchange) -> None:
        await exchange.begin_events()
        for choice in self._choices:
            if opening := choice.opening():
                await self._send(exchange, opening)

    async def _send(self, exchange: Exchange, piece: Content) -> None:
        event = self._written(self._form.piece_object, [piece])
        await exchange.event(event | {"usage": None} if self._asked.with_usage else event)

    def _part(self, index: int, chunk: Chunk) -> Part:
        """Return what a chunk adds to its choice, and count it."""
        if not self._num_completion_tokens:
            metrics.FIRST_TOKEN_S.observe(time.monotonic() - self._begin_s, spans.current().exemplar())
        self._num_completion_tokens += len(chunk.tokens)
        if chunk.finish:
            self._num_prompt_tokens[index // self._asked.num_choices] = chunk.finish.usage.num_prompt_tokens
        return self._choices[index].take(chunk)

    def _usage(self) -> Content:
        num_prompt_tokens = sum(self._num_prompt_tokens.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
        }

    def _written(self, kind: str, choices: list[Content]) -> Content:
        return {"object": kind, **self._common, "choices": choices}


async def with_silences(items: AsyncIterator[T], period_s: float) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever none has come for so long."""
    arriving = asyncio.ensure_future(anext(items))
    try:
        while True:
            arrived, _ = await asyncio.wait({arriving}, timeout=period_s)
            if not arrived:
                yield None
                continue
            try:
                item = arriving.result()
            except StopAsyncIteration:
                return
            yield item
            arriving = asyncio.ensure_future(anext(items))
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
