"""A target worker for all tests of a file that leave it as it was."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio

from tests.support.worker_streams import connected_target


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with connected_target(model_folder) as connected:
        yield connected
