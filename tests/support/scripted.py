"""A GenerationService with one scripted handler for each call: it can break, repeat, contradict or hang."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specdec import errors
from specdec.channel import MAX_MESSAGE_BYTES
from specdec.serving.status import to_status
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

SESSION = "s-1"
# the session's rounds: token ids, and the text of each token
ROUNDS = [([1, 2], ["Once", " upon"]), ([3], [" a"]), ([4, 5, 6], [" time", " there", ""]), ([7], [" was."])]
TEXT = "Once upon a time there was."
TOKENS = (1, 2, 3, 4, 5, 6, 7)

Send = Callable[..., Awaitable[None]]
Handler = Callable[[Any, Send, Any], Awaitable[None]]


def digest_at(end: int) -> bytes:
    return bytes([end]) * 16


def chunk(begin: int, last: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return the fields of one chunk with rounds `begin` to `last`."""
    rounds = ROUNDS[begin : (begin if last is None else last) + 1]
    offset = sum(len(tokens) for tokens, _ in ROUNDS[:begin])
    tokens = [token for ids, _ in rounds for token in ids]
    pieces = [piece for _, texts in rounds for piece in texts]
    fields: dict[str, Any] = {
        "session_id": SESSION,
        "offset": offset,
        "tokens": tokens,
        "text": "".join(pieces),
        "origins": [pb.TOKEN_ORIGIN_ACCEPTED] * (len(tokens) - 1) + [pb.TOKEN_ORIGIN_BONUS],
        "digest": digest_at(offset + len(tokens)),
        "text_ends": [len("".join(pieces[: count + 1])) for count in range(len(pieces))],
        "rounds": [pb.RoundDraft(drafter="model", num_draft_tokens=2, depth=2, end=offset + len(tokens))],
    }
    if begin + len(rounds) == len(ROUNDS):
        fields["finish"] = pb.Finish(
            reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=3, num_completion_tokens=7),
            statistics=pb.Statistics(
                num_rounds=4, num_draft_tokens=6, num_accepted_tokens=3, num_tokens=7, total_s=2.0
            ),
        )
    return fields | changes


def sends(*chunks: dict[str, Any], then: errors.SpecdecError | grpc.StatusCode | None = None) -> Handler:
    """Return a handler that sends these chunks, then ends the call: with OK, a SpecdecError or a bare status."""

    async def handler(request: Any, send: Send, context: Any) -> None:
        for fields in chunks:
            await send(**fields)
        if isinstance(then, errors.SpecdecError):
            await context.abort_with_status(to_status(then))
        if then is not None:
            await context.abort(then, "gone")

    return handler


def answers(message: object) -> Handler:
    """Return a handler that answers a call with one message."""

    async def handler(request: Any, send: Send, context: Any) -> None:
        await send(message)

    return handler


WHOLE = [chunk(number) for number in range(len(ROUNDS))]


class Endless:
    """A handler that sends the first chunk, two more after `go_on` is set, and then nothing.

    It records that the call has arrived, and that it was cancelled.
    """

    def __init__(self, *, begins: bool = True) -> None:
        self.arrived, self.go_on, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._begins = begins

    async def __call__(self, request: Any, send: Send, context: Any) -> None:
        context.add_done_callback(lambda _: self.cancelled.set())
        if self._begins:
            await send(**WHOLE[0])
        self.arrived.set()
        await self.go_on.wait()
        for fields in WHOLE[1:3]:
            await send(**fields)
        await asyncio.Event().wait()


class Service(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call with the next handler and records the requests."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.requests: list[Any] = []

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        await self._stream(request, context, pb.GenerateResponse)

    async def Resume(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        await self._stream(request, context, lambda **fields: pb.ResumeResponse(chunk=pb.GenerateResponse(**fields)))

    async def GetSession(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def CancelSession(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def GetModel(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def _stream(self, request: Any, context: Any, kind: Any) -> None:
        async def send(**fields: Any) -> None:
            await context.write(kind(**fields))

        self.requests.append(request)
        await self.handlers.pop(0)(request, send, context)

    async def _answer(self, request: Any, context: Any) -> Any:
        answers: list[Any] = []

        async def send(answer: Any) -> None:
            answers.append(answer)

        self.requests.append(request)
        await self.handlers.pop(0)(request, send, context)
        return answers[0]


@asynccontextmanager
async def served(service: Service, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
