"""The client against a service that breaks where a test says: the text comes whole, or an error does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from specdec import client as client_module
from specdec import errors
from specdec.channel import MAX_MESSAGE_BYTES
from specdec.client import Client, FinishReason, Message, SamplingParams, SessionStatus, SpeculationParams, TokenOrigin
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import types_pb2
from tests.support.scripted import SESSION, TEXT, TOKENS, WHOLE, Send, Service, chunk, digest_at, sends, served


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def client(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)
    async with served(service) as port, Client(f"127.0.0.1:{port}") as client:
        yield client


# ---- what is sent, what comes


async def test_chunks_come_as_they_were_committed(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE)]
    chunks = [chunk async for chunk in client.generate("hello")]
    assert [one.offset for one in chunks] == [0, 2, 3, 6]
    assert [one.tokens for one in chunks] == [(1, 2), (3,), (4, 5, 6), (7,)]
    assert [one.digest for one in chunks] == [digest_at(end) for end in (2, 3, 6, 7)]
    assert chunks[0].origins == (TokenOrigin.ACCEPTED, TokenOrigin.BONUS)
    assert chunks[2].pieces == (" time", " there", "", "")
    assert [one.finish is None for one in chunks] == [True, True, True, False]


async def test_complete_returns_the_sum_of_the_chunks(service: Service, client: Client) -> None:
    top = pb.TokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token=9, logprob=-0.25)])
    service.acts = [sends(*WHOLE[:3], chunk(3, logprobs=[top]))]
    completion = await client.complete("hello")
    assert (completion.session_id, completion.text, completion.tokens) == (SESSION, TEXT, TOKENS)
    assert completion.digest == digest_at(7)
    assert completion.logprobs[-1].logprob == -0.5
    assert completion.logprobs[-1].top == ((9, -0.25),)
    assert completion.finish.reason is FinishReason.STOP
    assert completion.finish.usage.num_prompt_tokens == 3
    assert completion.finish.statistics.acceptance_rate == 0.5
    assert completion.finish.statistics.tokens_per_round == 7 / 4
    assert completion.finish.statistics.tokens_per_s == 3.5


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("text", {"text": "text"}),
        ("", {"text": ""}),
        ([1, 2, 3], {"tokens": pb.TokenSequence(ids=[1, 2, 3])}),
        (range(2), {"tokens": pb.TokenSequence(ids=[0, 1])}),
        ([("user", "hi")], {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])}),
        ([Message("user", "hi")], {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])}),
        (
            [{"role": "user", "content": "hi"}],
            {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])},
        ),
        ([], {"tokens": pb.TokenSequence()}),
    ],
)
async def test_a_prompt_is_text_tokens_or_messages(
    service: Service, client: Client, prompt: Any, fields: dict[str, Any]
) -> None:
    service.acts = [sends(*WHOLE)]
    await client.complete(prompt, request_id="r")
    assert service.asked == [pb.GenerateRequest(request_id="r", **fields)]


async def test_parameters_arrive_and_what_is_not_given_stays_unset(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE), sends(*WHOLE)]
    await client.complete("x", sampling=SamplingParams(temperature=0.0, seed=2**64 - 1, stop=("END",)))
    await client.complete("x", speculation=SpeculationParams(num_draft_tokens=0, drafter="ngram"))
    first, second = service.asked
    assert first.sampling.HasField("temperature")
    assert first.sampling.temperature == 0
    assert first.sampling.seed == 2**64 - 1
    assert list(first.sampling.stop) == ["END"]
    assert not first.sampling.HasField("max_new_tokens")
    assert not first.HasField("speculation")
    assert not second.HasField("sampling")
    assert second.speculation == types_pb2.SpeculationParams(num_draft_tokens=0, drafter="ngram")


async def test_every_call_without_a_request_id_gets_one_of_its_own(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE), sends(*WHOLE)]
    await client.complete("x")
    await client.complete("x")
    identifiers = {request.request_id for request in service.asked}
    assert len(identifiers) == 2
    assert "" not in identifiers


# ---- streams that break


@pytest.mark.parametrize("broken", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
async def test_a_broken_stream_goes_on_where_it_broke(
    service: Service, client: Client, num_chunks: int, broken: grpc.StatusCode
) -> None:
    service.acts = [sends(*WHOLE[:num_chunks], then=broken), sends(*WHOLE[num_chunks:])]
    assert (await client.complete("x")).text == TEXT
    have = WHOLE[num_chunks]["offset"]
    assert service.asked[1] == pb.ResumeRequest(session_id=SESSION, offset=have, digest=digest_at(have))


async def test_a_stream_that_breaks_at_every_chunk_still_comes_whole(service: Service, client: Client) -> None:
    service.acts = [sends(one, then=grpc.StatusCode.UNAVAILABLE) for one in WHOLE]
    completion = await client.complete("x")
    assert completion.tokens == TOKENS
    assert [type(request).__name__ for request in service.asked] == ["GenerateRequest"] + ["ResumeRequest"] * 3


async def test_before_the_first_chunk_the_request_is_repeated_under_its_id(service: Service, client: Client) -> None:
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    service.acts = [gone, gone, sends(*WHOLE)]
    assert (await client.complete("x", sampling=SamplingParams(seed=1))).text == TEXT
    assert service.asked[0].request_id
    assert service.asked[0] == service.asked[1] == service.asked[2]


async def test_an_end_without_finish_is_a_broken_stream(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE[:2]), sends(*WHOLE[2:])]
    assert (await client.complete("x")).text == TEXT


async def test_a_fenced_session_is_resumed(service: Service, client: Client) -> None:
    service.acts = [sends(WHOLE[0], then=errors.FencedError("another coordinator owns it")), sends(*WHOLE[1:])]
    assert (await client.complete("x")).text == TEXT


async def test_an_error_after_the_last_chunk_is_not_waited_for(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE, then=grpc.StatusCode.UNAVAILABLE)]
    assert (await client.complete("x")).text == TEXT
    assert len(service.asked) == 1


async def test_a_cut_connection_is_made_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)
    held = asyncio.Event()

    async def stall(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await held.wait()

    service.acts = [stall, sends(*WHOLE[1:])]
    texts = []
    async with served(service) as port, cuttable(port) as (address, cut), Client(address) as client:
        async for one in client.generate("x"):
            texts.append(one.text)
            if len(texts) == 1:
                cut()
        held.set()
    assert "".join(texts) == TEXT
    assert service.asked[1].offset == 2


@asynccontextmanager
async def cuttable(port: int) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A proxy before `port` whose connections can be cut, all at once, without a goodbye."""
    transports: list[Any] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


# ---- what was seen before


async def test_what_comes_again_is_dropped(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE[:3], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE)]
    chunks = [one async for one in client.generate("x")]
    assert "".join(one.text for one in chunks) == TEXT
    assert tuple(token for one in chunks for token in one.tokens) == TOKENS


async def test_a_chunk_that_overlaps_is_cut_by_token(service: Service, client: Client) -> None:
    # the server joins rounds 1 to 3 in its replay; the client has round 1
    service.acts = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(chunk(1, 3))]
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
async def test_a_server_that_contradicts_itself_is_data_loss(
    service: Service, client: Client, again: dict[str, Any], what: str
) -> None:
    service.acts = [sends(WHOLE[0], then=grpc.StatusCode.UNAVAILABLE), sends(again)]
    chunks = client.generate("x")
    assert (await anext(chunks)).text == "Once upon"
    with pytest.raises(errors.DataLossError, match=what):
        await anext(chunks)


async def test_resume_starts_where_the_caller_says(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE[1:])]
    chunks = [one async for one in client.resume(SESSION, 2, digest_at(2))]
    assert service.asked == [pb.ResumeRequest(session_id=SESSION, offset=2, digest=digest_at(2))]
    assert "".join(one.text for one in chunks) == " a time there was."


async def test_resume_drops_what_the_caller_has(service: Service, client: Client) -> None:
    service.acts = [sends(chunk(0, 3))]
    chunks = [one async for one in client.resume(SESSION, 3)]
    assert [one.tokens for one in chunks] == [(4, 5, 6, 7)]


async def test_resume_breaks_and_goes_on_too(service: Service, client: Client) -> None:
    service.acts = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE[2:])]
    assert "".join([one.text async for one in client.resume(SESSION)]) == TEXT
    assert service.asked[0].digest == b""
    assert service.asked[1].offset == 3


async def test_resume_with_another_digest_is_data_loss(service: Service, client: Client) -> None:
    service.acts = [sends(WHOLE[0])]
    with pytest.raises(errors.DataLossError, match="another digest"):
        [one async for one in client.resume(SESSION, 2, b"x" * 16)]


# ---- when to give up


FINAL_ERRORS = [
    errors.InvalidArgumentError({"sampling.top_p": "is 7; give a number in (0, 1], or leave it unset"}),
    errors.NotFoundError("there is no session s-1"),
    errors.AlreadyExistsError("request_id r was used with other parameters"),
    errors.ModelMismatchError("the draft's tokenizer is another"),
    errors.NonFiniteLogitsError("the model gave NaN"),
    errors.DataLossError("the store went back"),
    errors.InternalError(),
]


@pytest.mark.parametrize("error", FINAL_ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_that_would_come_again_is_raised_at_once(
    service: Service, client: Client, error: errors.SpecdecError
) -> None:
    service.acts = [sends(then=error)]
    with pytest.raises(type(error)) as caught:
        await client.complete("x")
    assert str(caught.value) == str(error)
    assert len(service.asked) == 1


async def test_fields_that_are_wrong_are_named(service: Service, client: Client) -> None:
    service.acts = [sends(then=FINAL_ERRORS[0])]
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await client.complete("x")
    assert list(caught.value.violations) == ["sampling.top_p"]


@pytest.mark.parametrize("kind", [errors.OverloadedError, errors.UnavailableError])
async def test_the_servers_wish_for_a_pause_is_honoured(
    service: Service, client: Client, kind: type[errors.OverloadedError | errors.UnavailableError]
) -> None:
    service.acts = [sends(then=kind("later", retry_after_s=0.3)), sends(*WHOLE)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await client.complete("x")).text == TEXT
    assert loop.time() - began >= 0.3


async def test_a_pause_past_the_deadline_is_not_waited_for(service: Service, client: Client) -> None:
    service.acts = [sends(then=errors.OverloadedError("the queue is full", retry_after_s=3600))]
    with pytest.raises(errors.OverloadedError, match="the queue is full"):
        await client.complete("x", timeout_s=100)


async def test_attempts_that_bring_nothing_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    # a chunk in between starts the count anew; what was seen before does not
    service.acts = [gone, gone, sends(WHOLE[0]), gone, sends(WHOLE[1]), gone, sends(WHOLE[1]), gone]
    async with served(service) as port, Client(f"127.0.0.1:{port}", max_retries=2) as client:
        with pytest.raises(errors.UnavailableError, match="session s-1 can be resumed from token 3"):
            await client.complete("x")
    assert service.acts == [gone]


async def test_a_hanging_server_meets_the_deadline(service: Service, client: Client) -> None:
    async def hang(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await asyncio.Event().wait()

    service.acts = [hang]
    with pytest.raises(errors.UnavailableError, match=r"no end within 0\.5 s; session s-1 can be resumed from token 2"):
        await client.complete("x", timeout_s=0.5)


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)
    async with Client(f"127.0.0.1:{unused_port}", max_retries=2) as client:
        for call in (client.connect(), client.complete("x"), client.get_model()):
            with pytest.raises(errors.UnavailableError, match=f"no specdec answers on 127.0.0.1:{unused_port}"):
                await call


@pytest.fixture
async def unused_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_somebody_else_there() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        await client.connect()
        with pytest.raises(errors.ModelMismatchError, match="not a specdec coordinator"):
            await client.complete("x")
    await server.stop(0)


@pytest.mark.parametrize("changes", [{"origins": [1, 9]}, {"origins": [1]}, {"text_ends": []}])
async def test_a_chunk_of_another_version_is_refused(service: Service, client: Client, changes: dict[str, Any]) -> None:
    service.acts = [sends(chunk(0, **changes))]
    with pytest.raises(errors.ModelMismatchError, match="update"):
        await client.complete("x")


# ---- what is not sent at all


async def test_a_prompt_that_is_too_long_is_not_sent(service: Service, client: Client) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"\d+ bytes; the most is {MAX_MESSAGE_BYTES} bytes; shorten"
    ):
        await client.complete("x" * MAX_MESSAGE_BYTES)
    assert service.asked == []


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([1, -1], None, "prompt"),
        ([1, 2**32], None, "prompt"),
        ([1, "two"], None, "prompt"),
        ([{"role": "user"}], None, "prompt"),
        ([("user",)], None, "prompt"),
        (5, None, "prompt"),
        (b"text", None, "prompt"),
        ("x", SamplingParams(seed=-1), "sampling"),
        ("x", SamplingParams(stop=(3,)), "sampling"),  # type: ignore[arg-type]
        ("x", SamplingParams(stop="The"), "sampling"),  # type: ignore[arg-type]
    ],
)
async def test_values_that_fit_no_field_are_named(
    service: Service, client: Client, prompt: Any, sampling: SamplingParams | None, field: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await client.complete(prompt, sampling=sampling)
    assert list(caught.value.violations) == [field]
    assert service.asked == []


@pytest.mark.parametrize("offset", [-1, 2**32])
async def test_an_offset_that_fits_no_field_is_named(service: Service, client: Client, offset: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="resume"):
        await anext(client.resume("s", offset))
    assert service.asked == []


# ---- leaving


async def leaves_by_break(client: Client) -> None:
    async for _ in client.generate("x"):
        break


async def leaves_by_closing(client: Client) -> None:
    async with aclosing(client.generate("x")) as chunks:
        await anext(chunks)


async def leaves_by_cancellation(client: Client) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in client.generate("x"):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leaves_by_break, leaves_by_closing, leaves_by_cancellation])
async def test_leaving_the_loop_cancels_the_call(
    service: Service, client: Client, leave: Callable[[Client], Awaitable[None]]
) -> None:
    cancelled = asyncio.Event()

    async def endless(request: Any, send: Send, context: Any) -> None:
        context.add_done_callback(lambda _: cancelled.set())
        await send(**WHOLE[0])
        await asyncio.Event().wait()

    service.acts = [endless]
    await leave(client)
    await cancelled.wait()


async def test_a_closed_client_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with Client"):
        await Client().complete("x")


# ---- calls that answer once


async def test_get_session(service: Service, client: Client) -> None:
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
    service.acts = [lambda request, send, context: send(answer)]
    session = await client.get_session(SESSION)
    assert service.asked == [pb.GetSessionRequest(session_id=SESSION)]
    assert (session.status, session.epoch, session.tokens) == (SessionStatus.FINISHED, 2, TOKENS)
    assert session.sampling == SamplingParams(temperature=0.5, seed=7)
    assert session.finish
    assert session.finish.reason is FinishReason.STOP


async def test_cancel_and_get_model_are_repeated_where_the_connection_broke(service: Service, client: Client) -> None:
    cancelled = pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED)
    models = pb.GetModelResponse(
        target=types_pb2.ModelInfo(name="large", vocab_size=5), drafters=["model", "ngram"], context_length=128
    )
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    service.acts = [
        gone,
        lambda request, send, context: send(cancelled),
        gone,
        lambda request, send, context: send(models),
    ]
    assert await client.cancel(SESSION) is SessionStatus.CANCELLED
    model = await client.get_model()
    assert (model.target.name, model.drafters, model.context_length) == ("large", ("model", "ngram"), 128)


async def test_an_unknown_session_is_not_found(service: Service, client: Client) -> None:
    service.acts = [sends(then=errors.NotFoundError("there is no session s-9"))]
    with pytest.raises(errors.NotFoundError, match="s-9"):
        await client.get_session("s-9")
