"""The demo images' own programs on free ports of loopback, and the same greedy text with and without drafting."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.image_check.engine import Container, Engine
from deploy.image_check.processes import CheckFailed, end, last_lines, run, start

DEMO_IMAGES = ("demo-target", "demo-draft", "demo-coordinator")
PROMPT = "import os\n\n\nclass Reader:\n    def __init__(self, path):\n"
NUM_TOKENS = 64
READY_S = 180.0
ASK_AGAIN_S = 1.0
DRAFTED, PLAIN = ("--drafter", "model"), ("--num-draft-tokens", "0")
# float32: in bfloat16 two nearly equal logits may be ordered by the shape of a batch
MODEL = {"SPECDEC_DEVICE": "cpu", "SPECDEC_DTYPE": "float32", "SPECDEC_KV_CACHE_BYTES": str(64 << 20)}


@dataclass(frozen=True, slots=True)
class Generated:
    """A text, its tokens, and the statistics that came with its end."""

    text: str
    tokens: list[int]
    statistics: Mapping[str, Any]


def generate_through(engine: Engine, images: Mapping[str, str], folder: Path) -> tuple[Generated, Generated]:
    """Return the text with drafting and plain; every container ends here. Raises CheckFailed."""
    target, draft, coordinator = _free_ports(3)
    addresses = {"SPECDEC_TARGET": f"127.0.0.1:{target}", "SPECDEC_DRAFT": f"127.0.0.1:{draft}"}
    services = [
        ("target", "Target", target, {**MODEL, "SPECDEC_MODEL": "/models/target"}),
        ("draft", "Draft", draft, {**MODEL, "SPECDEC_MODEL": "/models/draft"}),
        ("coordinator", "Generation", coordinator, {**addresses, "SPECDEC_TOKENIZER": "/models/target"}),
    ]
    with ExitStack() as stack:
        for name, service, port, own in services:
            variables = {"SPECDEC_HOST": "127.0.0.1", "SPECDEC_PORT": str(port), **own}
            container = Container(f"specdec-image-check-{name}-{port}", images[f"demo-{name}"], variables)
            process = stack.enter_context(_running(engine, container, folder / f"{name}.log"))
            _wait_until_serving(port, f"specdec.v1.{service}Service", process, folder / f"{name}.log")
        image = images["demo-coordinator"]
        return _generate(engine, image, coordinator, DRAFTED, folder), _generate(
            engine, image, coordinator, PLAIN, folder
        )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _running(engine: Engine, container: Container, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = start(engine.command(container), log)
        try:
            yield process
        finally:
            end(process)
    finally:
        engine.remove(container)


def _wait_until_serving(port: int, service: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not _is_serving(stub, service):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"the image's {service} does not serve", last_lines(log))
            time.sleep(ASK_AGAIN_S)


def _is_serving(stub: health_pb2_grpc.HealthStub, service: str) -> bool:
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=ASK_AGAIN_S)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _generate(engine: Engine, image: str, port: int, speculation: tuple[str, str], folder: Path) -> Generated:
    """Generate with the command that the coordinator's image holds."""
    sampling = ("--temperature", "0", "--max-new-tokens", str(NUM_TOKENS), "--ignore-eos")
    words = ["specdec", "generate", "--json", "--address", f"127.0.0.1:{port}", *sampling, *speculation, PROMPT]
    container, log = (
        Container(f"specdec-image-check-command-{port}", image, words=words),
        folder / "generation by the coordinator's image.log",
    )
    try:
        run(engine.command(container), log)
    finally:
        engine.remove(container)
    return parse([json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")])


def parse(chunks: list[dict[str, Any]]) -> Generated:
    """Return what `specdec generate --json` printed. Raises CheckFailed if it did not reach its end."""
    if not chunks or "finish" not in chunks[-1]:
        raise CheckFailed("a generation through the images did not reach its end")
    text = "".join(chunk.get("text", "") for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.get("tokens", [])]
    return Generated(text, tokens, chunks[-1]["finish"]["statistics"])


def compare(drafted: Generated, plain: Generated) -> None:
    """Raise CheckFailed unless drafting helped, plain decoding did without it, and both texts are the same."""
    if not drafted.statistics["num_accepted_tokens"] or plain.statistics["num_draft_tokens"]:
        raise CheckFailed("the drafted text accepted no draft token, or the plain one was drafted")
    if (drafted.text, drafted.tokens) != (plain.text, plain.tokens):
        raise CheckFailed(f"the greedy texts differ: drafted {drafted.text!r}, plain {plain.text!r}")
