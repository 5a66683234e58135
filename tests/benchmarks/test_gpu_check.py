"""A short form of `make gpu-check`'s dry run: it goes through everything, and would notice what is wrong."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.exactness import save_model
from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import equality, kernels, law, speed
from benchmarks.gpu_check.equality import check_equality
from benchmarks.gpu_check.kernels import check_kernels
from benchmarks.gpu_check.law import check_law
from benchmarks.gpu_check.models import LARGE, layer_bytes, random_model
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from specdec.engine import paged, varlen
from specdec.engine.check import Reference
from specdec.engine.varlen import window_spans
from specdec.exact.randomness import acceptance_uniforms
from specdec.exact.sampling import in_one_copy
from specdec.exact.values import Uniforms

PLACE = Place("cpu")
SHORT = equality.Sizes((40, 17, 1), 8)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(equality, "ARCHITECTURES", ("llama",))


@pytest.fixture
def report() -> Report:
    return Report("a processor", is_dry=True)


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.holds}


def test_report_has_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "DRY", SHORT)
    monkeypatch.setattr(program, "NUM_DRY_TEXTS", 100)
    monkeypatch.setattr(speed, "DRY", replace(speed.DRY, batches=((1, 20), (2, 30)), repetitions=1, profiled=(1, 9)))
    path = tmp_path / "deep" / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--report", str(path)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    page = path.read_text()
    assert ended.value.code == 0
    assert "**A dry run on a CPU.**" in page
    assert page.count("| yes |") == 19
    assert all(f"\n| {sessions} | {k} | " in page for sessions in ("1 | 20", "2 | 30") for k in (0, 5))
    assert "every check held" in page
    assert "aten::" in page


def test_wrong_attention_is_noticed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees see the text before them, and nothing of themselves."""
    monkeypatch.setattr(paged, "merged", lambda attended, wants_lse: varlen.merged(attended[:1]))
    check_equality(PLACE, report, SHORT)
    assert [(check.name, check.holds) for check in report.checks] == [
        ("llama, float32", False),
        ("llama, bfloat16", False),
    ]
    assert report.checks[0].found.startswith("ModelRefused: ")  # by the check at its load
    monkeypatch.setattr(Reference, "check", lambda *given: None)
    check_equality(PLACE, report, SHORT)
    assert {"llama, float32: logits", "llama, bfloat16: logits"} <= failed(report)


def test_wrong_kernel_is_noticed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain steps leave out the first key."""
    monkeypatch.setattr(kernels, "window_spans", lambda *given: (window_spans(*given)[0] + 1, window_spans(*given)[1]))
    check_kernels(PLACE, report)
    assert len(failed(report)) == len(kernels.CASES) + len(kernels.CASES_IN_PARTS)


def test_wrong_chains_change_greedy_texts(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "window_spans", lambda *given: (window_spans(*given)[0], window_spans(*given)[1] - 1))
    monkeypatch.setattr(Reference, "check", lambda *given: None)
    check_equality(PLACE, report, SHORT)
    assert {"llama, float32: greedy texts", "llama, bfloat16: greedy texts"} <= failed(report)


def test_wrong_law_is_noticed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft token is accepted."""

    def always(seed: int, length: int, count: int) -> Uniforms:
        return replace(acceptance_uniforms(seed, length, count), accept=(0.0,) * count)

    monkeypatch.setattr(law, "acceptance_uniforms", always)
    check_law(PLACE, report, 300)
    assert len(failed(report)) == 4


def test_texts_do_not_depend_on_how_answers_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a batch's answers are torch's, and copied back at once."""
    monkeypatch.setattr("specdec.engine.rows._is_compiled_for", lambda rows: False)
    model = PLACE.load(save_model(tmp_path), "float32")
    copied: list[int] = []

    def at_once(*tensors: torch.Tensor) -> list[torch.Tensor]:
        copied.append(len(tensors))
        return in_one_copy(tensors)

    texts = [asyncio.run(law.written(model, 40, *shape)) for shape in law.SHAPES.values()]
    monkeypatch.setattr("specdec.exact.sampling.on_cpu", at_once)
    assert [asyncio.run(law.written(model, 40, *shape)) for shape in law.SHAPES.values()] == texts
    assert set(copied) == {5}


def test_measurements_end_in_time(report: Report) -> None:
    speed.measure(PLACE, report, replace(speed.DRY, profiled=(1, 9)), time.perf_counter())
    assert "6 rows were left out: time was up" in report.sections[0][1]


def test_layers_that_do_not_fit_are_left_out(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "num_bytes", property(lambda self: 3 << 20))
    load = replace(speed.DRY, shape={**speed.DRY.shape, "num_hidden_layers": 9}, batches=((1, 40),), profiled=(1, 9))
    speed.measure(PLACE, report, load, time.perf_counter())
    assert "layers (of 9: more do not fit)" in report.sections[0][1]


def test_bound_counts_the_weights_of_the_shape() -> None:
    model = random_model(speed.DRY.shape, "cpu", 2)
    layers = sum(parameter.nbytes for parameter in model.model.layers.parameters() if parameter.dim() == 2)
    assert 2 * layer_bytes(speed.DRY.shape) == layers
    subject = speed.Subject(PLACE.serve(model, 1 << 22), 1000, 10, 2)
    assert subject.bound_s(4, 50, 100.0) == 30.0
    assert 0.42e9 < layer_bytes(LARGE) < 0.45e9  # 32 of them are 14 of Llama 3.1 8B's 16 GB


def test_failed_checks_are_said(report: Report) -> None:
    assert not report.holds
    report.add("one", True, "1")
    report.add("two", False, "3")
    assert not report.holds
    assert "1 of 2 checks failed" in report.markdown(1.0)
    assert "| two | **no** | 3 |" in report.markdown(1.0)
