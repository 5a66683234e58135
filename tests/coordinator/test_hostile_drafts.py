"""A draft worker that answers nonsense, in fifty ways, costs speed and never changes the output."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from coordinator.draft import draft_watch
from coordinator.pool.resolving import resolver
from coordinator.pool.watching import watching
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.messages import model_to_proto
from specdec.retry import RetryPolicy
from specdec.serving.channels import open_worker_channel
from specdec.types import ModelInfo
from specdec.v1 import draft_pb2, types_pb2
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import Cluster, cluster, save_tokenizer

PROMPT = [5, 17, 3, 200, 9]
NUM_NEW_TOKENS = 24
PLAIN, DRAFTED = SpeculationParams(num_draft_tokens=0), SpeculationParams(num_draft_tokens=4)
SERVICE = "specdec.v1.DraftService"
Reply = Callable[[draft_pb2.Propose], bytes]


def packed(values: Any, dtype: str) -> bytes:
    """Return little-endian values."""
    return np.array(values, dtype).tobytes()


def answer(tokens: Any = (1,), sizes: Any = (2,), ids: Any = (1, 2), probs: Any = (0.5, 0.5), **fields: Any) -> Reply:
    """Return a reply with one drawn token, right unless a part is replaced."""

    def reply(propose: draft_pb2.Propose) -> bytes:
        held = propose.start + len(propose.tokens)
        distributions = types_pb2.SparseDistributions(
            sizes=packed(sizes, "<u4"), token_ids=packed(ids, "<u4"), probs=packed(probs, "<f4")
        )
        given = {"tokens": tokens, "distributions": distributions, "cached_len": held, "round": propose.round} | fields
        return draft_pb2.ProposeResponse(**given).SerializeToString()

    return reply


def raw(data: bytes) -> Reply:
    """Return a reply of bytes."""
    return lambda propose: data


def relative(**fields: int) -> Reply:
    """Return a reply whose cached_len is off."""
    return lambda propose: answer(cached_len=max(0, propose.start + fields["offset"]))(propose)


NAN, INF = float("nan"), float("inf")
NONSENSE: dict[str, Reply] = {
    "undecodable bytes": raw(b"\xff\xff\xff\xff"),
    "a truncated message": raw(b"\x0a\x7f\x01"),
    "text": raw(b"HTTP/1.1 200 OK"),
    "a field of another type": raw(b"\x12\x00\x08\x96\x01\x18\xff"),
    "an empty message": raw(b""),
    "a megabyte of zeros": raw(b"\0" * (1 << 20)),
    "more tokens than asked for": answer(tokens=[1] * 30, sizes=[2] * 30, ids=[1, 2] * 30, probs=[0.5, 0.5] * 30),
    "a token outside its support": answer(tokens=[9]),
    "a token past the vocabulary": answer(tokens=[1 << 20], ids=[1 << 20, 2]),
    "the largest token": answer(tokens=[2**32 - 1], ids=[2**32 - 1, 2]),
    "tokens without distributions": answer(sizes=[], ids=[], probs=[]),
    "distributions without tokens": answer(tokens=[]),
    "a size of zero": answer(sizes=[0], ids=[], probs=[]),
    "a size of four billion": answer(sizes=[2**32 - 1]),
    "sizes that overflow": answer(sizes=[2**31, 2**31]),
    "fewer ids": answer(ids=[1]),
    "more ids": answer(ids=[1, 2, 3]),
    "an id twice": answer(ids=[1, 1]),
    "fewer probabilities": answer(probs=[1.0]),
    "more probabilities": answer(probs=[0.5, 0.25, 0.25]),
    "no probabilities": answer(probs=[]),
    "NaN": answer(probs=[NAN, 0.5]),
    "infinity": answer(probs=[INF, 0.5]),
    "minus infinity": answer(probs=[-INF, 0.5]),
    "a negative probability": answer(probs=[-0.5, 1.5]),
    "a probability of zero": answer(probs=[0.0, 1.0]),
    "a sum of two": answer(probs=[1.0, 1.0]),
    "a sum of a half": answer(probs=[0.25, 0.25]),
    "denormals": answer(probs=[1e-45, 1e-45]),
    "half a size": answer(distributions=types_pb2.SparseDistributions(sizes=b"\1\0")),
    "half an id": answer(distributions=types_pb2.SparseDistributions(sizes=packed([1], "<u4"), token_ids=b"\1\0\0")),
    "a parent after its child": answer(tokens=[1, 2], sources=[1, 1], parents=[2, 0]),
    "a token that is its own parent": answer(parents=[1]),
    "a cycle": answer(tokens=[1, 2], sources=[1, 1], parents=[2, 1]),
    "a parent of four billion": answer(parents=[2**32 - 1]),
    "fewer parents": answer(tokens=[1, 2], sources=[1, 1], parents=[0]),
    "more parents": answer(parents=[0, 0]),
    "a source that does not exist": answer(sources=[7]),
    "a source of four billion": answer(sources=[2**32 - 1]),
    "fewer sources": answer(tokens=[1, 2], sources=[1]),
    "a distribution without a token": answer(sources=[0]),
    "no token at all, but parents": answer(tokens=[], sizes=[], ids=[], probs=[], parents=[0, 0, 0]),
    "nothing drafted": answer(tokens=[], sizes=[], ids=[], probs=[]),
    "a cache of four billion tokens": answer(cached_len=2**32 - 1),
    "a cache that always lacks tokens": relative(offset=-1),
    "a cache that is always empty": answer(cached_len=0),
    "timings that are NaN": answer(timing=types_pb2.Timing(queue_s=NAN, forward_s=-INF, total_s=NAN)),
    "thirty thousand tokens": answer(tokens=list(range(30_000))),
    "a support of two thousand tokens": answer(sizes=[2000], ids=list(range(2000)), probs=[1 / 2000] * 2000),
    "the same sibling thirty times": answer(tokens=[1] * 30, sources=[1] * 30, parents=[0] * 30),
}


class NonsenseWorker(grpc.GenericRpcHandler):
    """A draft worker that answers each round with the bytes that a test chose."""

    def __init__(self) -> None:
        self.reply: Reply = raw(b"")
        self.num_rounds = 0
        drafter = draft_pb2.Drafter(name="liar", model=model_to_proto(ModelInfo("liar")))
        self.description = draft_pb2.GetDraftResponse(drafters=[drafter])

    def service(self, handler_call_details: Any) -> Any:
        """Serve the two methods of the service."""
        method = handler_call_details.method.rpartition("/")[2]
        if method == "GetDraft":
            return grpc.unary_unary_rpc_method_handler(self._describe)
        return grpc.stream_stream_rpc_method_handler(self._propose) if method == "Propose" else None

    async def _describe(self, request: bytes, context: Any) -> bytes:
        return self.description.SerializeToString()

    async def _propose(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            request = draft_pb2.ProposeRequest.FromString(data)
            if request.HasField("propose"):
                self.num_rounds += 1
                yield self.reply(request.propose)


@asynccontextmanager
async def serve(worker: NonsenseWorker) -> AsyncIterator[str]:
    """Serve it with health, as a worker would."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((worker,))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nonsense_worker() -> AsyncIterator[tuple[NonsenseWorker, str]]:
    """The worker and its address."""
    worker = NonsenseWorker()
    async with serve(worker) as address:
        yield worker, address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    nonsense_worker: tuple[NonsenseWorker, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """A real target and coordinator whose drafts come from the worker."""
    folder = save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    async with cluster(Path(folder), draft=nonsense_worker[1]) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session asks the worker, however it answered the ones before."""
    monkeypatch.setattr("coordinator.pool.breaker.TRIALS", RetryPolicy(first_s=0.0))


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    """The text of plain decoding, once it is known."""
    return {}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_costs_speed_only(
    name: str, served: Cluster, nonsense_worker: tuple[NonsenseWorker, str], expected: dict[str, tuple[int, ...]]
) -> None:
    worker, _ = nonsense_worker
    worker.reply, worker.num_rounds = NONSENSE[name], 0
    sampling = SamplingParams(temperature=0, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    async with AsyncClient(served.address) as client:
        if not expected:
            plain = await client.complete(
                prompt_token_ids=PROMPT, sampling=sampling, speculation=SpeculationParams(num_draft_tokens=0)
            )
            expected["plain"] = plain.tokens
        drafted = await client.complete(
            prompt_token_ids=PROMPT, sampling=sampling, speculation=SpeculationParams(num_draft_tokens=4)
        )
    assert drafted.tokens == expected["plain"]
    assert worker.num_rounds > 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["a cycle", "a token that is its own parent", "a parent after its child"])
async def test_cycles_are_named_in_the_log(
    name: str, served: Cluster, nonsense_worker: tuple[NonsenseWorker, str]
) -> None:
    nonsense_worker[0].reply = NONSENSE[name]
    with capture_logs() as entries:
        async with AsyncClient(served.address) as client:
            sampling = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
            await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=DRAFTED)
    problems = {entry["problem"] for entry in entries if entry["event"] == "draft_unavailable"}
    [problem] = problems
    assert problem.startswith("a draft worker answered against the contract: ")
    assert problem.endswith("that are not a tree, parents first")


def test_fifty_ways_are_tried() -> None:
    assert len(NONSENSE) == 50


@pytest.mark.parametrize("drafters", [[], [draft_pb2.Drafter()]], ids=["none", "one without a name"])
async def test_draft_worker_that_describes_no_drafter_counts_as_away(drafters: list[draft_pb2.Drafter]) -> None:
    worker = NonsenseWorker()
    worker.description = draft_pb2.GetDraftResponse(drafters=drafters)
    async with serve(worker) as address, watching(draft_watch(resolver(address), open_worker_channel)) as pool:
        assert not pool.descriptions
        assert not pool.is_available
