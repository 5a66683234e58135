"""The asynchronous client against a scripted service: requests, chunks, sessions, and the client's own life."""

import asyncio
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
from tests.support.scripted import (
    SESSION,
    TEXT,
    TOKENS,
    WHOLE,
    Endless,
    Handler,
    Send,
    Service,
    answers,
    chunk,
    digest_at,
    sends,
    served,
)

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
