"""The `specdec` command in this process: wrong usage, its variables, and what cannot be reached."""

import logging
import socket
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from draft_service.settings import SETTINGS as DraftSettings
from specdec.serving.local import (
    Options,
)
from specdec.serving.local.preflight import notices
from specdec.serving.settings import variable_names
from target_service.settings import TargetSettings
from tests.support.command_line import Outcome, run
from tests.support.redis_server import RedisServer


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "--temprature", "1", "x"], "unknown flag --temprature; the nearest is --temperature"),
        (["up", "--traget", "x"], "unknown flag --traget; the nearest is --target"),
        (["genrate", "x"], "unknown command genrate; the nearest is generate"),
        (["gibberish"], "unknown command gibberish; commands are generate, session"),
        (["up", "--model", "x"], "unknown flag --model (specdec up --help)"),
        (["generate", "x", "--num-logprobs", "2"], "--num-logprobs is printed only as JSON; add --json"),
        (["session", "shw"], "unknown command shw; the nearest is show"),
        (["generate"], "required: PROMPT"),
        (["generate", "x", "y"], "unrecognized arguments: y; quotes keep a text with spaces together"),
        (["model", "--address", "localhost:99999"], "--address is 'localhost:99999'; give a port from 1 to 65535"),
        (
            ["memory", "models/drafft", "--bandwidth", "100"],
            "there is no folder models/drafft; beside it there are models/draft, ",
        ),
        (["session", "show", ""], "ID is empty"),
        (["generate", "x", "--stop"], "--stop"),
        (["generate", "x", "--top-k", "many"], "--top-k is 'many'; give a whole number of at least 0"),
        (["generate", "x", "--top-p", "7"], "--top-p is 7; give a number in (0, 1]"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0; give a whole number of at least 1"),
        (["generate", "x", "--num-draft-tokens", "33"], "--num-draft-tokens is 33; the maximum is 32"),
        (["generate", "x", "--acceptance-rule", "both"], "'token', 'block'"),
        (["generate", "x", "--logit-bias", "3"], "--logit-bias is '3'; give ID=BIAS"),
        (["generate", "x", "--address", "localhost"], "give host:port, as localhost:50051, here or in SPECDEC_ADDRESS"),
        (["model", "--address", "http://h:7"], "give host:port without http://, as h:7"),
        (["session", "resume", "x", "--digest", "xyz"], "--digest is 'xyz'; give the 32 hexadecimal digits"),
        (["up"], "--target"),
        (["up", "--target", "x", "--port", "99999"], "--port"),
        (["up", "--target", "x", "--dtype", "int8"], "bfloat16"),
        (["up", "--target", "x", "--quantization", "int4"], "'none', 'int8'"),
        (["up", "--target", "x", "--draft-quantization", "int2"], "'none', 'int8', 'int4'"),
        (["up", "--target", "./no-such-folder"], "there is no folder ./no-such-folder"),
        (["up", "--target", "models/drafft"], "no folder models/drafft; beside it there are models/draft, "),
        (["up", "--target", "/"], "holds no model (no config.json)"),
        (["up", "--target", "org/name", "--draft", "a/b/c"], "--draft: there is no folder a/b/c"),
        (["up", "--target", __file__], f"--target: {__file__} is a file; give the model's folder"),
        (
            ["up", "--target", "x", "--port", "0", "--store", "foo"],
            "--store is 'foo'; give embedded, redis://HOST:PORT/0",
        ),
        (["up", "--target", "x", "--port", "0", "--store", "http://a:pw@b"], "--store is 'http://...'; give embedded"),
        (["up", "--target", "x", "--port", "0", "--store", "redis://localhost/0?no=1"], "--store is no address"),
        (
            ["up", "--target", "org/name", "--port", "0", "--store", "redis://localhost:port"],
            "--store has a wrong host or port; give HOST:PORT",
        ),
        (["generate", "x", "--seed", "-1"], f"--seed is -1; give a whole number from 0 to {2**64 - 1}"),
        (["generate", "x", "--timeout-s", "0"], "--timeout-s is 0; give a number in (0, "),
    ],
)
def test_wrong_usage_gives_one_sentence(arguments: list[str], sentence: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert outcome.err.startswith("specdec: ")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


@pytest.mark.parametrize("name", ["SPECDEC_ADRESS", "SPECDEC_ADDR", "SPECDEC_ADDRESSES"])
def test_misspelt_address_variable_is_refused(name: str, unused_port: int) -> None:
    outcome = run("generate", "x", environment={name: f"127.0.0.1:{unused_port}"})
    assert outcome == Outcome(2, "", f"specdec: unknown variable {name}; the nearest is SPECDEC_ADDRESS\n")


@pytest.mark.parametrize(
    "name", [name for kind in (CoordinatorSettings, TargetSettings, DraftSettings) for name in variable_names(kind)]
)
def test_service_variables_are_ignored(name: str, unused_port: int) -> None:
    outcome = run("model", "--address", f"127.0.0.1:{unused_port}", environment={name: "x"})
    assert outcome.code == 1
    assert "no specdec answers" in outcome.err


@pytest.mark.parametrize("words", [[], ["session"]])
def test_missing_command_prints_the_help(words: list[str]) -> None:
    outcome = run(*words)
    assert outcome.code == 2
    assert "COMMAND" in outcome.out


@pytest.mark.parametrize(
    "words", [["generate"], ["session"], ["session", "resume"], ["model"], ["version"], ["up"], []]
)
def test_help_exits_with_zero(words: list[str]) -> None:
    outcome = run(*words, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "usage: specdec" in outcome.out


def test_prompt_may_look_like_a_flag(unused_port: int) -> None:
    outcome = run("generate", "--address", f"127.0.0.1:{unused_port}", "--", "--no-such-flag")
    assert "no specdec answers" in outcome.err


def test_unknown_variable_of_up_names_the_nearest() -> None:
    outcome = run("up", "--target", "org/name", environment={"SPECDEC_LOG_LEVL": "debug"})
    assert outcome.code == 2
    assert "SPECDEC_LOG_LEVL; the nearest is SPECDEC_LOG_LEVEL" in outcome.err


@pytest.mark.parametrize("name", ["STORE", "PORT", "DEVICE", "METRICS_PORT", "NUM_THREADS", "MODEL"])
def test_overridden_variable_is_refused(name: str) -> None:
    """A Redis in the environment that is not used would lose sessions silently."""
    outcome = run("up", "--target", "org/name", "--port", "0", environment={f"SPECDEC_{name}": "1"})
    assert outcome.code == 2
    assert f"SPECDEC_{name} has no effect here" in outcome.err


def test_port_in_use_stops_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = run("up", "--target", "org/name", "--port", str(port))
    assert outcome == Outcome(
        1,
        "",
        f"specdec: cannot listen on 127.0.0.1:{port} (Address already in use); choose another with --host or --port\n",
    )


@pytest.mark.parametrize("missing", ["tokenizer.json", "*.safetensors"])
def test_incomplete_model_folder_is_refused(missing: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    for file in tmp_path.glob(missing):
        file.unlink()
    outcome = run("up", "--target", "org/name", "--draft", str(tmp_path))
    assert outcome.code == 2
    assert f"--draft: the folder {tmp_path} holds no" in outcome.err
    assert f"(no {missing});" in outcome.err


@pytest.mark.parametrize("login", ["", ":wrong@"])
def test_refused_redis_password_stops_the_start(login: str, redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.config_set("requirepass", "secret")
        try:
            store = f"redis://{login}127.0.0.1:{redis_server.port}/0"
            outcome = run("up", "--target", "org/name", "--port", "0", "--store", store)
        finally:
            client.config_set("requirepass", "")
    assert outcome.code == 2
    assert f"specdec: the Redis on 127.0.0.1:{redis_server.port} does not let us in" in outcome.err
    assert "wrong@" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_hub_models_are_announced() -> None:
    told = "no folder org/name here; asking the hub"
    assert notices(Options("org/name", "ngram")) == [("target worker", told)]
    assert notices(Options(str(Path(__file__).parent), "org/name")) == [("draft worker", told)]


def test_hub_library_logs_once() -> None:
    """Its handler besides that of the services would print each line twice."""
    assert logging.getLogger("huggingface_hub").handlers == []


def test_missing_redis_is_named_without_password(unused_port: int) -> None:
    outcome = run("up", "--target", "org/name", "--port", "0", "--store", f"redis://:secret@127.0.0.1:{unused_port}/0")
    sentence = f"specdec: no Redis answers on 127.0.0.1:{unused_port}; start one there, or leave --store embedded\n"
    assert outcome == Outcome(1, "", sentence)


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["model"], ["session", "show", "s"], ["session", "cancel", "s"]]
)
def test_dead_server_is_named_with_the_remedy(command: list[str], unused_port: int) -> None:
    address = f"127.0.0.1:{unused_port}"
    outcome = run(*command, environment={"SPECDEC_ADDRESS": address})
    remedy = "start one with `specdec up --target DIR --draft DIR`, or wait until it says `specdec ready`"
    assert outcome == Outcome(1, "", f"specdec: no specdec answers on {address} (Connection refused); {remedy}\n")


def test_version_is_printed() -> None:
    assert run("version").out.startswith("specdec 0.")
