"""Work in the background: its result and its error arrive, and the end of the process does not wait for it."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from specdec.serving.background import in_background

LOADS_FOR_EVER = """
import time
from specdec.serving import model_worker
from target_service.__main__ import main
model_worker._load = lambda *_: time.sleep(3600)
main()
"""

HANGS = """
import sys, threading
from specdec.serving.background import leave
threading.Thread(target=threading.Event().wait, name="engine").start()
leave(*sys.argv[1:])
"""

ENDS_SLOWLY = """
import asyncio, sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from specdec.serving import process
from specdec.serving.settings import ProcessSettings

@asynccontextmanager
async def serve():
    print("ready", flush=True)
    yield SimpleNamespace(failure=asyncio.get_running_loop().create_future())

process.leave = lambda: (print("ended", flush=True), sys.stdin.readline())
process.run(ProcessSettings(), "service", "service", serve)
"""


async def test_results_and_errors_arrive() -> None:
    assert await in_background(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_background(lambda: 1 // 0)


async def test_leaving_does_not_wait() -> None:
    go = threading.Event()
    working = asyncio.create_task(in_background(go.wait))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    go.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.long(but=("15",))
def test_a_worker_that_loads_ends_when_told(number: signal.Signals) -> None:
    command = [sys.executable, "-c", LOADS_FOR_EVER, "--model", "models/target", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while '"loading"' not in process.stderr.readline():
            pass
        process.send_signal(number)
        assert process.wait(timeout=60) == 0, "the load would have taken an hour"
        assert "Traceback" not in process.stderr.read()


def test_a_process_that_is_told_again_ends_as_well() -> None:
    """While the interpreter ends, a second signal is not the end of a service that has drained."""
    command = [sys.executable, "-c", ENDS_SLOWLY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        process.stdin.write("now\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(("problem", "code"), [((), 0), (("the engine hangs",), 1)])
def test_a_process_leaves_an_engine_that_hangs(problem: tuple[str, ...], code: int) -> None:
    """Its thread is not a daemon here, so that any other way out would wait for it."""
    command = [sys.executable, "-c", HANGS, *problem]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (code, "".join(problem))
