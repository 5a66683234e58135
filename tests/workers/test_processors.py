"""A worker counts the processors that Linux lets it use."""

import os
from pathlib import Path

import pytest

from specdec.serving import processors
from specdec.serving.processors import MAX_SPARE, processor_quota, spare_processors

NO_LIMIT = float("inf")


@pytest.mark.parametrize(
    ("second", "first", "expected"),
    [
        ("150000 100000\n", None, 1.5),
        ("max 100000\n", None, NO_LIMIT),
        (None, ("400000\n", "100000\n"), 4.0),
        (None, ("-1\n", "100000\n"), NO_LIMIT),
        ("", None, NO_LIMIT),
        (None, None, NO_LIMIT),
    ],
)
def test_a_quota_is_read_from_either_version_of_cgroups(
    tmp_path: Path, second: str | None, first: tuple[str, str] | None, expected: float
) -> None:
    texts = {"cpu.max": second, "quota": first and first[0], "period": first and first[1]}
    for name, text in texts.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    paths = {name: str(tmp_path / name) for name in texts}
    assert processor_quota(((paths["cpu.max"],), (paths["quota"], paths["period"]))) == expected


@pytest.mark.parametrize(
    ("num_processors", "quota", "num_threads", "expected"),
    [
        (2, NO_LIMIT, 1, 1),
        (1, NO_LIMIT, 1, 0),
        (64, NO_LIMIT, 1, MAX_SPARE),
        (64, 4.0, 1, 3),
        (64, 3.9, 1, 2),
        (64, 0.5, 1, 0),
        (4, NO_LIMIT, 8, 0),
    ],
)
def test_what_threads_leave_of_a_limit_is_spare(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, quota: float, num_threads: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_processors)))
    monkeypatch.setattr(processors, "processor_quota", lambda: quota)
    assert spare_processors(num_threads) == expected
