"""Structured output through all three services, with the demo pair: texts have their form, drafted or not."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.grammars import ForcedDrafter, SessionGrammars
from specdec import AsyncClient, Completion, FinishReason, InvalidArgumentError, SamplingParams, SpeculationParams
from specdec.serving.tokenizer import load_tokenizer
from specdec.types import ModelInfo
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = Path(__file__).parents[2] / "models"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
REGEX = r"The (cat|dog|old man) (sat|ran) (on|to) the [a-z]{3,8}\."
LARK = """
start: sum
sum: product (" + " product)~0..2
product: NUMBER (" * " NUMBER)~0..2
NUMBER: /[1-9][0-9]{0,2}/
"""
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": REGEX},
    "lark": {"lark": LARK},
}
SPECULATIONS = {
    "plain": SpeculationParams(num_draft_tokens=0),
    "automatic": SpeculationParams(),
    "model": SpeculationParams(num_draft_tokens=4, drafter="model"),
    "ngram": SpeculationParams(num_draft_tokens=4, drafter="ngram"),
    "recycle": SpeculationParams(num_draft_tokens=8, drafter="recycle"),
}
CHAIN = "start: r0" + "".join(f"\nr{rule}: r{rule + 1}" for rule in range(3000)) + "\nr3000: /a/"  # overflows a stack
PROMPT = "Once upon a time there was"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    demo = cluster(MODELS / "target", MODELS / "draft", drafters="model,ngram,recycle")
    async with demo as running, AsyncClient(running.address) as opened:
        yield opened


def has_form(form: str, text: str) -> bool:
    """Judge a text by other programs than the one that masks."""
    if form == "json_schema":
        found = json.loads(text)
        assert list(found) == list(SCHEMA["properties"])  # type: ignore[call-overload]
        colours = found["colours"]
        is_right = set(colours) <= {"red", "green", "blue"} and len(colours) <= 3
        return is_right and type(found["age"]) is int and 0 <= found["age"] <= 150 and len(found["name"]) <= 12
    number = r"[1-9]\d{0,2}"
    product = rf"{number}( \* {number}){{0,2}}"
    pattern = REGEX if form == "regex" else rf"{product}( \+ {product}){{0,2}}"
    return bool(re.fullmatch(pattern, text))


async def completed(client: AsyncClient, form: str, speculation: SpeculationParams, **parameters: Any) -> Completion:
    sampling = SamplingParams(max_new_tokens=120, **FORMS[form], **parameters)
    return await client.complete(PROMPT, sampling=sampling, speculation=speculation)


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("form", FORMS)
async def test_texts_have_their_form(client: AsyncClient, form: str, speculation: str) -> None:
    for seed in range(2):
        completion = await completed(client, form, SPECULATIONS[speculation], seed=seed)
        assert completion.finish_reason is FinishReason.EOS
        assert has_form(form, completion.text), completion.text


@pytest.mark.parametrize("form", FORMS)
async def test_greedy_texts_do_not_depend_on_drafts(client: AsyncClient, form: str) -> None:
    plain = await completed(client, form, SPECULATIONS["plain"], temperature=0)
    for speculation in SPECULATIONS.values():
        assert (await completed(client, form, speculation, temperature=0)).tokens == plain.tokens


async def test_plain_decoding_drafts_nothing(client: AsyncClient) -> None:
    statistics = (await completed(client, "json_schema", SPECULATIONS["plain"], seed=1)).statistics
    assert (statistics.num_draft_tokens, statistics.num_rounds) == (0, statistics.num_tokens)


async def test_forced_text_takes_few_rounds(client: AsyncClient) -> None:
    """A drafter that knows nothing of the text does not matter: what is forced is proposed, and accepted."""
    regex = "(yes|no): the quick brown fox jumps over the lazy dog, and nobody knows why it does so again and again"
    sampling = SamplingParams(regex=regex, seed=1)
    speculation = SpeculationParams(num_draft_tokens=8, drafter="ngram")
    statistics = (await client.complete(PROMPT, sampling=sampling, speculation=speculation)).statistics
    assert statistics.num_tokens > 20
    assert statistics.num_rounds < statistics.num_tokens / 4


async def test_masked_drafts_are_accepted_more_often(client: AsyncClient) -> None:
    """The model's draft has the form too: a text that it would never write alone is drafted as well."""
    statistics = [(await completed(client, "lark", SPECULATIONS["model"], seed=seed)).statistics for seed in range(8)]
    drafted, accepted = (
        sum(getattr(each, f"num_{kind}_tokens") for each in statistics) for kind in ("draft", "accepted")
    )
    assert accepted > 0.2 * drafted


async def test_a_resumed_text_keeps_its_form(client: AsyncClient) -> None:
    """Another stream, with a matcher of its own, goes on where the first one stopped."""
    sampling = SamplingParams(seed=3, temperature=0, max_new_tokens=120, json_schema=SCHEMA)
    plain = SpeculationParams(num_draft_tokens=0)
    whole = await client.complete(PROMPT, sampling=sampling, speculation=plain)
    begun, session_id = "", ""
    async for chunk in client.generate(PROMPT, sampling=sampling, speculation=plain):
        begun, session_id = begun + chunk.text, chunk.session_id
        num_tokens = chunk.offset + len(chunk.tokens)
        if num_tokens >= 9:
            break
    rest = "".join([chunk.text async for chunk in client.resume(session_id, offset=num_tokens)])
    assert begun + rest == whole.text
    assert has_form("json_schema", whole.text)


async def test_a_form_ends_where_the_limit_does(client: AsyncClient) -> None:
    sampling = SamplingParams(seed=3, max_new_tokens=5, json_schema=SCHEMA)
    completion = await client.complete(PROMPT, sampling=sampling)
    assert (completion.finish_reason, len(completion.tokens)) == (FinishReason.LENGTH, 5)


async def test_sessions_with_and_without_forms_share_forwards(client: AsyncClient) -> None:
    alone = [await completed(client, form, SPECULATIONS["model"], seed=5) for form in FORMS]
    free = SamplingParams(seed=5, max_new_tokens=40)
    together = await asyncio.gather(
        *(completed(client, form, SPECULATIONS["model"], seed=5) for form in FORMS),
        client.complete(PROMPT, sampling=free, speculation=SPECULATIONS["model"]),
    )
    assert [has_form(form, each.text) for form, each in zip(FORMS, together, strict=False)] == [True] * 3
    assert [each.finish_reason for each in alone] == [FinishReason.EOS] * 3


# ---- what is refused, before anything is written


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"regex": "(a"}, "sampling.regex is wrong"),
        ({"json_schema": '{"type": "colour"}'}, "sampling.json_schema is wrong"),
        ({"lark": "begin: /a/"}, "sampling.lark is wrong"),
        ({"regex": "a", "lark": "start: /a/"}, "cannot be combined with regex"),
        ({"regex": "a", "ignore_eos": True}, "sampling.ignore_eos cannot be combined"),
        ({"regex": ""}, "has 0 characters"),
        ({"regex": "a" * 70_000}, "has 70000 characters"),
        ({"lark": CHAIN}, "nested too deeply"),
        ({"json_schema": {"type": {1, 2}}}, "give a text"),
    ],
)
async def test_wrong_forms_are_refused(client: AsyncClient, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        await client.complete(PROMPT, sampling=SamplingParams(**parameters))


async def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    """A tokenizer of whole words, and a model without an end, cannot serve a grammar; other requests are served."""
    model = save_tokenizer(build("llama", tmp_path), VOCAB_SIZE)
    async with cluster(model) as running, AsyncClient(running.address) as client:
        with pytest.raises(InvalidArgumentError, match="cannot be used"):
            await client.complete("t5", regex="a+")
        assert (await client.complete("t5", max_new_tokens=3, ignore_eos=True)).tokens


# ---- at the coordinator


async def test_what_is_forced_leaves_room_for_the_closing_token() -> None:
    tokenizer = load_tokenizer(str(MODELS / "target"))
    target = ModelInfo("target", vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(0,))
    sampling = SamplingParams(regex="hello there, my good old friend")
    grammars = SessionGrammars(tokenizer)
    drafter = await grammars.forced(sampling, target, 6)
    assert isinstance(drafter, ForcedDrafter)
    assert len(drafter.propose([7, 8], 2, 100)) == 6
    assert len(drafter.propose([7, 8], 2, 3)) == 2
    assert len(drafter.propose([7, 8], 2, 1)) == 0
    assert len(drafter.propose([7, 8, 5], 2, 100)) == 0, "a text of another form"
    assert await grammars.forced(SamplingParams(), target, 6) is None
    assert await grammars.forced(sampling, target, 0) is None
    grammars.close()
