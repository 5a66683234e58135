"""What requests may ask for: fields to parameters, and a refusal with the field's name for all else."""

import json
from typing import Any

import pytest

from gateway.asked import Asked, chat_asked, completion_asked
from gateway.problems import HttpProblem
from specdec.types import AcceptanceRuleName
from tests.support.gateway import CHAT, COMPLETION

USER = {"role": "user", "content": "x"}


def chat(**fields: Any) -> Asked:
    return chat_asked(CHAT | fields, 8)


def completion(**fields: Any) -> Asked:
    return completion_asked(COMPLETION | fields, 8)


def test_sampling_parameters_are_taken() -> None:
    asked = chat(
        temperature=0,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=7,
        stop=["a", "b"],
        logit_bias={"5": -100, "6": 1.5},
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
    )
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (0, 0.5, 7, ("a", "b"))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.max_new_tokens) == (1, -1, 9)
    assert (sampling.logit_bias, sampling.num_logprobs) == ({5: -100, 6: 1.5}, 3)


def test_null_is_as_absent() -> None:
    names = ("temperature", "stop", "n", "seed", "tools", "response_format", "stream", "stream_options", "logit_bias")
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(("fields", "num_logprobs"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)])
def test_logprobs_of_a_chat_are_a_switch(fields: dict[str, Any], num_logprobs: int | None) -> None:
    assert chat(**fields).sampling.num_logprobs == num_logprobs


def test_response_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert chat(response_format=named).sampling.json_schema == json.dumps(schema)
    assert chat(response_format={"type": "json_object"}).sampling.json_schema == '{"type": "object"}'
    assert chat(response_format={"type": "text"}).sampling.json_schema is None


def test_completions_take_grammars_in_the_extension() -> None:
    assert completion(specdec={"regex": "a+"}).sampling.regex == "a+"
    assert completion(specdec={"json_schema": {"type": "object"}}).sampling.json_schema == '{"type": "object"}'
    assert completion(specdec={"lark": "start: /a/"}).sampling.lark == "start: /a/"


def test_one_stop_text_is_a_list_of_one() -> None:
    assert chat(stop="a long stop text").sampling.stop == ("a long stop text",)


def test_token_limits_may_agree() -> None:
    assert chat(max_tokens=5).sampling.max_new_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).sampling.max_new_tokens == 5


def test_values_that_ask_for_nothing_are_taken() -> None:
    nothing = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "store": False,
        "parallel_tool_calls": True,
        "user": "someone",
        "service_tier": "auto",
    }
    assert chat(**nothing) == chat()
    assert completion(best_of=1, echo=False, suffix="", user="someone") == completion()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: list[Any]) -> None:
    assert list(completion(prompt=prompt).prompts) == expected


def test_choices_have_seeds_of_their_own() -> None:
    asked = completion(prompt=["a", "b"], n=2, seed=7)
    choices = [asked.choice(index) for index in range(asked.total_choices)]
    assert [prompt for prompt, _ in choices] == ["a", "a", "b", "b"]
    seeds = [sampling.seed for _, sampling in choices]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds == [asked.choice(index)[1].seed for index in range(4)]
    assert {sampling.seed for _, sampling in map(completion(n=3).choice, range(3))} == {None}


def test_negative_seeds_are_seeds() -> None:
    assert chat(seed=-1).sampling.seed == 2**64 - 1


def test_extension_is_taken() -> None:
    wanted = {
        "drafter": "ngram",
        "num_draft_tokens": 0,
        "acceptance_rule": "block",
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    asked = chat(specdec=wanted)
    assert asked.speculation is not None
    assert (asked.speculation.drafter, asked.speculation.num_draft_tokens) == ("ngram", 0)
    assert asked.speculation.acceptance_rule is AcceptanceRuleName.BLOCK
    assert (asked.sampling.top_k, asked.sampling.min_p, asked.sampling.ignore_eos) == (4, 0.1, True)
    assert asked.with_details
    assert not chat().with_details


REFUSED_OF_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 5}, "model", "is 5; give a text"),
    ({"model": ""}, "model", "is missing or empty"),
    ({"temperature": "hot"}, "temperature", "is 'hot'; give a number in [0, 100]"),
    ({"temperature": True}, "temperature", "give a number"),
    ({"temperature": -1}, "temperature", "is -1; give a number"),
    ({"temperature": float("inf")}, "temperature", "is inf; give a number"),
    ({"top_p": 0}, "top_p", "give a number in (0, 1]"),
    ({"seed": 1.5}, "seed", "give a whole number"),
    ({"seed": 2**64}, "seed", "the maximum is"),
    ({"n": 0}, "n", "give a whole number from 1 to 8"),
    ({"n": 9}, "n", "the maximum is 8"),
    ({"stream": "yes"}, "stream", "give true or false"),
    ({"stop": [""]}, "stop", "has a string of 0 characters"),
    ({"stop": 5}, "stop", "give a text or a list of texts"),
    ({"stop": ["x"] * 17}, "stop", "has 17 strings; the maximum is 16"),
    ({"stop": "\ud800"}, "stop", "has a text without a UTF-8 encoding"),
    ({"logit_bias": [1]}, "logit_bias", "give an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias", 'has the key "a"; give token ids'),
    ({"logit_bias": {"5": 101}}, "logit_bias", "give numbers in [-100, 100]"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "is unknown"),
    ({"specdec": 5}, "specdec", "give a JSON object"),
    ({"specdec": {"draft": "x"}}, "specdec.draft", "is unknown to this service; the nearest is drafter"),
    ({"specdec": {"num_draft_tokens": 33}}, "specdec.num_draft_tokens", "the maximum is 32"),
    ({"specdec": {"acceptance_rule": "all"}}, "specdec.acceptance_rule", "give one of token, block"),
    ({"temprature": 1}, "temprature", "is unknown to this service; the nearest is temperature"),
    ({"user": 5}, "user", "give a text"),
]
REFUSED_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "is missing or empty"),
    ({"messages": "hello"}, "messages", 'is "hello"; give a list of messages'),
    ({"messages": ["hello"]}, "messages[0]", "give a JSON object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "give one of system, developer"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is null; give a text"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "is not supported"),
    ({"messages": [USER | {"nam": "x"}]}, "messages[0].nam", "the nearest is name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        'is "image_url"; this service takes parts of the type text alone',
    ),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "and max_completion_tokens differ"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "give a whole number"),
    ({"logprobs": 5}, "logprobs", "give true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "the maximum is 20"),
    ({"response_format": "json"}, "response_format", "give a JSON object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "give one of text, json_object, json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "is missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}},
        "response_format.json_schema.schema",
        "give a JSON schema",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
        "response_format.json_schema",
        "needs the type json_schema",
    ),
    ({"specdec": {"regex": ""}}, "specdec.regex", "has 0 characters"),
    ({"tools": [{"type": "function"}]}, "tools", "is not supported by this service; leave it out, or give []"),
    ({"tool_choice": "required"}, "tool_choice", "is not supported"),
    ({"audio": {"voice": "x"}}, "audio", "is not supported by this service; leave it out"),
    ({"modalities": ["text", "audio"]}, "modalities", "is not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is not supported"),
    ({"store": True}, "store", "is not supported"),
    ({"store": 0}, "store", "is not supported"),
    ({"best_of": 1}, "best_of", "is unknown"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "is not supported"),
]
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "is missing or empty"),
    ({"prompt": ""}, "prompt", "is missing or empty"),
    ({"prompt": []}, "prompt", "is missing or empty"),
    ({"prompt": 5}, "prompt", "give a text, token ids"),
    ({"prompt": ["a", 1]}, "prompt", "is a list of length 2"),
    ({"prompt": [1, -1]}, "prompt", "give a text, token ids"),
    ({"prompt": [True]}, "prompt", "give a text, token ids"),
    ({"prompt": ["a"] * 5, "n": 2}, "prompt", "and n make 10 choices; the maximum is 8"),
    ({"best_of": 2}, "best_of", "is not supported by this service; leave it out, or give 1"),
    ({"echo": True}, "echo", "is not supported"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    ({"logprobs": True}, "logprobs", "give a whole number"),
    ({"max_tokens": 0}, "max_tokens", "give a whole number"),
    ({"messages": [USER]}, "messages", "is unknown"),
]


@pytest.mark.parametrize(("fields", "param", "sentence"), [*REFUSED_OF_BOTH, *REFUSED_CHATS])
def test_wrong_chats_are_refused(fields: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(HttpProblem) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param} ")
    assert sentence in refused.value.message


@pytest.mark.parametrize(("fields", "param", "sentence"), [*REFUSED_OF_BOTH, *REFUSED_COMPLETIONS])
def test_wrong_completions_are_refused(fields: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(HttpProblem) as refused:
        completion(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert sentence in refused.value.message


@pytest.mark.parametrize("body", [None, 5, "x", [], [{}]])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(HttpProblem, match=r"the body is .*; give a JSON object"):
        chat_asked(body, 8)


def test_long_values_are_not_quoted_whole() -> None:
    with pytest.raises(HttpProblem) as refused:
        chat(temperature="x" * 100_000)
    assert len(refused.value.message) < 1000
