"""Wrong arguments raise at the call and name the field; nothing is sent."""

import math
from typing import Any

import numpy as np
import pytest

import specdec
from specdec import AsyncClient, InvalidArgumentError, SamplingParams, SpeculationParams, api, errors
from specdec.channel import MAX_PROMPT_BYTES, MAX_REQUEST_BYTES
from specdec.messages import check_sampling
from specdec.request import generate_request
from specdec.v1 import generation_pb2

CLIENT = AsyncClient("127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "field", "problem"),
    [
        ({}, "prompt", "is missing"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt", "both given"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [1, 2]}, "prompt", "token ids as prompt_token_ids"),
        ({"prompt": b"text"}, "prompt", "give text"),
        ({"prompt": "\ud800"}, "prompt", "no UTF-8"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "is empty"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids", "-1"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids", str(2**32)),
        ({"prompt_token_ids": [1, "two"]}, "prompt_token_ids", "'two'"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids", "True"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids", "a list"),
        ({"prompt_token_ids": b"12"}, "prompt_token_ids", "a list"),
        ({"prompt_token_ids": 5}, "prompt_token_ids", "a list"),
        ({"prompt": "x", "request_id": 5}, "request_id", "give text"),
        ({"prompt": "x", "sampling": {"seed": 1}}, "sampling", "give SamplingParams"),
        ({"prompt": "x", "speculation": 4}, "speculation", "give SpeculationParams"),
        ({"prompt": "x", "seed": -1}, "sampling.seed", "-1"),
        ({"prompt": "x", "temperature": "hot"}, "sampling.temperature", "[0, 100]"),
        ({"prompt": "x", "temperature": math.nan}, "sampling.temperature", "nan"),
        ({"prompt": "x", "top_p": 0}, "sampling.top_p", "(0, 1]"),
        ({"prompt": "x", "top_k": 1.5}, "sampling.top_k", "1.5"),
        ({"prompt": "x", "stop": 3}, "sampling.stop", "give a text"),
        ({"prompt": "x", "stop": (3,)}, "sampling.stop", "has 3"),
        ({"prompt": "x", "stop": "\ud800"}, "sampling.stop", "UTF-8"),
        ({"prompt": "x", "stop_token_ids": 3}, "sampling.stop_token_ids", "a list"),
        ({"prompt": "x", "stop_token_ids": [-3]}, "sampling.stop_token_ids", "-3"),
        ({"prompt": "x", "logit_bias": [1]}, "sampling.logit_bias", "a mapping"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "sampling.logit_bias", "'a'"),
        ({"prompt": "x", "logit_bias": {1: "a"}}, "sampling.logit_bias", "'a' for token 1"),
        ({"prompt": "x", "ignore_eos": 1}, "sampling.ignore_eos", "True or False"),
        ({"prompt": "x", "timeout_s": 0}, "timeout_s", "seconds"),
        ({"prompt": "x", "timeout_s": math.inf}, "timeout_s", "seconds"),
        ({"prompt": "x", "timeout_s": "5"}, "timeout_s", "seconds"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CLIENT.generate(**arguments)
    assert list(caught.value.violations) == [field]
    assert problem in caught.value.violations[field]
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_draft_tokens": 33}, r"num_draft_tokens is 33; give 0 \(plain decoding\) to 32"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"drafter": 5}, "drafter is 5"),
        ({"acceptance_rule": "block"}, "acceptance_rule is 'block'; give an AcceptanceRuleName"),
    ],
)
def test_wrong_speculation_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        CLIENT.generate("x", speculation=SpeculationParams(**changes))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (5, "messages"),
        (["hi"], "messages[0]"),
        ([("user",)], "messages[0]"),
        ([("user", "hi"), {"role": "user"}], "messages[1]"),
        ([{"role": "user", "content": "hi", "name": "n"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([(5, "hi")], "messages[0].role"),
        ([("user", "\ud800")], "messages[0]"),
    ],
)
def test_wrong_message_is_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CLIENT.stream_chat(messages)
    assert list(caught.value.violations) == [field]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "s", "offset": -1}, "offset"),
        ({"session_id": "s", "offset": 2**32}, "offset"),
        ({"session_id": "s", "digest": b"short"}, "digest"),
        ({"session_id": "s", "digest": "x" * 16}, "digest"),
    ],
)
def test_wrong_resume_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CLIENT.resume(**arguments)
    assert list(caught.value.violations) == [field]


@pytest.mark.parametrize("arguments", [{"timeout_s": -1}, {"max_retries": -1}, {"connect_timeout_s": 0}])
def test_wrong_client_setting_is_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        AsyncClient(**arguments)
    assert list(caught.value.violations) == list(arguments)


async def test_coroutines_check_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="session_id is empty"):
        await CLIENT.get_session("")
    with pytest.raises(InvalidArgumentError, match="session_id is empty"):
        await CLIENT.cancel("")
    with pytest.raises(InvalidArgumentError, match="prompt is missing"):
        await CLIENT.complete()
    with pytest.raises(InvalidArgumentError, match="messages is empty"):
        await CLIENT.chat([])


def test_unknown_keyword_names_the_nearest() -> None:
    arguments: dict[str, Any] = {"temprature": 1}
    with pytest.raises(TypeError, match="'temprature'; the nearest sampling parameter is temperature"):
        CLIENT.generate("x", **arguments)


def test_too_long_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=rf"\d+ bytes; the maximum is {MAX_REQUEST_BYTES} bytes; shorten"):
        CLIENT.generate("x" * MAX_REQUEST_BYTES)


def test_largest_parameters_fit_beside_the_largest_prompt() -> None:
    """The largest that the checks allow, in characters of four bytes and numbers of many digits."""
    largest = 2**32 - 1
    sampling = SamplingParams(
        top_k=largest,
        seed=2**64 - 1,
        max_new_tokens=largest,
        num_logprobs=20,
        logit_bias=dict.fromkeys(range(largest - 1023, largest + 1), 100.0),
        stop=["\U0001f600" * 256] * 16,
        stop_token_ids=[largest] * 256,
    )
    check_sampling(sampling)
    speculation = SpeculationParams(num_draft_tokens=32, drafter="\U0001f600" * 64)
    prompt = generation_pb2.GenerateRequest(text="x" * MAX_PROMPT_BYTES)
    made = generate_request(prompt, sampling, speculation, "\U0001f600" * 255)
    assert MAX_PROMPT_BYTES < made.ByteSize() <= MAX_REQUEST_BYTES


def test_errors_do_not_quote_long_prompts() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CLIENT.generate(b"secret" * 100)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_numpy_values_are_accepted() -> None:
    scalars: Any = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    CLIENT.generate(prompt_token_ids=np.arange(3), **scalars)


def test_single_stop_text_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_public_names_resolve() -> None:
    names = set(api.__all__)
    assert names <= set(dir(specdec))
    assert all(getattr(specdec, name) is getattr(api, name) for name in names)
    kinds: list[type[Exception]] = [errors.SpecdecError, *errors.ERRORS]
    assert {name for name in names if name.endswith("Error")} == {kind.__name__ for kind in kinds}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        specdec.Nothing  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("localhost", "as localhost:50051"),
        ("", "as 127.0.0.1:50051"),
        ("http://localhost:50051", "without http://, as localhost:50051"),
        ("https://example.org/path", "without https://, as example.org:50051"),
        ("::1:50051", "host:port"),
        ("h:port", "host:port"),
        (50051, "host:port"),
    ],
)
def test_wrong_address_is_refused(address: Any, remedy: str) -> None:
    for kind in (AsyncClient, specdec.Client):
        with pytest.raises(InvalidArgumentError) as caught:
            kind(address)
        assert remedy in caught.value.violations["address"]


@pytest.mark.parametrize(
    "address",
    ["h:1", "127.0.0.1:50051", "[::1]:50051", "dns:///h:1", "unix:/run/specdec", "ipv4:127.0.0.1:1,127.0.0.2:1"],
)
def test_every_form_of_an_address_is_accepted(address: str) -> None:
    assert AsyncClient(address, insecure=True).address == address
