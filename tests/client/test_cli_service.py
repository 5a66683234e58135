"""The `specdec` command as users run it, against a scripted service: real processes, signals and exit codes."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from specdec import errors
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import types_pb2
from tests.support.command_line import Outcome, specdec, start
from tests.support.scripted import SESSION, TEXT, WHOLE, Endless, Service, chunk, digest_at, sends, served


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


@pytest.mark.parametrize(
    ("failure", "lines"),
    [
        (
            errors.InvalidArgumentError({"sampling.max_new_tokens": "is 7; give at most 5"}),
            ["--max-new-tokens is 7; give at most 5"],
        ),
        (errors.InvalidArgumentError({"text": "is empty; give a token"}), ["PROMPT is empty; give a token"]),
        (errors.UnauthenticatedError("the call carries no token"), ["no token", "--token-file FILE sends a token"]),
        (errors.DeadlineExceededError("too late"), ["too late", "--timeout-s gives it more than 0.5 s"]),
    ],
)
async def test_errors_name_the_flag_that_mends_them(
    failure: errors.SpecdecError, lines: list[str], service: Service, address: str
) -> None:
    service.handlers = [sends(then=failure)]
    outcome = await specdec("generate", "x", "--timeout-s", "0.5", "--address", address)
    assert len(outcome.err.splitlines()) == len(lines), outcome.err
    assert all(words in line for words, line in zip(lines, outcome.err.splitlines(), strict=True)), outcome.err


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
        "rounds": [{"drafter": "model", "num_draft_tokens": 2, "depth": 2, "end": 2}],
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
    assert wrong == Outcome(2, "", "specdec: --top-p is 7; give a number in (0, 1], or leave it unset\n")
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


async def test_ctrl_c_cancels_and_names_the_session(service: Service, address: str) -> None:
    service.handlers = [endless := Endless()]
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
    service.handlers = [endless := Endless()]
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
