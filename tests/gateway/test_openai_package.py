"""OpenAI's own package, as it is: completions, chats, streams, log probabilities, and its exceptions."""

from typing import Any

import openai
import pytest

from specdec import errors
from specdec.v1 import generation_pb2 as pb
from tests.support.gateway import CANCELLED, CHAT, COMPLETION, MODEL, NAME, openai_client, serving_gateway
from tests.support.scripted import TEXT, WHOLE, Service, chunk, sends

MESSAGES = CHAT["messages"]


async def test_models_are_listed(service: Service, client: Any) -> None:
    service.handlers = [MODEL, MODEL]
    [model] = [entry async for entry in client.models.list()]
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "specdec")
    assert (await client.models.retrieve(NAME)).id == NAME


async def test_unknown_models_are_not_found(service: Service, client: Any) -> None:
    service.handlers = [MODEL]
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-6' does not exist here; the model is 'toy'"):
        await client.models.retrieve("gpt-6")
    with pytest.raises(openai.NotFoundError) as failed:
        await client.completions.create(model="gpt-6", prompt="x")
    assert (failed.value.code, failed.value.param) == ("model_not_found", "model")


async def test_completion_has_text_and_usage(service: Service, client: Any) -> None:
    service.handlers = [sends(*WHOLE)]
    answer = await client.completions.create(**COMPLETION, max_tokens=9, temperature=0.5, stop="END", seed=3)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (TEXT, "stop", 0, None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)
    assert (answer.object, answer.model, answer.system_fingerprint) == ("text_completion", NAME, "fp_abababababababab")
    [request] = service.requests
    sampling = request.sampling
    assert (request.text, sampling.max_new_tokens, sampling.temperature) == ("Tell me.", 9, 0.5)
    assert (sampling.stop, sampling.seed) == (["END"], 3)


async def test_chat_has_a_message(service: Service, client: Any) -> None:
    service.handlers = [sends(*WHOLE)]
    parts = [{"type": "text", "text": "Tell "}, {"type": "text", "text": "me."}]
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}],
    )
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", TEXT)
    [request] = service.requests
    assert [(entry.role, entry.content) for entry in request.chat.messages] == [
        ("system", "Be short."),
        ("user", "Tell me."),
    ]
    assert not request.sampling.HasField("max_new_tokens")


async def test_stream_has_every_piece_and_usage(service: Service, client: Any) -> None:
    service.handlers = [sends(*WHOLE)]
    options = {"include_usage": True}
    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options=options)
    events = [event async for event in stream]
    *pieces, usage = events
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [piece.choices[0].delta.content or "" for piece in pieces] == [
        "",
        "Once upon",
        " a",
        " time there",
        " was.",
        "",
    ]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 5 + ["stop"]
    assert all(piece.usage is None for piece in pieces)
    assert (usage.choices, usage.usage.total_tokens) == ([], 10)
    assert len({event.id for event in events}) == 1


async def test_stream_of_a_completion_has_text(service: Service, client: Any) -> None:
    service.handlers = [sends(*WHOLE)]
    stream = await client.completions.create(**COMPLETION, stream=True)
    events = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == TEXT
    assert events[-1].choices[0].finish_reason == "stop"


async def test_length_is_a_finish_reason(service: Service, client: Any) -> None:
    ending = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(num_prompt_tokens=3, num_completion_tokens=2))
    service.handlers = [sends(chunk(0, finish=ending))]
    answer = await client.completions.create(**COMPLETION)
    assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("length", "Once upon")
    assert service.requests[0].sampling.max_new_tokens == 16


async def test_extension_has_origins_and_statistics(service: Service, client: Any) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    wanted = {"drafter": "ngram", "num_draft_tokens": 4, "acceptance_rule": "token", "top_k": 5}
    answer = await client.chat.completions.create(**CHAT, extra_body={"specdec": wanted})
    details = answer.choices[0].model_extra["specdec"]
    assert [(token["id"], token["text"], token["origin"]) for token in details["tokens"]][:3] == [
        (1, "Once", "accepted"),
        (2, " upon", "bonus"),
        (3, " a", "bonus"),
    ]
    assert "".join(token["text"] for token in details["tokens"]) == TEXT
    assert details["rounds"][0] == {"drafter": "model", "num_draft_tokens": 2, "depth": 2, "end": 2}
    assert (details["statistics"]["acceptance_rate"], details["finish_reason"]) == (0.5, "stop")
    [request] = service.requests
    assert (request.speculation.drafter, request.speculation.num_draft_tokens, request.sampling.top_k) == (
        "ngram",
        4,
        5,
    )
    stream = await client.completions.create(**COMPLETION, stream=True, extra_body={"specdec": {}})
    events = [event async for event in stream]
    tokens = [token for event in events for token in event.choices[0].model_extra["specdec"].get("tokens", [])]
    assert tokens == details["tokens"]
    rounds = [each for event in events for each in event.choices[0].model_extra["specdec"].get("rounds", [])]
    assert rounds == details["rounds"]
    assert events[-1].choices[0].model_extra["specdec"]["statistics"]["num_rounds"] == 4


EXCEPTIONS = {
    "invalid": (errors.InvalidArgumentError({"sampling.max_new_tokens": "is 9; no"}), openai.BadRequestError, 400),
    "context": (errors.ContextTooShortError("too long"), openai.BadRequestError, 400),
    "key": (errors.UnauthenticatedError("the token is unknown"), openai.AuthenticationError, 401),
    "denied": (errors.PermissionDeniedError("not yours"), openai.PermissionDeniedError, 403),
    "lost": (errors.NotFoundError("no such session"), openai.NotFoundError, 404),
    "reused": (errors.AlreadyExistsError("other parameters"), openai.ConflictError, 409),
    "overloaded": (errors.OverloadedError("no room", 2.5), openai.RateLimitError, 429),
    "mismatch": (errors.ModelMismatchError("does not fit"), openai.InternalServerError, 500),
    "logits": (errors.NonFiniteLogitsError("NaN"), openai.InternalServerError, 500),
    "data loss": (errors.DataLossError("gone"), openai.InternalServerError, 500),
    "bug": (errors.InternalError(), openai.InternalServerError, 500),
}


@pytest.mark.parametrize(("sent", "kind", "status"), EXCEPTIONS.values(), ids=EXCEPTIONS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_become_openai_exceptions(
    service: Service,
    client: Any,
    sent: errors.SpecdecError,
    kind: type[openai.APIStatusError],
    status: int,
    stream: bool,
) -> None:
    service.handlers = [sends(then=sent)]
    with pytest.raises(kind) as failed:
        await client.chat.completions.create(**CHAT, stream=stream)
    assert failed.value.status_code == status
    body: Any = failed.value.body
    assert set(body) == {"message", "type", "param", "code"}


async def test_overload_says_when_to_try_again(service: Service, client: Any) -> None:
    service.handlers = [sends(then=errors.OverloadedError("no room", 2.5))]
    with pytest.raises(openai.RateLimitError, match="no room") as failed:
        await client.completions.create(**COMPLETION)
    headers = failed.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    assert len(service.requests) == 1, "the gateway tried again by itself"


async def test_wrong_fields_have_openai_names(service: Service, client: Any) -> None:
    service.handlers = [sends(then=errors.InvalidArgumentError({"sampling.max_new_tokens": "is 9; no"}))]
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is 9; no") as failed:
        await client.chat.completions.create(**CHAT)
    assert failed.value.param == "max_completion_tokens"


async def test_error_in_mid_stream_is_raised(service: Service, client: Any) -> None:
    service.handlers = [sends(WHOLE[0], then=errors.DataLossError("the store went back")), CANCELLED]
    stream = await client.chat.completions.create(**CHAT, stream=True)
    seen = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert seen == ["", "Once upon"]
    with pytest.raises(openai.APIError, match="the store went back"):
        await anext(stream)


async def test_cancelled_session_is_an_error(service: Service, client: Any) -> None:
    service.handlers = [sends(chunk(0, finish=pb.Finish(reason=pb.FINISH_REASON_CANCELLED)))]
    with pytest.raises(openai.ConflictError, match="was cancelled"):
        await client.completions.create(**COMPLETION)


async def test_no_coordinator_is_unavailable(service: Service, coordinator: str) -> None:
    service.handlers = [MODEL, *[sends(then=errors.UnavailableError("loading", 0.01))] * 1000]
    async with serving_gateway(coordinator, patience_s=0.3) as port, openai_client(port) as client:
        with pytest.raises(openai.InternalServerError, match="loading") as failed:
            await client.completions.create(**COMPLETION)
    assert (failed.value.status_code, failed.value.response.headers["retry-after"]) == (503, "1")


async def test_logprobs_need_a_tokenizer(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="start it with --tokenizer"):
        await client.chat.completions.create(**CHAT, logprobs=True)
