"""A target worker for all tests of a file that leave it as it was."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from target_service import ahead
from tests.support.worker_streams import connected_target


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with connected_target(model_folder) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def without(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A worker that scores nothing ahead."""
    async with connected_target(model_folder, score_ahead=False) as connected:
        yield connected


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rounds be answered together however long they take here."""
    monkeypatch.setattr(ahead, "together_s", lambda _: 30.0)


def count_of(name: str) -> float:
    return REGISTRY.get_sample_value(f"specdec_target_ahead_{name}_total") or 0.0


@pytest.fixture
def counted() -> Callable[[], tuple[float, float]]:
    """Return how many rounds were begun ahead since the test began, and how many of them were asked for."""
    before = count_of("rounds"), count_of("hits")
    return lambda: (count_of("rounds") - before[0], count_of("hits") - before[1])
