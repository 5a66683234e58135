"""OpenAI's package asks for JSON: its own helpers, unmodified, against real services with the demo pair."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict

from specdec.serving.tokenizer import load_tokenizer
from tests.support.cluster import cluster
from tests.support.gateway import openai_client, serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = Path(__file__).parents[2] / "models"
MESSAGES = [{"role": "user", "content": "def greet(name):"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Person(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    age: int
    colour: Literal["red", "green", "blue"]
    is_tall: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A client of the gateway; the target has a chat template besides."""
    target = tmp_path_factory.mktemp("target")
    for file in (MODELS / "target").iterdir():
        (target / file.name).symlink_to(file)
    (target / "tokenizer_config.json").unlink(missing_ok=True)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(str(target))
    async with (
        cluster(target, MODELS / "draft") as running,
        serving_gateway(running.address, tokenizer=str(target)) as port,
        openai_client(port) as client,
    ):
        yield client


async def model_of(client: Any) -> str:
    name: str = (await client.models.list()).data[0].id
    return name


async def test_an_answer_is_parsed_into_a_class(client: Any) -> None:
    for seed in range(3):
        answer = await client.chat.completions.parse(
            model=await model_of(client), messages=MESSAGES, response_format=Person, seed=seed, max_tokens=80
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


async def test_a_stream_is_parsed_into_a_class(client: Any) -> None:
    request = {"messages": MESSAGES, "response_format": Person, "seed": 5, "max_tokens": 80}
    async with client.chat.completions.stream(model=await model_of(client), **request) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


async def test_a_json_object_is_any_object(client: Any) -> None:
    """The text may be cut, as nothing limits it: but what there is begins an object."""
    answer = await client.chat.completions.create(
        model=await model_of(client), messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40, seed=1
    )
    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


async def test_a_regular_expression_comes_in_the_extension(client: Any) -> None:
    answer = await client.completions.create(
        model=await model_of(client),
        prompt="x = ",
        max_tokens=40,
        extra_body={"specdec": {"regex": "[0-9]{3}-[a-f]{2}"}},
    )
    number, _, letters = answer.choices[0].text.partition("-")
    assert (len(number), len(letters), number.isdigit()) == (3, 2, True)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "colour"}, "colour"),
        ({"$ref": "https://example.org/x"}, "is wrong"),
        ({"type": "string", "pattern": "("}, "is wrong"),
    ],
)
async def test_a_wrong_schema_is_a_bad_request(client: Any, schema: dict[str, Any], words: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.chat.completions.create(
            model=await model_of(client), messages=MESSAGES, response_format=form, max_tokens=8
        )
    assert caught.value.param == "response_format"
