"""The generated parts of docs/ are current, whole, and shown as their sources are."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from documentation import configuration, plots
from documentation.generated import generated
from specdec.serving.settings import flag_names, settings_of

ROOT = Path(__file__).parents[2]
FILES = dict(generated())
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()

DRAFTERS = ["eagle3", "dflash", "medusa", "recycle", "ngram", "suffix"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_file_is_current(path: Path) -> None:
    assert path.read_text() == FILES[path], "stale; run: python -m documentation"


@pytest.mark.parametrize("module", ["coordinator", "target_service", "draft_service", "gateway"])
def test_every_setting_has_a_row(module: str) -> None:
    text = configuration.text()
    assert [
        flag for flag in flag_names(settings_of(module)) if flag != "--help" and f"| `{flag}`<br>" not in text
    ] == []


def test_a_row_says_what_the_setting_is() -> None:
    text = configuration.text()
    assert "| `--drain-s`<br>`SPECDEC_DRAIN_S` | number of seconds, at least 0, at most 3,600 | `20` |" in text
    assert "| `--tokenizer`<br>`SPECDEC_TOKENIZER` | text | required |" in text
    assert "| `--ngram-max`<br>`SPECDEC_NGRAM_MAX` | whole number of tokens, at least 1, at most 32 | `4` |" in text
    assert "| `--reflection`<br>`SPECDEC_REFLECTION` | switch | off |" in text


def test_plots_have_the_figures_of_the_tables() -> None:
    sessions = plots.by_sessions(BENCHMARKS)
    (row,) = re.findall(r"^\| 16 \| ([\d.]+) \| ([\d.]+) \|", BENCHMARKS, re.M)
    assert [values[-1] for _, values in sessions.series] == [float(cell) for cell in row]
    for temperature in (0, 1):
        plot = plots.by_kind(BENCHMARKS, temperature)
        assert [name for name, _ in plot.series] == ["chosen by the service", *DRAFTERS]
        assert plot.groups == ("chat", "code", "maths", "summary", "extraction", "translation")
    (ngram,) = [values for name, values in plots.by_kind(BENCHMARKS, 0).series if name == "ngram"]
    assert ngram == (1.09, 0.94, 0.98, 2.05, 1.48, 1.45)


def test_bars_are_as_high_as_their_values() -> None:
    plot = plots.by_sessions(BENCHMARKS)
    flat = replace(plot, groups=("one",), series=(("a", (50.0,)), ("b", (100.0,))), step=100)
    drawn = plots.svg(flat, plots.THEMES["light"])
    low, high = (float(each) for each in re.findall(r'height="([\d.]+)" fill="[^"]+"><title>', drawn))
    assert high == pytest.approx(2 * low)


@pytest.mark.parametrize(("language", "source"), [("go", "clients/go/main.go"), ("java", "clients/java/Resuming.java")])
def test_shown_program_is_its_source(language: str, source: str) -> None:
    page = (ROOT / "docs/client.md").read_text()
    assert re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S) == [(ROOT / source).read_text()]
