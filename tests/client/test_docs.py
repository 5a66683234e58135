"""The examples of docs/client.md and README.md run against all three services."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)


EXAMPLES = [(name, number) for name in ("docs/client.md", "README.md") for number in range(len(examples(name)))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    model = save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    async with cluster(model, model) as running:
        yield running.address


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
async def test_example_runs(name: str, number: int, address: str) -> None:
    program = examples(name)[number]
    assert ADDRESS in program
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", program.replace(ADDRESS, address)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={"PATH": os.defpath},
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    assert len(out) > 20


async def test_both_documents_have_examples() -> None:
    assert len(examples("docs/client.md")) == 3
    assert len(examples("README.md")) >= 1
    program = "\n".join(examples("docs/client.md"))
    assert "specdec.Client(" in program
    assert "specdec.AsyncClient(" in program
