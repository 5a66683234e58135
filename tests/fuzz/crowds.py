"""A crowd of clients that send the largest requests that are taken, and larger ones; what others notice of it."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc

from specdec.channel import MAX_REQUEST_BYTES, PATIENT_PINGS, REQUEST_BYTES, open_channel
from specdec.v1 import generation_pb2, generation_pb2_grpc
from tests.fuzz.neighbour import neighbouring
from tests.fuzz.report import Report
from tests.fuzz.services import Services

NUM_CLIENTS = 24
NEIGHBOUR_PAUSE_S = 0.02  # its waits are compared: many of them
NUM_CALM = 20  # sessions of the neighbour before the crowd comes
MAX_LATER_S = 0.05  # that the neighbour's 99th percentile may be
MAX_GROWTH_BYTES = 100 << 20
SLACK_BYTES = 1 << 10  # of a request, for what is not the prompt
METRONOME_S = 0.005
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)  # too long, or too many at once


def _text() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="t1 " * ((REQUEST_BYTES - SLACK_BYTES) // 3))


def _too_large() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="t1 " * ((MAX_REQUEST_BYTES - SLACK_BYTES) // 3))


def _one_word() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="x" * (REQUEST_BYTES - SLACK_BYTES))


def _tokens() -> generation_pb2.GenerateRequest:
    ids = [300] * ((REQUEST_BYTES - SLACK_BYTES) // 2)
    return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenSequence(ids=ids))


def _chat() -> generation_pb2.GenerateRequest:
    content = "t1 " * ((REQUEST_BYTES - (16 << 10)) // (3 * 1000))
    messages = [generation_pb2.ChatMessage(role="user", content=content)] * 1000
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=messages))


LARGEST: tuple[Callable[[], generation_pb2.GenerateRequest], ...] = (_text, _one_word, _tokens, _chat, _too_large)


async def crowd(services: Services, num_messages: int, seed: int) -> Report:
    """Let a crowd send a hundredth of so many requests, of the largest size."""
    report = Report("crowd", max(4 * NUM_CLIENTS, num_messages // 100))
    services.errors.clear()
    async with neighbouring(services, NEIGHBOUR_PAUSE_S) as neighbour:
        with _metronome() as calm_late_s:
            while neighbour.num_sessions < NUM_CALM:  # noqa: ASYNC110  # another task counts
                await asyncio.sleep(METRONOME_S)
        calm_s, neighbour.gaps_s = neighbour.gaps_s, []
        began_s, before = time.monotonic(), services.rss_bytes()
        async with _peak(services) as peak:
            with _metronome() as late_s:
                await _send_all(services, report, random.Random(seed))
        report.elapsed_s = time.monotonic() - began_s
    report.growth_bytes = {name: peak[name] - size for name, size in before.items()}
    report.wrong += [f"{name} grew" for name, size in report.growth_bytes.items() if size > MAX_GROWTH_BYTES]
    _compare(report, calm_s, neighbour.gaps_s, _p99(late_s) - _p99(calm_late_s))
    report.wrong += [*neighbour.wrong, *services.errors, *services.crashed()]
    return report


def _compare(report: Report, calm_s: list[float], gaps_s: list[float], machine_s: float) -> None:
    """Compare the neighbour's waits. What this process waits longer by for its own timers is the machine's part."""
    later_s = _p99(gaps_s) - _p99(calm_s)
    report.neighbour = (
        f"p50 {1e3 * statistics.median(calm_s):.1f} ms alone, {1e3 * statistics.median(gaps_s):.1f} ms in the crowd; "
        f"p99 {1e3 * _p99(calm_s):.1f} and {1e3 * _p99(gaps_s):.1f} ms; timers here are {1e3 * machine_s:.1f} ms later"
    )
    if later_s - max(0.0, machine_s) > MAX_LATER_S:
        report.late.append(f"the neighbour's p99 is {1e3 * later_s:.0f} ms more than alone")


async def _send_all(services: Services, report: Report, rng: random.Random) -> None:
    left, requests = iter(range(report.num_messages)), [make() for make in LARGEST]

    async def send() -> None:
        async with open_channel(services.address, pings=PATIENT_PINGS) as channel:  # as our client sends large requests
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for _ in left:
                await _send(stub, rng.choice(requests), report)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(send())


async def _send(stub: object, request: generation_pb2.GenerateRequest, report: Report) -> None:
    kind = request.WhichOneof("prompt")
    try:
        await stub.Generate(request, timeout=60.0).read()  # type: ignore[attr-defined]  # the asynchronous stub
        code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        code = error.code()
    report.codes[f"{kind} {code.name}"] += 1
    if code not in REFUSALS:
        report.wrong.append(f"the largest {kind} ended with {code.name}")


@contextmanager
def _metronome() -> Iterator[list[float]]:
    """Yield by how much timers of this process are late."""
    late_s: list[float] = [0.0]

    async def tick() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(METRONOME_S)
            late_s.append(time.monotonic() - began_s - METRONOME_S)

    ticking = asyncio.ensure_future(tick())
    try:
        yield late_s
    finally:
        ticking.cancel()


@asynccontextmanager
async def _peak(services: Services) -> AsyncIterator[dict[str, int]]:
    """Yield the largest memory of each service while the context lasts."""
    peak = services.rss_bytes()

    async def look() -> None:
        while True:
            peak.update(_larger(peak, services.rss_bytes()))
            await asyncio.sleep(0.02)

    looking = asyncio.ensure_future(look())
    try:
        yield peak
    finally:
        looking.cancel()


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(size, other[name]) for name, size in one.items()}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
