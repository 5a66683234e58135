"""Settings: flags before variables, ranges, and one sentence for each error."""

import os

import pytest

from coordinator.settings import CoordinatorSettings
from draft_service.settings import SETTINGS as DraftSettings
from specdec.serving.settings import load
from target_service.settings import TargetSettings

REQUIRED = ["--tokenizer", "folder"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)


def coordinator(*flags: str) -> CoordinatorSettings:
    return load(CoordinatorSettings, "coordinator", [*REQUIRED, *flags])


def refusal(capsys: pytest.CaptureFixture[str], kind: type, *flags: str) -> str:
    """What is printed where the start is refused; the exit status is 2, as for any wrong usage."""
    with pytest.raises(SystemExit) as exit_:
        load(kind, "program", list(flags))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_defaults_serve_one_machine() -> None:
    settings = coordinator()
    assert (settings.host, settings.port, settings.store) == ("127.0.0.1", 50051, "embedded")
    assert (settings.target, settings.draft) == ("127.0.0.1:50053", "127.0.0.1:50052")
    assert load(TargetSettings, "target", ["--model", "m"]).port == 50053
    assert load(DraftSettings, "draft", ["--model", "m"]).port == 50052


def test_variables_are_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_PORT", "7")
    monkeypatch.setenv("SPECDEC_DRAIN_S", "3.5")
    assert (coordinator().port, coordinator().drain_s) == (7, 3.5)
    assert (coordinator("--port", "8").port, coordinator("--port=9").drain_s) == (8, 3.5)
    monkeypatch.setenv("SPECDEC_TOKENIZER", "from-the-environment")
    assert load(CoordinatorSettings, "coordinator", []).tokenizer == "from-the-environment"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        coordinator().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [("--max-session", "--max-sessions"), ("--ports", "--port"), ("--tokeniser=x", "--tokenizer")],
)
def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str], flag: str, nearest: str) -> None:
    said = refusal(capsys, CoordinatorSettings, *REQUIRED, flag)
    assert f"program: unknown flag {flag.split('=')[0]}; the nearest is {nearest}" in said


def test_an_unlike_flag_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "program: unknown flag --zzz (all: --help)" in refusal(capsys, CoordinatorSettings, *REQUIRED, "--zzz")


def test_an_unknown_variable_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_TARGETS", "somewhere:1")
    said = refusal(capsys, CoordinatorSettings, *REQUIRED)
    assert "unknown variable SPECDEC_TARGETS; the nearest is SPECDEC_TARGET " in said


def test_variables_of_others_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("OTHER_SPECDEC_PORT", "2")
    assert coordinator().port == 50051


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        (CoordinatorSettings, "--port", "65536"),
        (CoordinatorSettings, "--port", "-1"),
        (CoordinatorSettings, "--port", "many"),
        (CoordinatorSettings, "--metrics-port", "70000"),
        (CoordinatorSettings, "--log-level", "loud"),
        (CoordinatorSettings, "--drain-s", "-1"),
        (CoordinatorSettings, "--session-ttl-s", "0"),
        (CoordinatorSettings, "--max-sessions", "0"),
        (CoordinatorSettings, "--max-new-tokens", "0"),
        (CoordinatorSettings, "--max-draft-tokens", "33"),
        (CoordinatorSettings, "--draft-timeout-s", "0"),
        (CoordinatorSettings, "--score-timeout-s", "0"),
        (CoordinatorSettings, "--target-patience-s", "-0.1"),
        (CoordinatorSettings, "--canary-share", "1.1"),
        (DraftSettings, "--support-mass", "0"),
        (DraftSettings, "--support-mass", "1.01"),
        (DraftSettings, "--support-max", "1025"),
        (DraftSettings, "--ngram-max", "0"),
        (TargetSettings, "--dtype", "float8"),
        (TargetSettings, "--num-threads", "0"),
        (TargetSettings, "--kv-cache-bytes", "1"),
    ],
)
def test_a_value_out_of_range_is_named(capsys: pytest.CaptureFixture[str], kind: type, flag: str, value: str) -> None:
    variable = f"SPECDEC_{flag[2:].replace('-', '_').upper()}"
    said = refusal(capsys, kind, *(REQUIRED if kind is CoordinatorSettings else ["--model", "m"]), f"{flag}={value}")
    assert said.startswith(f"program: {flag} (or {variable}) is '{value}': ")
    assert len(said.splitlines()) == 1


def test_a_canarys_share_needs_its_model() -> None:
    alone = CoordinatorSettings(tokenizer="t", canary_share=0.1)
    assert any("--canary-share needs --canary-model" in problem for problem in alone.problems())
    together = CoordinatorSettings(tokenizer="t", canary_share=0.1, canary_model="new")
    assert not list(together.problems())


def test_all_wrong_values_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, CoordinatorSettings, "--port=x", "--max-sessions=0")
    assert [line.split()[1] for line in said.splitlines()] == ["--port", "--tokenizer", "--max-sessions"]
    assert "is required: hub id or folder" in said


def test_unknown_names_are_never_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse would take an unambiguous beginning of a flag for the flag."""
    assert "unknown flag --max-sess" in refusal(capsys, CoordinatorSettings, *REQUIRED, "--max-sess", "3")
