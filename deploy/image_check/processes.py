"""Commands whose whole process group ends with them, and the error that the check ends with."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NUM_SHOWN_LINES = 20
END_S = 30.0  # longer than a service drains without calls


class CheckFailed(Exception):
    """The check cannot go on. The message is one sentence for the user; `output` is what a command printed before."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def read(command: Sequence[str]) -> str | None:
    """Return what a short command prints, without surrounding space; None if it fails or does not exist."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a long command with its output in `log`, whose name says what it does. Raises CheckFailed."""
    process = start(command, log, environment)
    try:
        exit_code = process.wait()
    finally:
        end(process)
    if exit_code:
        raise CheckFailed(f"{log.stem}: {command[0]} ended with exit code {exit_code}", last_lines(log))


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a process group, with its output in `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end; then kill what is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path) -> str:
    """Return the end of a command's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-NUM_SHOWN_LINES:])
