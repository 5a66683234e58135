"""The gateway in front of real services: OpenAI's package and curl get what specdec's own client gets."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from specdec import AsyncClient, SpeculationParams
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer
from tests.support.gateway import asked, openai_client, serving_gateway
from tests.support.running_up import up

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
PROMPT = "t5 t6 t7"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NUM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Services:
    """Where the gateway and the coordinator listen."""

    port: int
    address: str
    model: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    model = save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with cluster(model, model) as running, serving_gateway(running.address, tokenizer=str(model)) as port:
        yield Services(port, running.address, model.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(services: Services) -> AsyncIterator[Any]:
    async with openai_client(services.port) as client:
        yield client


def wanted(services: Services, **fields: Any) -> dict[str, Any]:
    common = {"model": services.model, "temperature": 0, "max_tokens": NUM_TOKENS}
    return common | {"extra_body": {"specdec": {"ignore_eos": True}}} | fields


async def expected(services: Services, **parameters: Any) -> Any:
    async with AsyncClient(services.address) as own:
        return await own.complete(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, **parameters)


async def test_completion_is_the_clients_own(services: Services, client: Any) -> None:
    own = await expected(services, temperature=0)
    answer = await client.completions.create(**wanted(services, prompt=PROMPT))
    assert answer.choices[0].text == own.text
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (NUM_TOKENS, "length")
    encoded = await client.completions.create(**wanted(services, prompt=[0]))
    assert encoded.usage.prompt_tokens == 1


async def test_chat_and_its_stream_are_the_same(services: Services, client: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    whole = await client.chat.completions.create(**wanted(services, messages=messages))
    assert whole.choices[0].message.content == (await expected(services, temperature=0)).text
    stream = await client.chat.completions.create(**wanted(services, messages=messages, stream=True))
    pieces = [event.choices[0].delta.content or "" async for event in stream]
    assert "".join(pieces) == whole.choices[0].message.content


async def test_logprobs_are_the_clients_own(services: Services, client: Any) -> None:
    own = await expected(services, temperature=0, num_logprobs=2)
    messages = [{"role": "user", "content": PROMPT}]
    answer = await client.chat.completions.create(**wanted(services, messages=messages, logprobs=True, top_logprobs=2))
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [f"t{token}" for token in own.tokens]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in own.logprobs], abs=1e-5)
    assert [[top.token for top in entry.top_logprobs] for entry in entries] == [
        [f"t{token}" for token, _ in entry.top] for entry in own.logprobs
    ]
    assert bytes(entries[0].bytes).decode() == entries[0].token
    legacy = await client.completions.create(**wanted(services, prompt=PROMPT, logprobs=2))
    assert legacy.choices[0].logprobs.tokens == [entry.token for entry in entries]


async def test_choices_have_texts_of_their_own(services: Services, client: Any) -> None:
    plain = {"extra_body": {"specdec": {"ignore_eos": True, "num_draft_tokens": 0}}}
    fields = wanted(services, prompt=[PROMPT, "t9"], temperature=1, n=2, seed=11, **plain)
    first, again = [await client.completions.create(**fields) for _ in range(2)]
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in again.choices] == texts
    own = await expected(services, temperature=1, seed=11, speculation=SpeculationParams(num_draft_tokens=0))
    assert texts[0] == own.text


async def test_repeated_request_is_the_same_session(services: Services) -> None:
    content = {"model": services.model, "prompt": PROMPT, "specdec": {}}
    answers = [await asked(services.port, "/v1/completions", content, x_request_id="once") for _ in range(2)]
    [first, second] = [answer.json["choices"][0] for answer in answers]
    assert first["specdec"]["session_id"] == second["specdec"]["session_id"]
    assert first["text"] == second["text"]


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens", "is 5000; this server's limit is 4096"),
        ({"prompt": [0] * 200}, "prompt", "has 200 tokens; the model's context holds 128"),
        ({"prompt": [99_999]}, "prompt", "99999"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"prompt": "x", "extra_body": {"specdec": {"drafter": "best"}}}, "specdec.drafter", "best"),
    ],
)
async def test_what_the_service_refuses_has_openai_names(
    services: Services, client: Any, fields: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError) as failed:
        await client.completions.create(**wanted(services, **fields))
    assert failed.value.param == param
    assert sentence in failed.value.message


async def curl(*words: str) -> bytes:
    """Return what curl prints."""
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
async def test_curl_gets_text_and_streams(services: Services) -> None:
    content = {"model": services.model, "prompt": PROMPT, "temperature": 0, "specdec": {"ignore_eos": True}}
    url = f"http://127.0.0.1:{services.port}/v1"
    words = (f"{url}/completions", "--no-buffer", "--header", "content-type: application/json", "--data")
    whole = json.loads(await curl(*words, json.dumps(content)))
    streamed = await curl(*words, json.dumps(content | {"stream": True}))
    *events, last = [line.removeprefix("data: ") for line in streamed.decode().split("\n\n") if line]
    assert last == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(pieces) == whole["choices"][0]["text"]
    refused = json.loads(await curl(f"{url}/completions", "--data", "model=x"))
    assert refused["error"]["code"] == "unsupported_content_type"


def retries() -> float:
    return REGISTRY.get_sample_value("specdec_gateway_retries_total") or 0.0


@pytest.mark.long
async def test_text_is_whole_after_a_killed_coordinator(tmp_path: Path) -> None:
    """The target waits while its coordinator is killed, so that the stream is in its middle for certain."""
    flags = ("--target", str(ROOT / "models/target"), "--draft", "none", "--state-dir", str(tmp_path / "state"))
    async with up(*flags) as running:
        address = await running.ready()
        children, before = running.children, retries()
        async with serving_gateway(address) as port, openai_client(port) as client:
            common = {"model": "target", "prompt": "def main(", "temperature": 0, "max_tokens": 200}
            common |= {"extra_body": {"specdec": {"ignore_eos": True}}}
            stream = await client.completions.create(**common, stream=True)
            texts = [(await anext(stream)).choices[0].text]
            os.kill(children["target_service"], signal.SIGSTOP)
            os.kill(children["coordinator"], signal.SIGKILL)
            await running.logged("service_lost.*coordinator")
            os.kill(children["target_service"], signal.SIGCONT)
            texts += [event.choices[0].text async for event in stream]
            assert retries() > before
            whole = await client.completions.create(**common)
    assert "".join(texts) == whole.choices[0].text
    assert whole.usage.completion_tokens == 200
