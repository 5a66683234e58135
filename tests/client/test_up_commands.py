"""What `specdec up` starts: the services' commands, flags and variables, and one child process."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from draft_service.settings import SETTINGS as DraftSettings
from gateway.settings import GatewaySettings
from specdec.serving.child import Child, LogLine, format_event, parse_line
from specdec.serving.local import (
    CannotRun,
    Options,
    coordinator_command,
    default_threads,
    environment_of,
    gateway_command,
    worker_commands,
)
from specdec.serving.local.commands import WORKER_NICENESS
from specdec.serving.local.preflight import check
from specdec.serving.settings import Device, load
from target_service.settings import TargetSettings


@pytest.mark.parametrize(("num_cores", "threads"), [(1, (1, 1)), (2, (1, 1)), (4, (2, 1)), (8, (4, 2)), (64, (32, 4))])
def test_threads_share_the_cores(num_cores: int, threads: tuple[int, int]) -> None:
    assert default_threads(num_cores) == threads


def test_services_accept_their_flags() -> None:
    options = Options("models/target", "models/draft", port=7, num_drafts=2, metrics_ports=9000, drain_s=1.5)
    target, *drafts = worker_commands(options, num_cores=8)
    coordinator = coordinator_command(options, [1], [2, 3])
    settings: Any = load(TargetSettings, "target", target.flags)
    assert (settings.model, settings.port, settings.num_threads, settings.drain_s) == ("models/target", 0, 4, 1.5)
    for number, draft in enumerate(drafts):
        settings = load(DraftSettings, "draft", draft.flags)
        assert (settings.drafters, settings.model, settings.num_threads) == (
            "model,recycle,ngram,suffix",
            "models/draft",
            2,
        )
        assert (settings.metrics_port, settings.suffix_tokenizer) == (9002 + number, "models/target")
    settings = load(CoordinatorSettings, "coordinator", coordinator.flags)
    assert (settings.target, settings.draft) == ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2,127.0.0.1:3")
    assert (settings.tokenizer, settings.port, settings.metrics_port) == ("models/target", 7, 9000)


def test_gateway_accepts_its_flags() -> None:
    options = Options("models/target", http_port=8000, num_drafts=2, metrics_ports=9000, drain_s=1.5)
    settings: Any = load(GatewaySettings, "gateway", gateway_command(options, "127.0.0.1:7").flags)
    assert (settings.port, settings.coordinator, settings.tokenizer) == (8000, "127.0.0.1:7", "models/target")
    assert (settings.metrics_port, settings.drain_s) == (9004, 1.5)


@pytest.mark.parametrize(
    ("port", "environment", "sentence"),
    [
        (50_999, {}, "--port and --http-port are both 50999; give two"),
        (None, {"SPECDEC_KEEP_ALIVE_S": "3"}, "unknown variable SPECDEC_KEEP_ALIVE_S"),
        (0, {"SPECDEC_COORDINATOR": "x"}, "SPECDEC_COORDINATOR has no effect here"),
    ],
)
def test_wrong_gateways_do_not_start(port: int | None, environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(CannotRun, match=sentence):
        check(Options("models/target", port=50_999, http_port=port), environment)


def test_weights_are_rounded_where_that_is_asked() -> None:
    options = Options("t", "d", quantization="int8", draft_quantization="int4")
    for chosen, kinds in ((options, ("int8", "int4")), (Options("t", "d"), ("none", "none"))):
        target, draft = worker_commands(chosen, num_cores=2)
        settings: Any = load(TargetSettings, "target", target.flags)
        assert settings.quantization == kinds[0]
        settings = load(DraftSettings, "draft", draft.flags)
        assert settings.draft_quantization == kinds[1]


@pytest.mark.parametrize(
    ("options", "drafters"), [(Options("t"), "recycle,ngram,suffix"), (Options("t", "ngram"), "ngram,recycle,suffix")]
)
def test_draft_model_is_optional(options: Options, drafters: str) -> None:
    [_, draft] = worker_commands(options, num_cores=2)
    settings: Any = load(DraftSettings, "draft", draft.flags)
    assert (settings.drafters, settings.model, settings.metrics_port) == (drafters, None, None)
    assert len(worker_commands(replace(options, draft="none"), num_cores=2)) == 1
    plain: Any = load(CoordinatorSettings, "coordinator", coordinator_command(options, [1], []).flags)
    assert not plain.draft


def test_heads_come_before_other_drafters() -> None:
    options = Options("models/target", eagle3_head="heads/e", medusa_head="org/m")
    [target, draft] = worker_commands(options, num_cores=2)
    own: Any = load(TargetSettings, "target", target.flags)
    assert (own.head, own.head_kind) == ("heads/e", "eagle3"), "the target drafts with the first one itself"
    settings: Any = load(DraftSettings, "draft", draft.flags)
    assert settings.drafters == "eagle3,medusa,recycle,ngram,suffix"
    assert (settings.eagle3_head, settings.dflash_head, settings.medusa_head) == ("heads/e", None, "org/m")
    assert settings.head_target == "models/target"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eagle3_head": "./nowhere"}, "--eagle3-head: there is no folder ./nowhere"),
        ({"dflash_head": "models"}, "--dflash-head: the folder models holds no head"),
        ({"medusa_head": "org/name", "draft": "none"}, "--draft none means plain decoding"),
    ],
)
def test_wrong_heads_do_not_start(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(CannotRun, match=sentence):
        check(Options("models/target", port=0, **options), {})  # type: ignore[arg-type]


def test_store_address_is_not_on_command_lines() -> None:
    """It may hold a password, and every user of the machine can read command lines."""
    command = coordinator_command(Options("t", store="redis://:secret@127.0.0.1/0"), [1], [])
    assert not any("secret" in flag for flag in command.flags)
    assert environment_of(command, {})["SPECDEC_STORE"] == "redis://:secret@127.0.0.1/0"


def test_services_get_their_own_variables() -> None:
    [target, draft] = worker_commands(Options("t", "d", target_threads=3), num_cores=2)
    mine = {"PATH": "/bin", "SPECDEC_ADDRESS": "x", "SPECDEC_LOG_LEVEL": "debug", "SPECDEC_SUPPORT_MAX": "5"}
    seen = environment_of(target, mine)
    assert {name for name in seen if name.startswith("SPECDEC_")} == {"SPECDEC_LOG_LEVEL", "SPECDEC_NICENESS"}
    assert (seen["OMP_NUM_THREADS"], seen["OMP_WAIT_POLICY"], seen["PATH"]) == ("3", "passive", "/bin")
    assert environment_of(draft, {**mine, "OMP_NUM_THREADS": "9"})["OMP_NUM_THREADS"] == "9"
    assert environment_of(draft, mine)["SPECDEC_SUPPORT_MAX"] == "5"


def test_workers_let_others_go_first_unless_told_otherwise() -> None:
    [target, draft] = worker_commands(Options("t", "d"), num_cores=2)
    assert environment_of(target, {})["SPECDEC_NICENESS"] == environment_of(draft, {})["SPECDEC_NICENESS"] == "5"
    assert environment_of(target, {"SPECDEC_NICENESS": "0"})["SPECDEC_NICENESS"] == "0"
    assert "SPECDEC_NICENESS" not in environment_of(coordinator_command(Options("t"), [1], []), {})


@pytest.mark.parametrize(
    ("options", "num_cores", "is_ahead"),
    [
        (Options("t", "d"), 2, False),
        (Options("t", "d"), 8, False),  # a target of 4 threads takes the other 4 too
        (Options("t", "d"), 64, True),  # 32 and 7 helpers, 4 for the draft
        (Options("t", "d", target_threads=1, draft_threads=1), 9, True),
        (Options("t", "d", target_threads=1, draft_threads=1), 8, False),
        (Options("t", "d", target_threads=1, draft_threads=2), 9, False),
        (Options("t", "d", target_threads=1, draft_threads=1, num_drafts=2), 9, False),
        (Options("t", "d", target_threads=1, draft_threads=1, num_targets=2), 16, False),
        (Options("t", "d", target_threads=1, draft_threads=1, num_targets=2), 17, True),
        (Options("t", "d", device="cuda"), 2, True),
    ],
)
def test_drafts_ahead_only_on_cores_that_targets_leave(
    options: Options, num_cores: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specdec.serving.local.commands.DEVICES", tmp_path)  # whatever this machine has
    commands = worker_commands(options, num_cores)
    settings = [environment_of(command, {}).get("SPECDEC_DRAFT_AHEAD") for command in commands]
    drafts = None if is_ahead else "false"
    assert settings == [None] * options.num_targets + [drafts] * options.num_drafts
    for command in commands:
        told = environment_of(command, {"SPECDEC_DRAFT_AHEAD": "true"})
        assert told.get("SPECDEC_DRAFT_AHEAD") == ("true" if command.kind == "draft" else None)


@pytest.mark.parametrize(("device", "is_ahead"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_drafts_ahead_where_targets_compute_on_a_gpu(
    device: Device, is_ahead: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("specdec.serving.local.commands.DEVICES", tmp_path)
    [_, draft] = worker_commands(Options("t", "d", device=device), num_cores=2)
    assert ("draft_ahead" not in draft.defaults) == is_ahead


def test_draft_workers_understand_whether_to_draft_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    [_, draft] = worker_commands(Options("t", "d", device="cpu"), num_cores=2)
    for name, value in draft.defaults.items():
        monkeypatch.setenv(f"SPECDEC_{name.upper()}", value)
    settings: Any = load(DraftSettings, "draft", draft.flags)
    assert not settings.draft_ahead
    assert settings.niceness == WORKER_NICENESS


def test_log_lines_are_events_or_text() -> None:
    event = parse_line(
        '{"service": "draft", "event": "ready", "port": 5, "timestamp": "t", "level": "info", "x": null}'
    )
    assert format_event(event) == "ready port=5"
    assert parse_line("Killed") == {"text": "Killed"}
    assert parse_line('"event"') == {"text": '"event"'}


STUBBORN = """
import json, signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("I1120 11:50:35.967660   10634 chttp2_transport.cc:1403] chatter", file=sys.stderr)
print(json.dumps({"event": "listening", "port": 5, "level": "info"}), flush=True)
threading.Event().wait()
"""
FAILING = """
import json, sys
print(json.dumps({"event": "load_failed", "level": "error", "model": "m"}))
print("I1120 11:50:35.967660   10634 chttp2_transport.cc:1403] chatter", flush=True)
sys.exit(3)
"""


async def child_of(source: str, folder: Path, lines: list[LogLine]) -> Child:
    (folder / "toy_service.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return await Child.start("toy", "toy_service", [], environment, lambda _, line: lines.append(line))


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    lines: list[LogLine] = []
    child = await child_of(STUBBORN, tmp_path, lines)
    assert await child.port == 5
    await child.stop(patience_s=0.1)
    assert child.describe_end() == "the toy was killed by SIGKILL"


async def test_child_keeps_its_last_error_line(tmp_path: Path) -> None:
    lines: list[LogLine] = []
    child = await child_of(FAILING, tmp_path, lines)
    assert await child.ended == 3
    assert child.describe_end() == "the toy ended with exit code 3: load_failed model=m"
    assert len(lines) == 2
