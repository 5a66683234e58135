"""The program that compares greedy texts with transformers': it finds them equal, and would notice if they were not."""

from pathlib import Path

import pytest

from benchmarks.bench import configurations
from benchmarks.greedy import Case, cases_of, difference, num_different, prompts_of
from benchmarks.in_process import Reference
from benchmarks.measure import Prompt
from benchmarks.served import demo_pair
from specdec import AsyncClient, SamplingParams
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPTS = [Prompt(f"{number}", f"{number} 6 7 5 6 7 {number} 6") for number in range(2, 8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tokenizer(build("llama", tmp_path), VOCAB_SIZE)


async def test_other_texts_are_counted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All six texts are equal in every configuration; then one that is not is expected."""
    reference = Reference(str(model))
    cases = list(cases_of(reference, PROMPTS, GREEDY))
    compared = configurations(["ngram", "recycle"], (3,))
    wrong = Case(cases[2].prompt, (*cases[2].expected[:5], 0, *cases[2].expected[6:]))
    services = cluster(model, drafters="ngram,recycle")
    async with services as running, AsyncClient(running.address) as client:
        assert await num_different(client, reference, cases, GREEDY, compared, at_once=3) == 0
        assert capsys.readouterr().out.count("6 of 6 texts identical") == len(compared) == 6
        assert await num_different(client, reference, [*cases, wrong], GREEDY, compared[:1], at_once=3) == 1
    assert "plain: 6 of 7 texts identical\n  4: other tokens from 5 on" in capsys.readouterr().out


def test_the_gap_is_that_of_the_logits(model: Path) -> None:
    reference = Reference(str(model))
    text = reference.continuation(PROMPTS[0], GREEDY)
    case = Case(PROMPTS[0], text)
    assert difference(reference, case, text) is None
    assert 0 < reference.gap(PROMPTS[0], text[:5]) != reference.gap(PROMPTS[0], text[:6])
    assert (difference(reference, case, text[:5]) or "").startswith("2: other tokens from 5 on")


def test_shortened_prompts_follow_the_whole_ones() -> None:
    served = demo_pair()
    num_whole = len(served.prompts["Python"])
    prompts = prompts_of(served, 3 * num_whole)
    assert len({prompt.text for prompt in prompts}) == 3 * num_whole
    assert prompts[num_whole].text == prompts[0].text.split(" ", 1)[1]
