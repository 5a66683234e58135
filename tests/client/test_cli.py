"""The `specdec` command as users run it: real processes, signals and exit codes."""

import asyncio
import json
import logging
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.settings import CoordinatorSettings
from draft_service.settings import SETTINGS as DraftSettings
from specdec import cli, errors
from specdec.serving.child import Child, LogLine, format_event, parse_line
from specdec.serving.local import (
    CannotRun,
    Options,
    coordinator_command,
    default_threads,
    environment_of,
    worker_commands,
)
from specdec.serving.local.preflight import check, notices
from specdec.serving.settings import load, variable_names
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import types_pb2
from target_service.settings import TargetSettings
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.redis_server import RedisServer
from tests.support.scripted import SESSION, TEXT, WHOLE, Send, Service, chunk, digest_at, sends, served

COMMAND = (sys.executable, "-m", "specdec.cli")


@dataclass(frozen=True)
class Outcome:
    code: int | None
    out: str
    err: str


async def start(*arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, **(pipes | streams))


async def specdec(*arguments: str, text: bytes = b"") -> Outcome:
    """Run the command and wait for its exit."""
    process = await start(*arguments, stdin=asyncio.subprocess.PIPE)
    out, err = await process.communicate(text)
    return Outcome(process.returncode, out.decode(), err.decode())


# ---- wrong usage, in this process


@pytest.fixture
def dead_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in this process; `environment` holds the only SPECDEC_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    out, err = StringIO(), StringIO()
    with (
        mock.patch.dict(os.environ, kept | {**(environment or {})}, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        cli.main(arguments)
    assert isinstance(end.value.code, int)
    return Outcome(end.value.code, out.getvalue(), err.getvalue())


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
        (["generate", "x", "y"], "y"),
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
        (["up", "--target", "./no-such-folder"], "there is no folder ./no-such-folder"),
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
def test_misspelt_address_variable_is_refused(name: str, dead_port: int) -> None:
    outcome = run("generate", "x", environment={name: f"127.0.0.1:{dead_port}"})
    assert outcome == Outcome(2, "", f"specdec: unknown variable {name}; the nearest is SPECDEC_ADDRESS\n")


@pytest.mark.parametrize(
    "name", [name for kind in (CoordinatorSettings, TargetSettings, DraftSettings) for name in variable_names(kind)]
)
def test_service_variables_are_ignored(name: str, dead_port: int) -> None:
    outcome = run("model", "--address", f"127.0.0.1:{dead_port}", environment={name: "x"})
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


def test_prompt_may_look_like_a_flag(dead_port: int) -> None:
    outcome = run("generate", "--address", f"127.0.0.1:{dead_port}", "--", "--no-such-flag")
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


def test_missing_redis_is_named_without_password(dead_port: int) -> None:
    outcome = run("up", "--target", "org/name", "--port", "0", "--store", f"redis://:secret@127.0.0.1:{dead_port}/0")
    sentence = f"specdec: no Redis answers on 127.0.0.1:{dead_port}; start one there, or leave --store embedded\n"
    assert outcome == Outcome(1, "", sentence)


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["model"], ["session", "show", "s"], ["session", "cancel", "s"]]
)
def test_dead_server_is_named_with_the_remedy(command: list[str], dead_port: int) -> None:
    address = f"127.0.0.1:{dead_port}"
    outcome = run(*command, environment={"SPECDEC_ADDRESS": address})
    remedy = "start one with `specdec up --target DIR --draft DIR`, or wait until it says `specdec ready`"
    assert outcome == Outcome(1, "", f"specdec: no specdec answers on {address} (Connection refused); {remedy}\n")


def test_version_is_printed() -> None:
    assert run("version").out.startswith("specdec 0.")


# ---- against a scripted service


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    async with served(service) as port:
        yield f"127.0.0.1:{port}"


async def test_every_flag_reaches_the_request(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE)]
    sampling = [
        *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.75", "--min-p", "0.25", "--seed", "11"),
        *("--repetition-penalty", "1.5", "--presence-penalty", "2", "--frequency-penalty", "-1"),
        *("--logit-bias", "42=-1.5", "--logit-bias", "7=2", "--stop", "END", "--stop", "\n\n", "--stop-token-id", "9"),
        *("--max-new-tokens", "5", "--num-logprobs", "0", "--ignore-eos", "--json"),
    ]
    speculation = ["--num-draft-tokens", "0", "--drafter", "ngram", "--acceptance-rule", "block"]
    outcome = await specdec(
        "generate", "hi", "--address", address, "--request-id", "r", "--chat", *sampling, *speculation
    )
    assert outcome.code == 0
    assert service.requests == [
        pb.GenerateRequest(
            request_id="r",
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]),
            sampling=types_pb2.SamplingParams(
                temperature=0.5,
                top_k=7,
                top_p=0.75,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=2,
                frequency_penalty=-1,
                seed=11,
                max_new_tokens=5,
                num_logprobs=0,
                logit_bias={42: -1.5, 7: 2},
                stop=["END", "\n\n"],
                stop_token_ids=[9],
                ignore_eos=True,
            ),
            speculation=types_pb2.SpeculationParams(
                num_draft_tokens=0, drafter="ngram", acceptance_rule=types_pb2.ACCEPTANCE_RULE_BLOCK
            ),
        )
    ]


async def test_pipe_gets_only_the_text(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE)]
    outcome = await specdec("generate", "-", "--address", address, text="größer".encode())
    assert outcome.out == f"{TEXT}\n"
    assert outcome.err == (
        "7 tokens in 2.00 s (3.5 tokens/s) · 4 rounds of 1.75 tokens · 50% of 6 draft tokens accepted · "
        "draft 0.00 s, score 0.00 s, commit 0.00 s · ended by stop · "
        f"session {SESSION}\n"
    )
    assert service.requests[0].text == "größer"


async def test_input_must_be_utf8(service: Service, address: str) -> None:
    outcome = await specdec("generate", "-", "--address", address, text=b"ab\xff")
    assert outcome == Outcome(2, "", "specdec: standard input is not UTF-8 (byte 2); convert it first\n")


async def test_json_has_one_line_per_chunk(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE)]
    outcome = await specdec("generate", "x", "--address", address, "--json")
    chunks = [json.loads(line) for line in outcome.out.splitlines()]
    assert "".join(chunk["text"] for chunk in chunks) == TEXT
    assert chunks[0] == {
        "session_id": SESSION,
        "offset": 0,
        "tokens": [1, 2],
        "text": "Once upon",
        "origins": ["accepted", "bonus"],
        "digest": digest_at(2).hex(),
        "proof": "",
        "text_ends": [4, 9],
    }
    assert chunks[-1]["finish"]["reason"] == "stop"
    assert chunks[-1]["finish"]["statistics"]["num_rounds"] == 4
    assert outcome.err == ""


async def test_terminal_shows_token_origin_in_colour(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE)]
    master, slave = pty.openpty()
    process = await start("generate", "x", "--address", address, stdout=slave)
    os.close(slave)
    shown = await asyncio.to_thread(read_terminal, master)
    assert await process.wait() == 0
    green, cyan, reset = "\x1b[32m", "\x1b[36m", "\x1b[0m"
    assert shown.startswith(f"{green}Once{reset}{cyan} upon{reset}{cyan} a{reset}{green} time{reset}")


def read_terminal(master: int) -> str:
    shown = b""
    with suppress(OSError):  # Linux raises EIO once the other side is closed
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    return shown.decode()


async def test_server_error_becomes_one_sentence(service: Service, address: str) -> None:
    service.handlers = [
        sends(then=errors.InvalidArgumentError({"sampling.top_p": "is 7; give a number in (0, 1], or leave it unset"})),
        sends(then=errors.NotFoundError("there is no such session")),
    ]
    wrong = await specdec("generate", "x", "--address", address)
    assert wrong == Outcome(2, "", "specdec: sampling.top_p is 7; give a number in (0, 1], or leave it unset\n")
    gone = await specdec("session", "show", "s-9", "--address", address)
    sentence = f"{address} has no session 's-9': it was never there, or it has expired"
    assert gone == Outcome(1, "", f"specdec: {sentence}; the last line of `specdec generate` names its session\n")


async def test_session_can_be_shown_cancelled_and_resumed(service: Service, address: str) -> None:
    shown = pb.GetSessionResponse(
        session_id=SESSION,
        status=pb.SESSION_STATUS_ACTIVE,
        epoch=2,
        num_prompt_tokens=3,
        tokens=[1, 2],
        text="Once upon",
        digest=digest_at(2),
        sampling=types_pb2.SamplingParams(seed=5, logit_bias={1: 2.0}),
    )
    cancelled = pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED)
    service.handlers = [
        lambda request, send, context: send(shown),
        lambda request, send, context: send(shown),
        lambda request, send, context: send(cancelled),
        sends(*WHOLE[1:]),
        sends(*WHOLE),
    ]
    shown_text = await specdec("session", "show", SESSION, "--address", address)
    assert "active, epoch 2" in shown_text.out
    assert "'Once upon'" in shown_text.out
    shown_json = json.loads((await specdec("session", "show", SESSION, "--address", address, "--json")).out)
    assert (shown_json["status"], shown_json["sampling"]["seed"], shown_json["tokens"]) == ("active", 5, [1, 2])
    assert (await specdec("session", "cancel", SESSION, "--address", address)).out == "cancelled\n"
    digest = digest_at(2).hex()
    resumed = await specdec("session", "resume", SESSION, "--address", address, "--offset", "2", "--digest", digest)
    assert resumed.out == " a time there was.\n"
    assert (await specdec("session", "resume", SESSION, "--address", address)).out == "Once upon a time there was.\n"


async def test_cancelling_a_finished_session_says_so(service: Service, address: str) -> None:
    finished = pb.CancelSessionResponse(status=pb.SESSION_STATUS_FINISHED)
    service.handlers = [lambda request, send, context: send(finished)]
    outcome = await specdec("session", "cancel", SESSION, "--address", address)
    assert outcome == Outcome(0, "it had finished before\n", "")


async def test_error_precedes_its_hint(service: Service, address: str) -> None:
    service.handlers = [sends(WHOLE[0], then=errors.DataLossError("the store was rolled back"))]
    outcome = await specdec("session", "resume", SESSION, "--address", address)
    hint = f"specdec: `specdec session resume {SESSION}` prints it again and continues\n"
    assert outcome == Outcome(1, "Once upon", f"specdec: the store was rolled back\n{hint}")


async def test_hint_is_absent_without_a_session(service: Service, address: str) -> None:
    service.handlers = [sends(then=errors.NotFoundError("there is no such session"))]
    outcome = await specdec("session", "resume", "nonsense", "--address", address)
    assert outcome.err.startswith(f"specdec: {address} has no session 'nonsense'")
    assert len(outcome.err.splitlines()) == 1


async def test_text_that_ends_its_line_gets_no_other(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE[:3], chunk(3, text="end\n", text_ends=[4]))]
    assert (await specdec("generate", "x", "--address", address)).out == "Once upon a time thereend\n"


def test_interrupted_import_leaves_no_traceback(tmp_path: Path) -> None:
    """A package in the place of grpc behaves as if Ctrl-C came while it is imported."""
    (tmp_path / "grpc.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "specdec", "model"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@dataclass
class Endless:
    """A handler that sends its next chunks after `go_on` is set, and records that the call was cancelled."""

    go_on: asyncio.Event
    cancelled: asyncio.Event

    async def __call__(self, request: Any, send: Send, context: Any) -> None:
        context.add_done_callback(lambda _: self.cancelled.set())
        await send(**WHOLE[0])
        await self.go_on.wait()
        for fields in WHOLE[1:3]:
            await send(**fields)
        await asyncio.Event().wait()


async def test_ctrl_c_cancels_and_names_the_session(service: Service, address: str) -> None:
    endless = Endless(asyncio.Event(), asyncio.Event())
    service.handlers = [endless]
    process = await start("generate", "x", "--address", address)
    assert process.stdout
    assert await process.stdout.readexactly(len("Once upon")) == b"Once upon"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (
        130,
        f"specdec: `specdec session resume {SESSION}` prints it again and continues\n",
    )
    await endless.cancelled.wait()


async def test_outage_is_announced_once(service: Service) -> None:
    """A coordinator that dies in mid-stream is waited for; the user is told, and Ctrl-C still leaves."""
    service.handlers = [sends(WHOLE[0])]
    async with served(service) as port:
        process = await start("generate", "x", "--address", f"127.0.0.1:{port}", "--timeout-s", "3600")
        assert process.stdout
        assert process.stderr
        assert await process.stdout.readexactly(len("Once upon")) == b"Once upon"
    line = (await process.stderr.readline()).decode()
    assert line.startswith(f"specdec: no specdec answers on 127.0.0.1:{port}")
    assert "; trying again until " in line
    assert line.endswith(f"; Ctrl-C leaves, `specdec session resume {SESSION}` continues\n")
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert err.decode() == f"specdec: `specdec session resume {SESSION}` prints it again and continues\n"


async def test_timeout_flag_limits_the_retries(service: Service) -> None:
    service.handlers = [sends(WHOLE[0])]
    async with served(service) as port:
        process = await start("generate", "x", "--address", f"127.0.0.1:{port}", "--timeout-s", "0.5")
        assert process.stdout
        await process.stdout.readexactly(len("Once upon"))
    _, err = await process.communicate()
    assert process.returncode == 1
    assert f"session {SESSION} can be resumed from token 2" in err.decode()


async def test_closed_pipe_ends_quietly(service: Service, address: str) -> None:
    endless = Endless(asyncio.Event(), asyncio.Event())
    service.handlers = [endless]
    reader, writer = os.pipe()
    process = await start("generate", "x", "--address", address, stdout=writer)
    os.close(writer)
    assert await asyncio.to_thread(os.read, reader, 4) == b"Once"
    os.close(reader)
    endless.go_on.set()
    _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"")
    await endless.cancelled.wait()


async def test_full_output_is_an_error(service: Service, address: str) -> None:
    service.handlers = [sends(*WHOLE)]
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start("generate", "x", "--address", address, stdout=full)
    os.close(full)
    _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (1, "specdec: cannot go on: [Errno 28] No space left on device\n")


# ---- the commands of `up`, not started


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
    [_, draft] = worker_commands(options, num_cores=2)
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
    assert {name for name in seen if name.startswith("SPECDEC_")} == {"SPECDEC_LOG_LEVEL"}
    assert (seen["OMP_NUM_THREADS"], seen["OMP_WAIT_POLICY"], seen["PATH"]) == ("3", "passive", "/bin")
    assert environment_of(draft, {**mine, "OMP_NUM_THREADS": "9"})["OMP_NUM_THREADS"] == "9"
    assert environment_of(draft, mine)["SPECDEC_SUPPORT_MAX"] == "5"


# ---- one child process


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


# ---- `up` with real services


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = save_tokenizer(build("llama", folder / "target"), VOCAB_SIZE)
    draft = save_tokenizer(build("llama", folder / "draft", seed=1), VOCAB_SIZE)
    return str(target), str(draft)


class Up:
    """A running `specdec up`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors: list[str] = []
        self._new_line = asyncio.Condition()
        self._reading = asyncio.create_task(self._read_errors())

    async def ready(self) -> str:
        """Return the address that it announces."""
        assert self.process.stdout
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("specdec ready on "), "".join(self.errors)
        return line.removeprefix("specdec ready on ").strip()

    async def logged(self, pattern: str, times: int = 1) -> None:
        """Wait until so many log lines match."""
        async with self._new_line:
            await self._new_line.wait_for(lambda: len(self.matching(pattern)) >= times)

    def matching(self, pattern: str) -> list[str]:
        return [line for line in self.errors if re.search(pattern, line)]

    async def ended(self) -> int:
        await self._reading
        return await self.process.wait()

    @property
    def children(self) -> dict[str, int]:
        """Return the services' process ids by module: python -m specdec.serving.child PARENT MODULE FLAGS..."""
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        mine = [number for number in numbers if parent_of(number) == self.process.pid]
        return {Path(f"/proc/{number}/cmdline").read_text().split("\0")[4]: number for number in mine}

    async def _read_errors(self) -> None:
        assert self.process.stderr
        async for line in self.process.stderr:
            async with self._new_line:
                self.errors.append(line.decode())
                self._new_line.notify_all()


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Up]:
    running = Up(await start("up", "--port", "0", *arguments))
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.ended()


def status_of(number: int) -> list[str]:
    """Return the fields of /proc/NUMBER/stat from the process state on; empty if the process is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return []


def parent_of(number: int) -> int | None:
    status = status_of(number)
    return int(status[1]) if status else None


def is_alive(number: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return status_of(number)[:1] not in ([], ["Z"])


async def all_gone(numbers: Sequence[int]) -> None:
    """Wait until all processes are gone; only the test's timeout limits the wait."""
    while any(map(is_alive, numbers)):  # noqa: ASYNC110  # the kernel notifies only the parent
        await asyncio.sleep(0.01)


async def test_up_serves_until_ctrl_c(models: tuple[str, str]) -> None:
    target, draft = models
    async with up("--target", target, "--draft", draft, "--dtype", "float32") as running:
        address = await running.ready()
        children = running.children
        assert set(children) == {"target_service", "draft_service", "coordinator"}
        greedy = ["generate", "t5 t6 t7", "--address", address, "--temperature", "0", "--max-new-tokens", "24"]
        texts = [
            await specdec(*greedy, *options)
            for options in (["--num-draft-tokens", "0"], ["--num-draft-tokens", "4"], ["--drafter", "ngram"])
        ]
        assert [text.code for text in texts] == [0, 0, 0], texts
        assert texts[0].out
        assert texts[0].out == texts[1].out == texts[2].out
        assert "drafters  model, recycle, ngram, suffix" in (await specdec("model", "--address", address)).out
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0
        await all_gone([*children.values()])


async def test_second_signal_ends_hanging_streams(models: tuple[str, str]) -> None:
    async with up("--target", models[0], "--draft", "none", "--drain-s", "3600") as running:
        address = await running.ready()
        children = running.children
        assert set(children) == {"target_service", "coordinator"}
        os.kill(children["target_service"], signal.SIGSTOP)
        streaming = await start("generate", "t5", "--address", address)
        running.process.send_signal(signal.SIGTERM)
        await running.logged("draining")
        assert is_alive(children["target_service"])
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
        await all_gone([*children.values()])
        with suppress(ProcessLookupError):  # it may have exited already
            streaming.kill()
        await streaming.communicate()


async def test_no_child_survives_a_killed_parent(models: tuple[str, str]) -> None:
    async with up("--target", models[0]) as running:
        await running.ready()
        children = running.children
        assert len(children) == 3
        running.process.kill()
        await all_gone([*children.values()])


async def test_draft_worker_that_never_starts_ends_up(tmp_path: Path, models: tuple[str, str]) -> None:
    shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    async with up("--target", models[0], "--draft", str(tmp_path)) as running:
        assert await running.ended() == 1
        assert running.errors[-1].startswith("specdec: the draft worker ended with exit code 1: ")


async def test_unservable_model_gives_one_sentence(tmp_path: Path, models: tuple[str, str]) -> None:
    shutil.copytree(models[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    async with up("--target", str(tmp_path)) as running:
        assert await running.ended() == 1
        assert running.errors[-1].startswith("specdec: the target worker ended with exit code 1: ")
        assert "Traceback" not in "".join(running.errors)
