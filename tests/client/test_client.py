"""The asynchronous client against a scripted service that fails: it returns the whole text or raises an error."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

import specdec
from specdec import (
    AsyncClient,
    ChatMessage,
    FinishReason,
    SamplingParams,
    SessionStatus,
    SpeculationParams,
    TokenOrigin,
)
from specdec.channel import open_channel
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import types_pb2
from tests.support.scripted import SESSION, TEXT, TOKENS, WHOLE, Handler, Send, Service, chunk, digest_at, sends, served


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}") as client:
        yield client


def answers(message: object) -> Handler:
    """Return a handler that answers a call with one message."""

    async def handler(request: Any, send: Send, context: Any) -> None:
        await send(message)

    return handler


class Endless:
    """A handler that sends the first chunk and then nothing, and records that the call was cancelled."""

    def __init__(self, *, begins: bool = True) -> None:
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._begins = begins

    async def __call__(self, request: Any, send: Send, context: Any) -> None:
        context.add_done_callback(lambda _: self.cancelled.set())
        if self._begins:
            await send(**WHOLE[0])
        self.arrived.set()
        await asyncio.Event().wait()


# ---- requests and chunks


async def test_chunks_arrive_as_committed(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE)]
    chunks = [chunk async for chunk in client.generate("hello")]
    assert [one.offset for one in chunks] == [0, 2, 3, 6]
    assert [one.tokens for one in chunks] == [(1, 2), (3,), (4, 5, 6), (7,)]
    assert [one.digest for one in chunks] == [digest_at(end) for end in (2, 3, 6, 7)]
    assert chunks[0].origins == (TokenOrigin.ACCEPTED, TokenOrigin.BONUS)
    assert chunks[2].pieces == (" time", " there", "", "")
    assert [one.finish is None for one in chunks] == [True, True, True, False]


async def test_complete_joins_all_chunks(service: Service, client: AsyncClient) -> None:
    top = pb.TokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token=9, logprob=-0.25)])
    service.handlers = [sends(*WHOLE[:3], chunk(3, logprobs=[top]))]
    completion = await client.complete("hello")
    assert (completion.session_id, completion.text, completion.tokens) == (SESSION, TEXT, TOKENS)
    assert completion.digest == digest_at(7)
    assert completion.logprobs[-1].logprob == -0.5
    assert completion.logprobs[-1].top == ((9, -0.25),)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage == specdec.Usage(num_prompt_tokens=3, num_completion_tokens=7)
    assert completion.statistics.acceptance_rate == 0.5
    assert completion.statistics.tokens_per_round == 7 / 4
    assert completion.statistics.tokens_per_s == 3.5


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"prompt": "text"}, {"text": "text"}),
        ({"prompt_token_ids": [1, 2, 3]}, {"tokens": pb.TokenSequence(ids=[1, 2, 3])}),
        ({"prompt_token_ids": range(2)}, {"tokens": pb.TokenSequence(ids=[0, 1])}),
    ],
)
async def test_prompt_is_text_or_tokens(
    service: Service, client: AsyncClient, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    service.handlers = [sends(*WHOLE)]
    await client.complete(**arguments, request_id="r")
    assert service.requests == [pb.GenerateRequest(request_id="r", **fields)]


@pytest.mark.parametrize("message", [("user", "hi"), ChatMessage("user", "hi"), {"role": "user", "content": "hi"}])
async def test_chat_sends_messages(service: Service, client: AsyncClient, message: Any) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    answer = await client.chat(messages=[message], request_id="r", temperature=0.5)
    async with client.stream_chat([message], request_id="r", temperature=0.5) as stream:
        assert await stream.result() == answer
    prompt = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    sampling = messages_of(SamplingParams(temperature=0.5))
    assert service.requests == [pb.GenerateRequest(request_id="r", chat=prompt, sampling=sampling)] * 2


def messages_of(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=0,
        top_p=1,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        stop=params.stop,
        max_new_tokens=params.max_new_tokens,
        seed=params.seed,
    )


async def test_unset_parameters_stay_unset(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    await client.complete("x", sampling=SamplingParams(temperature=0.0, seed=2**64 - 1, stop=("END",)))
    await client.complete("x", speculation=SpeculationParams(num_draft_tokens=0, drafter="ngram"))
    first, second = service.requests
    assert first.sampling.HasField("temperature")
    assert first.sampling.temperature == 0
    assert first.sampling.seed == 2**64 - 1
    assert not first.sampling.HasField("max_new_tokens")
    assert not first.HasField("speculation")
    assert not second.HasField("sampling")
    assert second.speculation == types_pb2.SpeculationParams(num_draft_tokens=0, drafter="ngram")


async def test_keywords_replace_sampling_fields(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE)]
    base = SamplingParams(temperature=0.7, seed=1)
    await client.complete("x", sampling=base, seed=7, max_new_tokens=64, stop="END")
    expected = SamplingParams(temperature=0.7, seed=7, max_new_tokens=64, stop=("END",))
    assert service.requests[0].sampling == messages_of(expected)


async def test_each_call_has_its_own_request_id(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    await client.complete("x")
    await client.complete("x")
    identifiers = {request.request_id for request in service.requests}
    assert len(identifiers) == 2
    assert "" not in identifiers


async def test_metadata_goes_with_every_call(service: Service) -> None:
    seen: list[dict[str, Any]] = []

    def recording(handler: Handler) -> Handler:
        async def record(request: Any, send: Send, context: Any) -> None:
            seen.append(dict(context.invocation_metadata()))
            await handler(request, send, context)

        return record

    gone = sends(WHOLE[0], then=grpc.StatusCode.UNAVAILABLE)
    service.handlers = [recording(gone), recording(sends(*WHOLE[1:])), recording(answers(pb.GetModelResponse()))]
    metadata = {"Authorization": "Bearer t"}
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", metadata=metadata) as client:
        await client.complete("x")
        await client.get_model()
    assert [entry["authorization"] for entry in seen] == ["Bearer t"] * 3


# ---- with and without a context manager


async def test_client_works_without_context_manager(service: Service) -> None:
    service.handlers = [sends(*WHOLE)]
    async with served(service) as port:
        client = AsyncClient(f"127.0.0.1:{port}")
        assert (await client.complete("x")).text == TEXT
        await client.close()
        await client.close()


async def test_closed_client_refuses_calls(service: Service) -> None:
    client = AsyncClient()
    await client.close()
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        await client.complete("x")


async def test_closing_ends_a_running_call(service: Service, client: AsyncClient) -> None:
    service.handlers = [endless := Endless()]
    running = asyncio.create_task(client.complete("x"))
    await endless.arrived.wait()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await running


async def test_given_channel_stays_open(service: Service) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    async with served(service) as port, open_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2):
            async with AsyncClient(channel=channel) as client:
                assert (await client.complete("x")).text == TEXT


def test_client_belongs_to_one_event_loop() -> None:
    client = AsyncClient("127.0.0.1:1", connect_timeout_s=0.001)

    async def use() -> None:
        await client.get_model()

    with pytest.raises(specdec.UnavailableError):
        asyncio.run(use())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use())


# ---- streams that break


@pytest.mark.parametrize("broken", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
async def test_broken_stream_resumes_where_it_broke(
    service: Service, client: AsyncClient, num_chunks: int, broken: grpc.StatusCode
) -> None:
    service.handlers = [sends(*WHOLE[:num_chunks], then=broken), sends(*WHOLE[num_chunks:])]
    assert (await client.complete("x")).text == TEXT
    have = WHOLE[num_chunks]["offset"]
    assert service.requests[1] == pb.ResumeRequest(session_id=SESSION, offset=have, digest=digest_at(have))


async def test_resumed_stream_hands_back_what_it_proves(service: Service, client: AsyncClient) -> None:
    proved = [{**fields, "proof": bytes([number]) * 16} for number, fields in enumerate(WHOLE)]
    service.handlers = [sends(*proved[:2], then=grpc.StatusCode.UNAVAILABLE), sends(*proved[2:])]
    assert (await client.complete("x")).text == TEXT
    resumed, have = service.requests[1], WHOLE[2]["offset"]
    assert (resumed.offset, resumed.proof, tuple(resumed.tokens)) == (have, b"\x01" * 16, TOKENS[:have])
    assert len(resumed.origins) == have


async def test_stream_survives_a_break_after_every_chunk(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(one, then=grpc.StatusCode.UNAVAILABLE) for one in WHOLE]
    completion = await client.complete("x")
    assert completion.tokens == TOKENS
    assert [type(request).__name__ for request in service.requests] == ["GenerateRequest"] + ["ResumeRequest"] * 3


async def test_request_is_repeated_under_its_id(service: Service, client: AsyncClient) -> None:
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    service.handlers = [gone, gone, sends(*WHOLE)]
    assert (await client.complete("x", sampling=SamplingParams(seed=1))).text == TEXT
    assert service.requests[0].request_id
    assert service.requests[0] == service.requests[1] == service.requests[2]


async def test_stream_without_finish_is_resumed(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:2]), sends(*WHOLE[2:])]
    assert (await client.complete("x")).text == TEXT


async def test_fenced_session_is_resumed(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(WHOLE[0], then=specdec.FencedError("another coordinator owns it")), sends(*WHOLE[1:])]
    assert (await client.complete("x")).text == TEXT


async def test_error_after_last_chunk_is_ignored(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE, then=grpc.StatusCode.UNAVAILABLE)]
    assert (await client.complete("x")).text == TEXT
    assert len(service.requests) == 1


async def test_retries_are_reported(service: Service) -> None:
    gone = grpc.StatusCode.UNAVAILABLE
    service.handlers = [sends(then=gone), sends(*WHOLE[:1], then=gone), sends(*WHOLE[1:])]
    seen: list[specdec.Retry] = []
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", on_retry=seen.append) as client:
        assert (await client.complete("x", timeout_s=60)).text == TEXT
    assert [retry.session_id for retry in seen] == [None, SESSION]
    assert all(isinstance(retry.failure, specdec.UnavailableError) for retry in seen)
    # no server had answered at first: the shorter time-out of an address counts
    assert seen[0].left_s <= 20.0 < seen[1].left_s <= 60.0


async def test_cut_connection_is_restored(service: Service) -> None:
    held = asyncio.Event()

    async def stall(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await held.wait()

    service.handlers = [stall, sends(*WHOLE[1:])]
    texts = []
    async with served(service) as port, cuttable(port) as (address, cut), AsyncClient(address) as client:
        async for one in client.generate("x"):
            texts.append(one.text)
            if len(texts) == 1:
                cut()
        held.set()
    assert "".join(texts) == TEXT
    assert service.requests[1].offset == 2


async def test_slow_server_is_waited_for(service: Service) -> None:
    """A server on a busy machine accepts a connection long before it says something on it."""
    async with served(service) as port, cuttable(port, delay_s=0.5) as (address, _), AsyncClient(address) as client:
        await client.connect()


@asynccontextmanager
async def cuttable(port: int, delay_s: float = 0.0) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Run a TCP proxy to `port` that connects after a delay; yield its address and a function that cuts connections."""
    transports: list[Any] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        transports.extend((writer.transport, far_writer.transport))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    def cut() -> None:
        for transport in transports:
            transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        cut()
        server.close()
        await server.wait_closed()


# ---- repeated chunks


async def test_repeated_chunks_are_dropped(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:3], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE)]
    chunks = [one async for one in client.generate("x")]
    assert "".join(one.text for one in chunks) == TEXT
    assert tuple(token for one in chunks for token in one.tokens) == TOKENS


async def test_overlapping_chunk_is_cut_by_token(service: Service, client: AsyncClient) -> None:
    # the server joins rounds 1 to 3 in its replay; the client has round 1
    service.handlers = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(chunk(1, 3))]
    last = [one async for one in client.generate("x")][-1]
    assert (last.offset, last.tokens, last.text) == (3, (4, 5, 6, 7), " time there was.")
    assert last.pieces == (" time", " there", "", " was.", "")
    assert last.origins == (TokenOrigin.ACCEPTED,) * 3 + (TokenOrigin.BONUS,)


@pytest.mark.parametrize(
    ("again", "what"),
    [
        (chunk(2), "missing"),
        (chunk(0, digest=b"x" * 16), "another digest"),
        (chunk(0, tokens=[1, 8]), "other tokens"),
        (chunk(0, 1, tokens=[1, 8, 3]), "other tokens"),
        (chunk(1, session_id="s-2"), "s-2"),
    ],
)
async def test_contradicting_chunk_is_data_loss(
    service: Service, client: AsyncClient, again: dict[str, Any], what: str
) -> None:
    service.handlers = [sends(WHOLE[0], then=grpc.StatusCode.UNAVAILABLE), sends(again)]
    chunks = client.generate("x")
    assert (await anext(chunks)).text == "Once upon"
    with pytest.raises(specdec.DataLossError, match=what):
        await anext(chunks)


async def test_resume_starts_at_the_offset(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[1:])]
    stream = client.resume(SESSION, offset=2, digest=digest_at(2))
    assert stream.session_id == SESSION
    assert (await stream.result()).text == " a time there was."
    assert service.requests == [pb.ResumeRequest(session_id=SESSION, offset=2, digest=digest_at(2))]


async def test_resume_drops_tokens_before_offset(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(chunk(0, 3))]
    chunks = [one async for one in client.resume(SESSION, offset=3)]
    assert [one.tokens for one in chunks] == [(4, 5, 6, 7)]


async def test_resumed_stream_survives_a_break(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE[2:])]
    assert (await client.resume(SESSION).result()).text == TEXT
    assert service.requests[0].digest == b""
    assert service.requests[1].offset == 3


async def test_resume_with_other_digest_is_data_loss(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(WHOLE[0])]
    with pytest.raises(specdec.DataLossError, match="another digest"):
        await client.resume(SESSION, offset=2, digest=b"x" * 16).result()


# ---- errors and retries


FINAL_ERRORS: list[specdec.SpecdecError] = [
    specdec.InvalidArgumentError({"sampling.top_p": "is 7; give a number in (0, 1], or leave it unset"}),
    specdec.NotFoundError("there is no session s-1"),
    specdec.AlreadyExistsError("request_id r was used with other parameters"),
    specdec.ModelMismatchError("the draft's tokenizer is another"),
    specdec.ContextTooShortError("no worker has room for 73 tokens"),
    specdec.NonFiniteLogitsError("the model gave NaN"),
    specdec.DataLossError("the store went back"),
    specdec.InternalError(),
]


@pytest.mark.parametrize("error", FINAL_ERRORS, ids=lambda error: type(error).__name__)
async def test_permanent_error_is_raised_at_once(
    service: Service, client: AsyncClient, error: specdec.SpecdecError
) -> None:
    service.handlers = [sends(then=error)]
    with pytest.raises(type(error)) as caught:
        await client.complete("x")
    assert str(caught.value) == str(error)
    assert len(service.requests) == 1


async def test_invalid_argument_names_its_fields(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(then=FINAL_ERRORS[0])]
    with pytest.raises(specdec.InvalidArgumentError) as caught:
        await client.complete("x")
    assert list(caught.value.violations) == ["sampling.top_p"]


@pytest.mark.parametrize("kind", [specdec.OverloadedError, specdec.UnavailableError])
async def test_retry_after_is_honoured(
    service: Service, client: AsyncClient, kind: type[specdec.OverloadedError | specdec.UnavailableError]
) -> None:
    service.handlers = [sends(then=kind("later", retry_after_s=0.3)), sends(*WHOLE)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await client.complete("x")).text == TEXT
    assert loop.time() - began >= 0.3


async def test_pause_past_deadline_raises_at_once(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(then=specdec.OverloadedError("the queue is full", retry_after_s=3600))]
    with pytest.raises(specdec.OverloadedError, match="the queue is full"):
        await client.complete("x", timeout_s=100)


async def test_message_too_large_is_not_retried(service: Service, client: AsyncClient) -> None:
    """RESOURCE_EXHAUSTED without RetryInfo comes from grpc itself."""
    service.handlers = [sends(then=grpc.StatusCode.RESOURCE_EXHAUSTED)]
    with pytest.raises(specdec.OverloadedError, match="gone"):
        await client.complete("x")


async def test_max_retries_counts_since_the_last_chunk(service: Service) -> None:
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    # repeated chunks do not reset the count
    service.handlers = [gone, gone, sends(WHOLE[0]), gone, sends(WHOLE[1]), gone, sends(WHOLE[1]), gone]
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", max_retries=2) as client:
        with pytest.raises(specdec.UnavailableError, match="session s-1 can be resumed from token 3"):
            await client.complete("x")
    assert service.handlers == [gone]


async def test_hanging_server_exceeds_the_deadline(service: Service, client: AsyncClient) -> None:
    service.handlers = [Endless(begins=False)]
    sentence = r"deadline of 0\.5 s exceeded; session s-1 can be resumed from token 2"
    with pytest.raises(specdec.DeadlineExceededError, match=sentence):
        await client.resume(SESSION, offset=2, timeout_s=0.5).result()


async def test_unreachable_address_fails_after_connect_timeout(unused_port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_port}", connect_timeout_s=0.2) as client:
        for call in (client.connect(), client.complete("x"), client.get_model()):
            with pytest.raises(specdec.UnavailableError, match=f"no specdec answers on 127.0.0.1:{unused_port}"):
                await call


async def test_connect_timeout_ends_with_the_first_answer(service: Service) -> None:
    """After the first answer, `connect_timeout_s` no longer limits retries."""
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", connect_timeout_s=0.01) as client:
        service.handlers = [answers(pb.GetModelResponse()), sends(then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE)]
        await client.get_model()
        assert (await client.complete("x")).text == TEXT


@pytest.fixture
async def unused_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_server_of_another_kind_is_reported() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await client.connect()
        with pytest.raises(specdec.ModelMismatchError, match="not a specdec coordinator"):
            await client.complete("x")
    await server.stop(0)


@pytest.mark.parametrize("changes", [{"origins": [1, 9]}, {"origins": [1]}, {"text_ends": []}])
async def test_unreadable_chunk_is_refused(service: Service, client: AsyncClient, changes: dict[str, Any]) -> None:
    service.handlers = [sends(chunk(0, **changes))]
    with pytest.raises(specdec.ModelMismatchError, match="update"):
        await client.complete("x")


# ---- the stream object


async def test_result_includes_chunks_already_read(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE)]
    async with client.generate("x") as stream:
        assert stream.session_id is None
        await anext(stream)
        assert stream.session_id == SESSION
        assert (await stream.result()).text == TEXT
        assert (await stream.result()).text == TEXT


async def test_closed_stream_has_no_result(service: Service, client: AsyncClient) -> None:
    service.handlers = [Endless()]
    async with client.generate("x") as stream:
        await anext(stream)
    with pytest.raises(ValueError, match="the session has not finished"):
        await stream.result()


async def leave_by_closing(client: AsyncClient) -> None:
    async with client.generate("x") as stream:
        async for _ in stream:
            break


async def leave_by_error(client: AsyncClient) -> None:
    with suppress(KeyError):
        async with client.generate("x") as stream:
            await anext(stream)
            raise KeyError


async def leave_by_garbage_collection(client: AsyncClient) -> None:
    async for _ in client.generate("x"):
        break
    gc.collect()


async def leave_by_cancellation(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in client.generate("x"):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave", [leave_by_closing, leave_by_error, leave_by_garbage_collection, leave_by_cancellation]
)
async def test_leaving_the_stream_cancels_the_call(
    service: Service, client: AsyncClient, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    service.handlers = [endless := Endless()]
    await leave(client)
    await endless.cancelled.wait()


@pytest.mark.parametrize("begins", [True, False])
async def test_close_ends_iteration_in_another_task(service: Service, client: AsyncClient, begins: bool) -> None:
    service.handlers = [endless := Endless(begins=begins)]
    stream = client.generate("x")

    async def read() -> int:
        return len([one async for one in stream])

    reading = asyncio.create_task(read())
    await endless.arrived.wait()
    await stream.close()
    assert await reading <= begins
    await endless.cancelled.wait()


async def test_stream_has_one_reader(service: Service, client: AsyncClient) -> None:
    service.handlers = [endless := Endless(begins=False)]
    async with client.generate("x") as stream:
        first = asyncio.ensure_future(anext(stream))
        await endless.arrived.wait()
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        first.cancel()


async def test_cancel_ends_the_session(service: Service, client: AsyncClient) -> None:
    ended = asyncio.Event()
    finish = pb.Finish(reason=pb.FINISH_REASON_CANCELLED)
    last = {"session_id": SESSION, "offset": 2, "digest": digest_at(2), "finish": finish}

    async def until_cancelled(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await ended.wait()
        await send(**last)

    async def cancel(request: Any, send: Send, context: Any) -> None:
        await send(pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED))
        ended.set()

    service.handlers = [until_cancelled, cancel]
    async with client.generate("x") as stream:
        await anext(stream)
        await stream.cancel()
        completion = await stream.result()
    assert (completion.text, completion.finish_reason) == ("Once upon", FinishReason.CANCELLED)
    assert service.requests[1] == pb.CancelSessionRequest(session_id=SESSION)


async def test_cancel_before_the_session_closes(service: Service, client: AsyncClient) -> None:
    service.handlers = [endless := Endless(begins=False)]
    stream = client.generate("x")
    reading = asyncio.ensure_future(anext(stream, None))
    await endless.arrived.wait()
    await stream.cancel()
    assert await reading is None
    await endless.cancelled.wait()


# ---- unary calls


async def test_get_session_returns_the_stored_session(service: Service, client: AsyncClient) -> None:
    answer = pb.GetSessionResponse(
        session_id=SESSION,
        status=pb.SESSION_STATUS_FINISHED,
        epoch=2,
        num_prompt_tokens=3,
        tokens=TOKENS,
        text=TEXT,
        digest=digest_at(7),
        sampling=types_pb2.SamplingParams(temperature=0.5, seed=7),
        finish=chunk(3)["finish"],
    )
    service.handlers = [answers(answer)]
    session = await client.get_session(SESSION)
    assert service.requests == [pb.GetSessionRequest(session_id=SESSION)]
    assert (session.status, session.epoch, session.tokens) == (SessionStatus.FINISHED, 2, TOKENS)
    assert session.sampling == SamplingParams(temperature=0.5, seed=7)
    assert session.finish
    assert session.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("changes", [{"status": 9}, {"sampling": types_pb2.SamplingParams(temperature=1000)}])
async def test_unreadable_session_is_refused(service: Service, client: AsyncClient, changes: dict[str, Any]) -> None:
    service.handlers = [answers(pb.GetSessionResponse(**{"status": pb.SESSION_STATUS_ACTIVE} | changes))]
    with pytest.raises(specdec.ModelMismatchError, match="update the client"):
        await client.get_session(SESSION)


async def test_unary_calls_are_repeated(service: Service, client: AsyncClient) -> None:
    cancelled = pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED)
    models = pb.GetModelResponse(
        target=types_pb2.ModelInfo(name="large", vocab_size=5, fingerprint="f"),
        drafters=["model", "ngram"],
        context_length=128,
    )
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    service.handlers = [gone, answers(cancelled), gone, answers(models)]
    assert await client.cancel(SESSION) is SessionStatus.CANCELLED
    model = await client.get_model()
    assert (model.target.name, model.target.fingerprint) == ("large", "f")
    assert (model.drafters, model.context_length) == (("model", "ngram"), 128)


async def test_unknown_session_is_not_found(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(then=specdec.NotFoundError("there is no session s-9"))]
    with pytest.raises(specdec.NotFoundError, match="s-9"):
        await client.get_session("s-9")
