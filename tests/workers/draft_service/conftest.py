"""Draft workers for all tests of a file that leave them as they were."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio

from tests.workers.draft_service.streams import served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """One worker for all tests that leave it as it was."""
    async with served(model_folder) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ahead_channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A worker that drafts ahead of one outcome."""
    async with served(model_folder, draft_ahead=True, draft_ahead_outcomes=1) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcomes_channel(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A worker that drafts ahead of many outcomes."""
    async with served(model_folder, draft_ahead=True, draft_ahead_outcomes=32) as connected:
        yield connected
