"""The secure services, once for each file of tests here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.secure_cluster import SecureCluster, secure_cluster


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is its own draft."""
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureCluster]:
    """All three services."""
    async with secure_cluster(pair, pair, tmp_path_factory.mktemp("secure")) as running:
        yield running
