"""`specdec up`: its flags, and the services on this machine until a signal."""

import argparse
import asyncio
import importlib.util
import os
import signal
import sys
from contextlib import nullcontext, suppress
from typing import Any, TextIO, get_args

from specdec.arguments import checked
from specdec.parameters import Number, WholeNumber
from specdec.serving import local
from specdec.serving.child import LogLine, format_event
from specdec.serving.settings import Device, DraftQuantization, Dtype, TargetQuantization
from specdec.terminal import in_colour, is_coloured

LOG_COLOURS = {"coordinator": "cyan", "target": "magenta", "draft": "green", "gateway": "yellow"}
NAME_WIDTH = len("target worker")
MODEL_PACKAGES = ("torch", "transformers", "safetensors")  # what the workers import and this process does not


def missing_package() -> str | None:
    """Return a package that the workers need and that is not installed, or None."""
    return next((name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None), None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; each is a field of `local.Options`."""
    default = local.Options(target="")
    count, port = checked(WholeNumber(1, 1024)), checked(WholeNumber(0, 65535, metavar="PORT"))
    add = parser.add_argument
    add("--target", required=True, metavar="DIR|ID", help="the target model: a folder, or a hub id")
    add(
        "--draft",
        default=default.draft,
        metavar="|".join(["DIR|ID", *local.MODEL_FREE, local.NO_DRAFT]),
        help=f"the draft model, or how to draft without one (default: {default.draft})",
    )
    for name in local.HEADS:
        add(f"--{name}-head", metavar="DIR|ID", help=f"a head for the drafter `{name}`, trained for the target")
    add("--host", default=default.host, help=f"address of coordinator and gateway (default: {default.host})")
    add(
        "--port",
        type=port,
        default=default.port,
        help=f"port of the coordinator; 0: a free one (default: {default.port})",
    )
    add(
        "--http-port",
        type=port,
        metavar="PORT",
        help="also serve OpenAI's HTTP interface, on this port; 0: a free one (default: not served)",
    )
    add(
        "--store",
        default=default.store,
        metavar="embedded|memory|redis://...",
        help="where sessions are kept; embedded: by a redis-server of their own, where the machine has one "
        f"(default: {default.store})",
    )
    add("--state-dir", metavar="DIR", help="folder of the embedded store (default: ~/.local/state/specdec)")
    add("--dtype", choices=get_args(Dtype), default=default.dtype, help="number type of both models")
    add("--device", choices=get_args(Device), default=default.device, help="where both models run")
    add(
        "--quantization",
        choices=get_args(TargetQuantization),
        default=default.quantization,
        help="int8, on the CPU: rounds the target's weights, which is another model, and faster (default: none)",
    )
    add(
        "--draft-quantization",
        choices=get_args(DraftQuantization),
        default=default.draft_quantization,
        help="rounds the weights of draft model and heads, on the CPU (default: none)",
    )
    add("--num-targets", type=count, default=1, metavar="COUNT", help="target workers (default: 1)")
    add("--num-drafts", type=count, default=1, metavar="COUNT", help="draft workers (default: 1)")
    add("--target-threads", type=count, metavar="COUNT", help="threads of a target worker (default: half the cores)")
    add(
        "--draft-threads", type=count, metavar="COUNT", help="threads of a draft worker (default: a quarter, at most 4)"
    )
    first = checked(WholeNumber(1, 65000, metavar="PORT"))
    add(
        "--metrics-ports",
        type=first,
        metavar="PORT",
        help="first port for Prometheus: coordinator, targets, drafts, gateway",
    )
    add("--insecure", action="store_true", help="allow plain text off loopback, where others can read it")
    drain_s = checked(Number(0, 86_400))
    add(
        "--drain-s",
        type=drain_s,
        default=default.drain_s,
        metavar="SECONDS",
        help="time that running streams get at the end",
    )


async def run(flags: argparse.Namespace) -> None:
    """Run until a signal, then end the services in order; a second signal does not wait for them.

    Raises local.CannotRun.
    """
    options = local.Options(**{name: getattr(flags, name) for name in local.Options.__dataclass_fields__})
    printer = LogPrinter(is_coloured=is_coloured(sys.stderr, os.environ))
    progress = local.Progress(printer, sys.stderr) if sys.stderr.isatty() else None
    stack = local.running(options, progress or printer)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _interrupt, task, stack)
    with suppress(asyncio.CancelledError):
        async with progress.shown() if progress else nullcontext(), stack:
            print(f"specdec ready on {stack.address}", flush=True)
            if stack.http_address:
                print(f"OpenAI's interface is at {stack.http_address}", flush=True)
            await stack.wait()


def _interrupt(task: "asyncio.Task[Any]", stack: local.Stack) -> None:
    if task.cancelling():
        stack.kill()
    else:
        task.cancel()


class LogPrinter:
    """Prints the services' logs to standard error, each line after the name of its service."""

    def __init__(self, stream: TextIO | None = None, *, is_coloured: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._is_coloured = is_coloured

    def __call__(self, name: str, entry: LogLine) -> None:
        """Print one line."""
        prefix = f"{name:<{NAME_WIDTH}} |"
        text = format_event(entry) if "event" in entry else entry["text"]
        level = "" if entry.get("level") in (None, "info", "debug") else f"{entry['level']}: "
        if self._is_coloured:
            prefix = in_colour(prefix, LOG_COLOURS[name.split()[0]])
            level = in_colour(level, "red") if level else ""
        print(f"{prefix} {level}{text}", file=self._stream, flush=True)
