"""What the demo and the bench serve, compare and print."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import bench, demo, served, tables
from benchmarks.instructions import KINDS
from benchmarks.measure import CHOSEN, PLAIN, Configuration, Measured, Prompt, automatic, fixed, measure, speed_up
from benchmarks.turns import Record
from specdec import AsyncClient, SamplingParams, Statistics
from specdec.serving.local import CannotRun
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

NGRAM = fixed("ngram", 3)


def measured(*statistics: Statistics, tokens_per_s: float = 10.0, configuration: Configuration = NGRAM) -> Measured:
    return Measured(configuration, [tokens_per_s] * len(statistics), list(statistics))


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
        ("ngram", 2),
        ("ngram", 6),
    ]
    assert len({each.name for each in compared}) == len(compared)
    assert [each.speculation.drafter for each in demo.configurations(["brand_new"])] == [None, None, "brand_new"]


def test_without_drafters_only_the_choice_is_left() -> None:
    assert bench.configurations([], (4,)) == demo.configurations([]) == [PLAIN, CHOSEN]


def test_acceptance_by_depth_counts_rounds_that_drafted_there() -> None:
    assert measured(DEEP, SHALLOW, UNDRAFTED).acceptance_by_depth == [4 / 5, 2 / 4]
    assert measured(UNDRAFTED).acceptance_by_depth == []


def test_flags_select_what_is_asked() -> None:
    flags = bench.flags_of(["--prompts", "1", "--draft-lengths", "2,5", "--temperatures", "0.5", "--loads", ""])
    chosen = bench.served_of(flags)
    assert (chosen.num_prompts, chosen.draft_lengths, chosen.loads, flags.temperatures) == (1, (2, 5), (), (0.5,))
    assert chosen.num_tokens == served.demo_pair().num_tokens


def test_options_of_up_are_passed_on() -> None:
    flags = bench.flags_of(["--option", "num_drafts=2", "--option", "store=redis://here", "--draft", "ngram"])
    options = bench.served_of(flags).options
    assert (options.num_drafts, options.store, options.draft) == (2, "redis://here", "ngram")
    for odd in ("magic=1", "store", "store="):
        with pytest.raises(CannotRun, match="is no NAME=VALUE; names are target"):
            bench.served_of(bench.flags_of(["--option", odd]))


def test_unknown_kinds_and_drafters_are_refused() -> None:
    with pytest.raises(CannotRun, match="no prompts of kind poetry; kinds are Python"):
        bench.served_of(bench.flags_of(["--kinds", "Python,poetry"]))
    selection = bench.Selection(drafters=("ngram", "magic"))
    with pytest.raises(CannotRun, match="do not offer magic; they offer model, ngram"):
        selection.drafters_of(["model", "ngram"])
    assert bench.Selection(drafters=("ngram",)).drafters_of(["model", "ngram"]) == ["ngram"]


def test_kinds_add_up() -> None:
    together = Measured.together([measured(DEEP, tokens_per_s=20.0), measured(SHALLOW, UNDRAFTED)])
    assert together.tokens_per_s == [20.0, 10.0, 10.0]
    assert together.tokens_per_round == (9 + 2 + 3) / (4 + 1 + 3)


def test_a_row_has_every_figure() -> None:
    line = tables.line(tables.row("code: ngram", measured(DEEP, tokens_per_s=20.0), measured(UNDRAFTED)))
    assert line == (
        "| code: ngram | 20.0 | 2.00 (2.00 to 2.00) | 0.62 | 0.75 0.50 | 2.25 | 100.00 | 200.00 | 100.00 | 400.00 "
        "| 10.00 |"
    )


def test_a_table_ends_with_all_kinds() -> None:
    lines = list(tables.speeds({"chat": [measured(DEEP)], "code": [measured(SHALLOW)]}))
    labels = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert labels == ["", "chat: ngram, K = 3", "code: ngram, K = 3", "all: ngram, K = 3"]


def test_one_kind_needs_no_label() -> None:
    assert list(tables.speeds({"Python": [measured(DEEP)]}))[-1].startswith("| ngram, K = 3 |")


def test_the_choice_is_compared_with_the_best() -> None:
    """The best way of the services: what has no round of theirs is transformers'."""
    apart = replace(UNDRAFTED, total_s=0.0)
    results = [
        measured(UNDRAFTED, UNDRAFTED, configuration=PLAIN),
        Measured(CHOSEN, [12.0, 18.0], [DEEP, DEEP]),
        measured(DEEP, DEEP, tokens_per_s=20.0),
        measured(apart, apart, tokens_per_s=90.0, configuration=fixed("transformers", 1)),
    ]
    assert tables.choice("code", results) == ["code", "ngram, K = 3", "2.00", "1.50", "0.75", "2.00", "0.75", "1.20"]


def test_luck_is_not_what_the_choice_is_compared_with() -> None:
    """A way that was lucky once is not the best of that run by the other runs."""
    ways = {"lucky": [3.0, 1.0, 1.0, 1.0], "lucky later": [1.0, 1.0, 3.0, 1.0], "steady": [1.2, 1.2, 1.2, 1.2]}
    assert tables.judged_by_others(ways) == [1.2, 1.2, 1.2, 1.2]
    assert tables.judged_by_others({"a": [3.0], "b": [1.0]}) == [3.0]


def test_quartiles_lie_within_what_was_measured() -> None:
    results = Measured(NGRAM, [10.0, 20.0], [DEEP, DEEP]), Measured(PLAIN, [10.0, 10.0], [UNDRAFTED, UNDRAFTED])
    assert speed_up(*results) == (1.25, 1.5, 1.75)


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


@dataclass
class Counting:
    """A way that counts what it was asked."""

    name: str
    num_asked: int = 0

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        self.num_asked += 1
        return DEEP


async def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """What was measured before is not measured again, nor warmed up for."""
    pair = replace(served.demo_pair(), num_prompts=2, num_repetitions=2, num_tokens=8)
    for num_prompts, num_asked in ((2, 5), (2, 0), (3, 3)):
        way = Counting("plain")
        record = Record({}, tmp_path / "turns.jsonl")
        turns = await bench.turns_of(replace(pair, num_prompts=num_prompts), [way], record, 0.0)
        assert (len(turns["Python"]), way.num_asked) == (2 * num_prompts, num_asked)
