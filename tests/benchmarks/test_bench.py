"""What the demo and the bench serve, compare and print."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench, demo, served
from benchmarks.instructions import KINDS
from benchmarks.measure import CHOSEN, PLAIN, Measured, Prompt, automatic, fixed, measure
from specdec import AsyncClient, Completion, Finish, FinishReason, SamplingParams, Statistics, Usage
from specdec.serving.local import CannotRun
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer


def completion(statistics: Statistics) -> Completion:
    finish = Finish(FinishReason.LENGTH, Usage(1, statistics.num_tokens), statistics)
    return Completion("s", (), "", (), (), b"", finish)


def measured(*statistics: Statistics, tokens_per_s: float = 10.0) -> Measured:
    return Measured(fixed("ngram", 3), [tokens_per_s] * len(statistics), [completion(each) for each in statistics])


DEEP = Statistics(4, 8, 5, 9, 0.4, 0.8, 0.04, 1.6, num_drafts_per_depth=(4, 4), num_accepted_tokens_per_depth=(3, 2))
SHALLOW = Statistics(1, 1, 1, 2, 0.1, 0.2, 0.01, 0.4, num_drafts_per_depth=(1,), num_accepted_tokens_per_depth=(1,))
UNDRAFTED = Statistics(3, 0, 0, 3, 0.0, 0.6, 0.03, 0.9)


def test_every_drafter_on_offer_is_compared() -> None:
    """Names that this repository does not know yet too."""
    compared = bench.configurations(["brand_new", "ngram"], (2, 6))
    speculations = [(each.speculation.drafter, each.speculation.num_draft_tokens) for each in compared]
    assert speculations == [
        (None, 0),
        (None, None),
        ("brand_new", None),
        ("brand_new", 2),
        ("brand_new", 6),
        ("ngram", None),
        ("ngram", 4),
    ]
    assert len({each.name for each in compared}) == len(compared)
    assert [each.speculation.drafter for each in demo.configurations(["brand_new"])] == [None, None, "brand_new"]


def test_without_drafters_only_the_choice_is_left() -> None:
    assert bench.configurations([], (4,)) == demo.configurations([]) == [PLAIN, CHOSEN]


def test_acceptance_by_depth_counts_rounds_that_drafted_there() -> None:
    assert measured(DEEP, SHALLOW, UNDRAFTED).acceptance_by_depth == [4 / 5, 2 / 4]
    assert measured(UNDRAFTED).acceptance_by_depth == []


def test_kinds_add_up() -> None:
    together = Measured.together([measured(DEEP, tokens_per_s=20.0), measured(SHALLOW, UNDRAFTED)])
    assert together.tokens_per_s == [20.0, 10.0, 10.0]
    assert together.tokens_per_round == (9 + 2 + 3) / (4 + 1 + 3)


def test_a_row_has_every_figure() -> None:
    line = bench.row("code: ngram", measured(DEEP, tokens_per_s=20.0), measured(UNDRAFTED))
    assert line == (
        "| code: ngram | 20.0 | 2.00 (2.00 to 2.00) | 0.62 | 0.75 0.50 | 2.25 | 100.00 | 200.00 | 10.00 | 400.00 |"
    )


def test_a_table_ends_with_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_table("title", {"chat": [measured(DEEP)], "code": [measured(SHALLOW)]})
    labels = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert labels == ["", "chat: ngram, K = 3", "code: ngram, K = 3", "all: ngram, K = 3"]


def test_one_kind_needs_no_label(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_table("title", {"Python": [measured(DEEP)]})
    assert "| ngram, K = 3 |" in capsys.readouterr().out


def test_the_demo_pair_continues_files() -> None:
    pair = served.demo_pair()
    assert list(pair.prompts) == ["Python"]
    assert not any(prompt.is_chat for prompt in pair.in_turn(6))
    assert len(pair.prompts["Python"]) >= pair.num_prompts


def test_a_missing_model_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MODELS", tmp_path)
    with pytest.raises(CannotRun, match="run `make smollm2` first"):
        served.smollm2()


def test_smollm2_is_asked_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MODELS", tmp_path)
    (tmp_path / "smollm2").mkdir()
    smollm2 = served.smollm2()
    assert tuple(smollm2.prompts) == KINDS
    assert [prompt.name.split("/")[0] for prompt in smollm2.in_turn(len(KINDS))] == list(KINDS)
    assert all(prompt.is_chat for prompts in smollm2.prompts.values() for prompt in prompts)


async def test_chats_and_texts_are_measured_alike(tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path), VOCAB_SIZE)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    prompts = [Prompt("text", "5 6 7 5 6 7 5 6"), Prompt("chat", "5 6 7 5 6 7 5 6", is_chat=True)]
    sampling = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    async with cluster(model) as running, AsyncClient(running.address) as client:
        drafters = (await client.get_model()).drafters
        compared = [PLAIN, *(fixed(name, 3) for name in drafters), automatic(drafters[0])]
        plain, *drafted = await measure(client, prompts, compared, sampling)
    assert drafters == ("ngram",)
    assert len({each.tokens for result in (plain, *drafted) for each in result.completions}) == 1
    statistics = drafted[0].completions[0].statistics
    assert sum(statistics.num_accepted_tokens_per_depth) == statistics.num_accepted_tokens
    assert sum(statistics.num_drafts_per_depth) == statistics.num_draft_tokens > 0
    assert replace(plain.completions[0].statistics, num_drafts_per_depth=()) == plain.completions[0].statistics
