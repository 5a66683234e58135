"""The short form of `make fuzz`, and that it finds what is planted."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from google.protobuf.message import DecodeError, Message

from specdec.v1 import draft_pb2, generation_pb2, target_pb2
from tests.fuzz.leavers import NUM_AT_ONCE, leave_often
from tests.fuzz.mutation import mutated
from tests.fuzz.phases import PHASES
from tests.fuzz.scripts import Seen, coordinator_script, draft_script, target_script
from tests.fuzz.services import Services, running_services

NUM_MESSAGES = {
    "coordinator": 1500,
    "target": 2000,
    "draft": 2000,
    "lying-draft": 150,
    "lying-target": 60,
    "crowd": 10_000,
}
SEED = 20260101


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running_services(tmp_path_factory.mktemp("fuzz"), SEED) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.long(but=("target", "draft", "lying-target", "lying-draft", "crowd"))
async def test_nothing_hostile_harms_the_services(services: Services, phase: str) -> None:
    report = await PHASES[phase](services, NUM_MESSAGES[phase], SEED)
    assert not report.wrong, "\n".join(report.lines())
    assert report.codes.total() > 0


async def test_nothing_is_left_of_clients_that_leave(tmp_path: Path) -> None:
    report = await leave_often(tmp_path, 6 * NUM_AT_ONCE, SEED)
    assert not report.wrong, "\n".join(report.lines())


MESSAGES: list[type[Message]] = [
    generation_pb2.GenerateRequest, generation_pb2.ResumeRequest, target_pb2.ScoreRequest, draft_pb2.ProposeRequest,
    target_pb2.ScoreResponse, draft_pb2.ProposeResponse,
]  # fmt: skip


@pytest.mark.parametrize("kind", MESSAGES)
def test_mutations_are_of_many_kinds(kind: type[Message]) -> None:
    """Some are valid protobuf with other contents, some are none; hardly one comes twice."""
    rng, fates, seen = random.Random(1), Counter[bool](), set[bytes]()
    for _ in range(500):
        data = mutated(rng, kind(), valid=0.0)
        seen.add(data)
        try:
            kind.FromString(data)
            fates[True] += 1
        except DecodeError:
            fates[False] += 1
    assert min(fates[True], fates[False]) > 50, fates
    assert len(seen) > 200


@pytest.mark.parametrize("make", [coordinator_script, target_script, draft_script])
def test_same_seed_makes_the_same_messages(make: object) -> None:
    assert callable(make)
    scripts = [[make(random.Random(7), Seen()) for _ in range(20)] for _ in range(2)]
    assert scripts[0] == scripts[1]
