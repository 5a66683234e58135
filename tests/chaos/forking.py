"""Starts processes by forking one that has imported what takes seconds to import.

`python -m tests.chaos.forking` reads a line of JSON for each process to start; it says which process that became, and
later how it ended. What it starts ends with it.
"""

import gc
import json
import os
import runpy
import select
import signal
import sys
from contextlib import suppress
from typing import Any

LOOK_S = 0.02  # between two looks for processes that ended


def main() -> None:
    """Import, then fork until standard input ends."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import target_service.__main__  # noqa: F401
    from draft_service.registry import registered

    registered()
    gc.freeze()
    _say({"event": "ready"})
    children = set[int]()
    pending = b""
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                children.add(_forked(json.loads(line)))
        _report_ends(children)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _forked(order: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            _become(order)
        finally:
            os._exit(70)
    _say({"event": "started", "number": order["number"], "pid": child})
    return child


def _become(order: dict[str, Any]) -> None:
    """Run a service as its own process does: its log in a file, a process group of its own."""
    from specdec.serving.tied import die_with
    from tests.chaos.mistakes import planted

    parent = os.getppid()
    os.setpgid(0, 0)
    die_with(parent)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    sys.argv = [order["module"], *order["flags"]]
    code: object = 0
    try:
        with planted(order["mistake"]):
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def _report_ends(children: set[int]) -> None:
    while children:
        number, status = os.waitpid(-1, os.WNOHANG)
        if not number:
            return
        children.discard(number)
        _say({"event": "ended", "pid": number, "code": os.waitstatus_to_exitcode(status)})


def _say(fact: dict[str, Any]) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")


if __name__ == "__main__":
    main()
