"""Logs: from any library in a service's process, each line is one event in the configured format."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, gc, logging, threading, warnings
from specdec.serving import telemetry

telemetry.configure_logs("target", "info", "{log_format}")
telemetry.get_logger().info("ready", port=7)
logging.getLogger("httpx").info("a library's chatter")
try:
    raise RuntimeError("CUDA error" + 1000 * "!")
except RuntimeError as error:
    logging.getLogger("specdec.engine.loop").error("%s failed", "the forward", exc_info=error)
warnings.warn("deprecated", stacklevel=1)
logging.getLogger("specdec.engine.loop").error("engine_tasks_failed", extra={{"stage": "the forward", "num_tasks": 2}})

class Fails:
    def __del__(self):
        raise OSError("in a finaliser")

Fails()

async def main():
    asyncio.get_running_loop().set_exception_handler(telemetry.log_unhandled)
    async def breaks():
        raise KeyError("lost")
    task = asyncio.create_task(breaks())
    await asyncio.sleep(0.01)
    del task
    gc.collect()

asyncio.run(main())
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the end")
"""


def lines(log_format: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(log_format=log_format)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    return ended.stderr.splitlines()


def test_every_line_is_a_json_event() -> None:
    events = [json.loads(line) for line in lines("json")]
    assert all(event["service"] == "target" and event["timestamp"] for event in events)
    assert [(event["level"], event["event"].splitlines()[0], event.get("error")) for event in events] == [
        ("info", "ready", None),
        ("error", "the forward failed", "RuntimeError"),
        ("warning", events[2]["event"].splitlines()[0], None),
        ("error", "engine_tasks_failed", None),
        ("error", "unraisable", "OSError"),
        ("error", "unhandled", "KeyError"),
        ("critical", "uncaught", "ZeroDivisionError"),
        ("critical", "uncaught", "ValueError"),
    ]
    assert "UserWarning: deprecated" in events[2]["event"]
    assert len(events[1]["message"]) == 300
    assert events[1]["frames"] == ["<string>:9 <module>"]
    assert (events[3]["stage"], events[3]["num_tasks"]) == ("the forward", 2), "the fields of the engine's events"
    assert "Fails.__del__" in events[4]["what"]


@pytest.mark.parametrize("word", ["ready", "the forward failed", "unraisable", "unhandled", "uncaught"])
def test_text_has_no_tracebacks(word: str) -> None:
    text = lines("text")
    assert any(word in line for line in text)
    assert not any("Traceback" in line for line in text)
