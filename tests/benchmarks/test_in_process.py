"""transformers' own ways of drafting, counted as rounds."""

import pytest

from benchmarks.in_process import InProcess, in_process
from benchmarks.measure import Prompt
from specdec import SamplingParams
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer

PROMPT = Prompt("text", "5 6 7 5 6 7 5 6 7 5 6 7")
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[InProcess]:
    """A target that is its own assistant."""
    folder = tmp_path_factory.mktemp("model")
    model = str(save_tokenizer(build("llama", folder), VOCAB_SIZE))
    return in_process(model, model, "float32", 1)


def test_greedy_texts_are_the_same(ways: list[InProcess]) -> None:
    texts = {way.reference.continuation(PROMPT, GREEDY, **way.drafting) for way in ways}
    assert len(ways) == 3
    assert {len(text) for text in texts} == {NUM_TOKENS}
    assert len(texts) == 1


async def test_forwards_are_counted_as_rounds(ways: list[InProcess]) -> None:
    plain, lookup, assisted = [await way.complete(PROMPT, GREEDY) for way in ways]
    assert (plain.num_rounds, plain.num_draft_tokens, plain.num_accepted_tokens) == (NUM_TOKENS, 0, 0)
    assert lookup.num_draft_tokens > 0
    assert assisted.num_accepted_tokens == NUM_TOKENS - assisted.num_rounds > 0
    assert {each.num_tokens for each in (plain, lookup, assisted)} == {NUM_TOKENS}


def test_texts_end_where_the_model_ends_them(ways: list[InProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ways[0].reference
    text = reference.continuation(PROMPT, GREEDY)
    monkeypatch.setattr(reference.model.generation_config, "eos_token_id", text[3])
    ending = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
    assert reference.continuation(PROMPT, ending) == text[: text.index(text[3]) + 1]


async def test_sampled_texts_are_counted_too(ways: list[InProcess]) -> None:
    sampled = await ways[1].complete(PROMPT, SamplingParams(temperature=1, max_new_tokens=4, ignore_eos=True))
    assert sampled.num_tokens == 4
