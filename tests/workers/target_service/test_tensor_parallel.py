"""A target worker that shares its model with a second process: the text of one process, and an end in common."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.channel import open_channel
from specdec.engine import ModelRefused
from specdec.engine.parallel import Group
from specdec.serving.process import CannotServe
from specdec.serving.settings import load
from specdec.serving.shared_model import launched_place
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service.settings import TargetSettings
from tests.engine.tiny_models import ReferenceModel, random_tokens
from tests.support.architectures import build
from tests.support.cluster import Cluster, cluster, patient_rounds, save_tokenizer, serving_target
from tests.support.worker_streams import PROMPT, TargetStream, connected_target

NUM_TOKENS = 300  # of the tokenizer
NUM_NEW = 24
NUM_SESSIONS = 4
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
CACHE_BYTES = 1 << 16  # of a share: seven blocks of 32 tokens; four sessions of up to 94 tokens take turns
END_S = 60.0  # far more than an end takes, also on a busy machine
FLAGS = ("--port", "0", "--dtype", "float32", "--kv-cache-bytes", str(8 << 20), "--drain-s", "0")
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("llama")), NUM_TOKENS)


@dataclass
class Shared:
    """A cluster whose target worker has a follower."""

    cluster: Cluster
    num_messages: int = 0  # that the follower got


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folder: Path) -> AsyncIterator[Shared]:
    """The target drafts for itself, so that whole chains are accepted; trees come from lookup."""
    target = {"tensor_parallel": 2, "kv_cache_bytes": CACHE_BYTES, "prefill_chunk_tokens": 64}
    counts, send = Shared(Cluster("", "", "")), Group.send

    def counting(self: Group, message: bytes) -> None:
        counts.num_messages += 1
        send(self, message)

    with patient_rounds() as patience_s, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "send", counting)
        served = cluster(folder, folder, drafters="model,recycle", target_settings=target, draft_timeout_s=patience_s)
        async with served as counts.cluster:
            yield counts


def prompts() -> list[list[int]]:
    return [[token % NUM_TOKENS for token in random_tokens(seed, 30 + 13 * seed)] for seed in range(NUM_SESSIONS)]


@pytest.fixture(scope="module")
def greedy_texts(folder: Path) -> list[tuple[int, ...]]:
    """What transformers' own forward decodes, token for token, in one process."""
    model, texts = ReferenceModel(folder), prompts()
    for text in texts:
        for _ in range(NUM_NEW):
            text.append(next_token(model, text))
    return [tuple(text[-NUM_NEW:]) for text in texts]


@in_module_loop
@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(num_draft_tokens=0),
        SpeculationParams(num_draft_tokens=4, drafter="model"),
        SpeculationParams(num_draft_tokens=8, drafter="recycle"),
    ],
    ids=["plain", "chains", "trees"],
)
async def test_greedy_text_is_that_of_one_process(
    speculation: SpeculationParams, shared: Shared, greedy_texts: list[tuple[int, ...]]
) -> None:
    before = shared.num_messages
    async with AsyncClient(shared.cluster.address) as client:
        calls = [
            client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=speculation) for prompt in prompts()
        ]
        texts = [completion.tokens for completion in await asyncio.gather(*calls)]
    assert texts == greedy_texts
    assert shared.num_messages > before


@in_module_loop
async def test_a_shared_model_is_the_same_model(shared: Shared, folder: Path) -> None:
    """Sums round differently, as on another processor; its sessions may go on at a worker of one process."""
    async with open_channel(shared.cluster.target_address) as channel, connected_target(folder) as other:
        assert await fingerprint(channel) == await fingerprint(other)


async def fingerprint(channel: grpc.aio.Channel) -> str:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    return (await stub.GetTarget(target_pb2.GetTargetRequest())).model.fingerprint


@dataclass
class Running:
    """A worker and its follower, as processes."""

    process: asyncio.subprocess.Process
    port: int
    follower_pid: int
    lines: list[str]

    async def exit_code(self) -> int:
        """Wait for the end; return the exit code."""
        async with asyncio.timeout(END_S):
            return await self.process.wait()

    async def follower_ends(self) -> None:
        """Wait until the follower is gone, or is only kept because nobody asked how it ended."""
        async with asyncio.timeout(END_S):
            while is_running(self.follower_pid):  # noqa: ASYNC110  # not our child
                await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Return the processes that a running one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Running]:
    """Run a worker until it serves; at the end kill what is left."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    lines: list[str] = []
    events: dict[str, dict[str, int]] = {}
    while not {"ready", "following"} <= events.keys():
        line = (await process.stderr.readline()).decode()
        assert line, "".join(lines)
        lines.append(line)
        if line.startswith("{"):
            events[json.loads(line)["event"]] = json.loads(line)
    reading = asyncio.create_task(_read(process.stderr, lines))
    worker = Running(process, events["ready"]["port"], events["following"]["pid"], lines)
    try:
        yield worker
    finally:
        for pid in (*children_of(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()
        await reading


async def _read(stream: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode())


@pytest.mark.long
async def test_a_worker_ends_with_its_follower(folder: Path) -> None:
    async with running("target_service", "--model", str(folder), "--tensor-parallel", "2", *FLAGS) as worker:
        os.kill(worker.follower_pid, signal.SIGKILL)
        assert await worker.exit_code() == 1
    assert any("a process that shares the model was killed by SIGKILL" in line for line in worker.lines), worker.lines


@pytest.mark.long
async def test_a_worker_ends_when_its_follower_hangs(folder: Path) -> None:
    """Its forward takes too long, which is how all that hangs is found."""
    flags = ("--tensor-parallel", "2", "--stalled-s", "0.5", *FLAGS)
    async with running("target_service", "--model", str(folder), *flags) as worker:
        os.kill(worker.follower_pid, signal.SIGSTOP)
        async with open_channel(f"127.0.0.1:{worker.port}") as channel:
            with suppress(grpc.aio.AioRpcError):
                await TargetStream(channel, "session").score(0, PROMPT)
        assert await worker.exit_code() == 1
        await worker.follower_ends()
    assert any("the engine has stopped, or hangs" in line for line in worker.lines), worker.lines


async def test_torchrun_starts_a_worker_and_its_follower(folder: Path) -> None:
    """A session gets the greedy tokens of one process, the second one after both processes were told to end."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = ("--model", str(folder), *FLAGS, "--drain-s", str(END_S))
    model = ReferenceModel(folder)
    async with running(*launcher, "-m", "target_service", *flags) as worker:
        async with open_channel(f"127.0.0.1:{worker.port}") as channel:
            stream = TargetStream(channel, "session", SamplingParams(temperature=0, seed=7))
            assert await greedy_token(stream, 0, PROMPT) == next_token(model, PROMPT)
            worker.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(END_S):
                while not any('"draining"' in line for line in worker.lines):  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(0.02)
            assert await greedy_token(stream, len(PROMPT), [3]) == next_token(model, [*PROMPT, 3])
            await stream.close()
        await worker.exit_code()
        await worker.follower_ends()


async def greedy_token(stream: TargetStream, start: int, tokens: list[int]) -> int:
    """Return the target's token after these."""
    return int.from_bytes((await stream.score(start, tokens)).tail_tokens, "little")


def next_token(model: ReferenceModel, text: list[int]) -> int:
    return int(model.logits(text)[-1, :NUM_TOKENS].argmax())


async def test_a_model_that_cannot_be_shared_starts_no_follower(folder: Path) -> None:
    """Four attention heads are not for three processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.serving.shared_model._start", _fail_to_start)
        with pytest.raises(ModelRefused, match="which 3 processes cannot share evenly"):
            async with serving_target(folder, tensor_parallel=3):
                pass


async def _fail_to_start(module: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    raise AssertionError("a follower was started")


def test_launched_processes_must_be_as_many_as_asked_for() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    with pytest.raises(CannotServe, match="--tensor-parallel is 2, but 4 processes were launched"):
        launched_place(TargetSettings(model="m", tensor_parallel=2), launched)
    assert launched_place(TargetSettings(model="m"), launched) is not None


def test_quantised_weights_are_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(TargetSettings, "target_service", ["--model", "m", "--tensor-parallel", "2", "--quantization", "int8"])
    assert "--tensor-parallel shares weights as they are" in capsys.readouterr().err
