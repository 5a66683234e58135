"""What `make demo` prints beside its figures: whose texts are compared, what a near tie is, whether cores are busy."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.measure import PLAIN, Configuration, Measured, busy_cores
from specdec import SpeculationParams

PROMPTS: Any = [SimpleNamespace(name="a.py")]


def measured(name: str, tokens: tuple[int, ...], gap_nats: float) -> Measured:
    top = SimpleNamespace(top=((1, -0.5), (2, -0.5 - gap_nats)))
    completion: Any = SimpleNamespace(tokens=tokens, logprobs=[top] * len(tokens))
    return Measured(Configuration(name, SpeculationParams()), completions=[completion])


def test_comparison_names_the_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.compare(PROMPTS, measured("plain", (1, 2), 9.0), measured("recycle drafter", (1, 2), 9.0))
    said = capsys.readouterr().out
    assert said.startswith("recycle drafter, compared with plain decoding:\n  a.py: identical")
    assert "near tie" not in said


@pytest.mark.parametrize(("gap_nats", "is_fine"), [(0.1, True), (0.3, False)])
def test_near_ties_are_explained(gap_nats: float, is_fine: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain, other = measured("plain", (1, 2), gap_nats), measured("model drafter", (1, 3), gap_nats)
    assert demo.compare(PROMPTS, plain, other) is is_fine
    said = " ".join(capsys.readouterr().out.split())
    assert ("near ties: a pass over several tokens rounds otherwise" in said) is is_fine


def test_busy_cores_are_named() -> None:
    assert busy_cores(2.0, 2) is None
    assert busy_cores(2.1, 2) == (
        "other programs use these cores (load average 2.1, 2 cores); the figures are unreliable"
    )


@pytest.mark.parametrize(("counts", "said"), [((0, 0), "no draft"), ((8, 0), "0.00"), ((8, 6), "0.75")])
def test_a_drafter_that_drafts_nothing_is_told_from_one_whose_drafts_fail(counts: tuple[int, int], said: str) -> None:
    drafted, accepted = counts
    statistics: Any = SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted)
    assert demo.accepted(Measured(Configuration("a head", SpeculationParams()), statistics=[statistics])) == said
    assert demo.accepted(Measured(PLAIN, statistics=[statistics])) == "-"
