"""All services as processes of their own, each with a port for Prometheus."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.serving.local import Options, running
from specdec.timeline.receiver import SpanReceiver, receiving
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.ports import free_ports


@dataclass(frozen=True, slots=True)
class Services:
    """Four processes, where they answer, and where their metrics are."""

    address: str
    http_address: str
    metrics_ports: tuple[int, ...]
    model: Path


@asynccontextmanager
async def traced_services(folder: Path) -> AsyncIterator[tuple[Services, SpanReceiver]]:
    """Run the same services, which send their spans to a receiver of ours."""
    with pytest.MonkeyPatch.context() as patch:
        async with receiving("127.0.0.1:0") as receiver:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            async with measured_services(folder) as services:
                yield services, receiver


@asynccontextmanager
async def measured_services(folder: Path) -> AsyncIterator[Services]:
    """Run a coordinator, a target worker, a draft worker and a gateway on a toy model that is built in a folder."""
    model = save_tokenizer(build("llama", folder), VOCAB_SIZE)
    first = free_ports(4)
    options = Options(
        target=str(model),
        draft=str(model),
        port=0,
        http_port=0,
        store="memory",
        dtype="float32",
        drain_s=0,
        metrics_ports=first,
    )
    async with running(options, lambda *_: None) as stack:
        assert stack.http_address
        yield Services(stack.address, stack.http_address, (first, first + 1, first + 2, first + 3), model)
