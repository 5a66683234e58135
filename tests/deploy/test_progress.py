"""The progress line: unfinished services with what they do and for how long; nothing once they are ready."""

import io

import pytest

from specdec.serving.local import Progress


@pytest.fixture
def progress() -> Progress:
    return Progress(lambda name, entry: None, io.StringIO())


def test_each_unfinished_service_has_its_state(progress: Progress) -> None:
    progress.note("target worker", {"event": "listening", "port": 1}, 0.0)
    progress.note("draft worker", {"event": "listening", "port": 2}, 1.0)
    progress.note("target worker", {"event": "downloading", "model": "org/large"}, 2.0)
    assert progress.line(12.4) == "target worker: downloading org/large, 10 s; draft worker: starting, 11 s"


def test_ready_services_are_left_out(progress: Progress) -> None:
    progress.note("target worker", {"event": "loading", "model": "m"}, 0.0)
    progress.note("target worker", {"event": "ready"}, 5.0)
    progress.note("target worker", {"text": "no event"}, 6.0)
    assert progress.line(7.0) == ""


def test_log_lines_precede_the_progress_line() -> None:
    out, passed = io.StringIO(), []
    progress = Progress(lambda name, entry: passed.append((name, entry["event"], out.getvalue())), out)
    progress("draft worker", {"event": "loading", "model": "m"})
    assert passed == [("draft worker", "loading", "\r\x1b[K")]
    assert out.getvalue().endswith("draft worker: loading m, 0 s")
