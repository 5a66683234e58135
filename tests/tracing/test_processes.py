"""One request gives one connected trace over client, coordinator and both workers, each a process of its own."""

import asyncio
import re
import secrets
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.timeline.receiver import SpanReceiver
from specdec.timeline.recorded import Recorded, SpanTree
from tests.support.measured_services import Services, traced_services

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 48
CANARY = "t7"
PROMPT = f"t5 {CANARY} t11"
WAIT_S = 60.0  # for spans, on a busy machine
SERVICES = {"specdec-coordinator", "specdec-target", "specdec-draft"}
ATTRIBUTES = {
    *("code", "session", "num_rounds", "num_accepted", "num_tokens", "round", "drafter", "num_draft_tokens"),
    *("num_accepted_tokens", "num_sessions", "worker", "num_fed"),
}


@dataclass(frozen=True, slots=True)
class Traced:
    """Services that send their spans to a receiver of ours."""

    services: Services
    receiver: SpanReceiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    async with traced_services(tmp_path_factory.mktemp("model")) as (services, receiver):
        yield Traced(services, receiver)


async def ask(traced: Traced, state: str = "") -> tuple[Completion, SpanTree]:
    """Generate in a span of the caller; return the text and the trace, once the coordinator's request has come."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=("canary",))
    speculation = SpeculationParams(num_draft_tokens=2, drafter="model")
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")
    async with AsyncClient(traced.services.address, metadata={"tracestate": state} if state else {}) as client:
        with tracer.start_as_current_span("caller") as caller:
            completion = await client.complete(PROMPT, sampling=sampling, speculation=speculation)
    trace_id = f"{caller.get_span_context().trace_id:032x}"
    return completion, await whole(traced.receiver, trace_id, f"{caller.get_span_context().span_id:016x}")


async def whole(receiver: SpanReceiver, trace_id: str, caller: str) -> SpanTree:
    """Wait until a trace has the coordinator's request, and every span's parent."""
    async with asyncio.timeout(WAIT_S):
        while True:
            tree = receiver.tree(trace_id)
            known = {caller, *tree.by_id}
            asked = sum(span.name in ("score", "propose") for span in tree.spans)
            is_whole = tree.named("GenerationService/Generate") and all(span.parent_id in known for span in tree.spans)
            if is_whole and len(list(tree.hops)) >= asked:
                return tree
            await asyncio.sleep(0.05)


async def test_one_request_is_one_trace_over_all_processes(traced: Traced) -> None:
    completion, tree = await ask(traced)
    (request,) = tree.named("GenerationService/Generate")
    assert {span.service for span in tree.spans} == SERVICES
    assert len({span.process for span in tree.spans}) == 3
    assert [child.name for child in tree.children(request)][:2] == ["admission", "claim"]
    assert [child.name for child in tree.children(tree.named("admission")[0])] == ["create"]
    assert completion.finish
    assert request.attributes["specdec.num_rounds"] == completion.finish.statistics.num_rounds
    assert request.attributes["specdec.code"] == "OK"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_trace_by_http_begins_at_the_gateway(traced: Traced, is_streamed: bool) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{caller}-01", "tracestate": "specdec=all"}
    body: dict[str, Any] = {"model": "*", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": is_streamed}
    extra = {"specdec": {"num_draft_tokens": 2, "drafter": "model"}}
    async with openai.AsyncOpenAI(base_url=traced.services.http_address, api_key="none") as client:
        body["model"] = (await client.models.list()).data[0].id
        answer: Any = await client.completions.create(**body, extra_headers=headers, extra_body=extra)
        if is_streamed:
            assert [event async for event in answer]
    tree = await whole(traced.receiver, trace_id, caller)
    (request,) = tree.named("POST /v1/completions")
    assert (request.parent_id, request.service) == (caller, "specdec-gateway")
    assert request.attributes["specdec.status"] == 200
    assert len(tree.children(request, "GenerationService/Generate")) == 1
    assert {span.service for span in tree.spans} == {*SERVICES, "specdec-gateway"}
    # every one, as `tracestate` asks; the call's own count is missing where the gateway has left with the last chunk
    numbers = [each.attributes["specdec.round"] for each in tree.named("round")]
    assert numbers == list(range(len(numbers)))
    assert sum_of(tree.named("round"), "num_tokens") <= NUM_TOKENS


@pytest.mark.parametrize("state", ["", "specdec=all"])
async def test_slow_values_lead_to_their_traces(traced: Traced, state: str) -> None:
    """Of a round that is not traced, the exemplar is the request's span."""
    _, tree = await ask(traced, state)
    (request,) = tree.named("GenerationService/Generate")
    found = await asyncio.to_thread(exemplars, traced.services.metrics_ports[0])
    mine = [(name, span_id) for name, span_id, trace_id in found if trace_id == request.trace_id]
    rounds = {span.span_id for span in tree.named("round")}
    assert ("specdec_time_to_first_token_seconds", request.span_id) in mine
    for name in ("specdec_round_phase_seconds", "specdec_time_per_output_token_seconds"):
        spans = {span_id for each, span_id in mine if each == name}
        assert spans
        assert spans <= ({request.span_id, *rounds} if not state else rounds)


def exemplars(port: int) -> list[tuple[str, str, str]]:
    """Return the exemplars of a process as OpenMetrics has them: histogram, span and trace."""
    accepted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accepted)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        text = answer.read().decode()
    return re.findall(r'^(\w+)_bucket\{.*# \{span_id="(\w+)",trace_id="(\w+)"\}', text, re.MULTILINE)


async def test_a_round_has_its_phases_and_the_workers_their_parts(traced: Traced) -> None:
    _, tree = await ask(traced)
    for each in tree.named("round"):
        names = Counter(child.name for child in tree.children(each))
        has_draft = each.attributes["specdec.drafter"] != "none"  # none: it was late, on a busy machine
        assert names["score"] == names["accept"] == names["commit"] == 1
        assert names["propose"] >= has_draft
        assert names["emit"] <= 1  # a client that is late gets several rounds at once
        (scoring,) = tree.children(each, "score")
        (answer,) = tree.children(scoring)
        assert (answer.name, answer.service) == ("TargetService/Score", "specdec-target")
        assert [part.name for part in tree.children(answer)] == ["queue", "forward", "sampling"]
        for drafting in tree.children(each, "propose") if has_draft else ():
            (answer,) = tree.children(drafting)
            assert (answer.name, answer.service) == ("DraftService/Propose", "specdec-draft")
            assert scoring.attributes["specdec.worker"] != drafting.attributes["specdec.worker"]
    assert tree.named("emit")
    assert tree.named("DraftService/Propose")


async def test_the_first_rounds_are_traced_and_then_one_in_sixteen(traced: Traced) -> None:
    completion, tree = await ask(traced)
    assert completion.finish
    num_rounds = completion.finish.statistics.num_rounds
    expected = [number for number in range(num_rounds) if number < 8 or number % 16 == 0]
    assert num_rounds > 8
    assert [each.attributes["specdec.round"] for each in tree.named("round")] == expected


async def test_a_caller_may_want_all_rounds(traced: Traced) -> None:
    completion, tree = await ask(traced, state="specdec=all")
    assert completion.finish
    assert len(tree.named("round")) == completion.finish.statistics.num_rounds


async def test_rounds_add_up_to_the_text(traced: Traced) -> None:
    completion, tree = await ask(traced, state="specdec=all")
    rounds = tree.named("round")
    assert completion.finish
    sums = completion.finish.statistics
    assert sum_of(rounds, "num_tokens") == len(completion.tokens) == NUM_TOKENS
    assert sum_of(rounds, "num_accepted_tokens") >= sums.num_accepted_tokens
    assert "model" in {each.attributes["specdec.drafter"] for each in rounds} <= {"model", "none"}


def sum_of(rounds: list[Recorded], name: str) -> int:
    values = [each.attributes[f"specdec.{name}"] for each in rounds]
    return sum(value for value in values if isinstance(value, int))


async def test_spans_hold_nothing_of_the_text(traced: Traced) -> None:
    completion, tree = await ask(traced, state="specdec=all")
    said = {name: value for span in tree.spans for name, value in span.attributes.items()}
    assert {name.removeprefix("specdec.") for name in said} <= ATTRIBUTES
    values = {str(value) for span in tree.spans for value in span.attributes.values()}
    assert not [value for value in values if CANARY in value.split() or "canary" in value]
    assert not [value for value in values if completion.session_id in value]
    sessions = {span.attributes.get("specdec.session") for span in tree.spans} - {None}
    assert len(sessions) == 1, "the processes do not name the session alike"


async def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    known = {span.trace_id for span in traced.receiver.spans}
    assert trace.get_current_span() is trace.INVALID_SPAN
    async with AsyncClient(traced.services.address) as client:
        await client.complete(PROMPT, max_new_tokens=2)
    request = None
    async with asyncio.timeout(WAIT_S):
        while request is None:
            await asyncio.sleep(0.05)
            new = [span for span in traced.receiver.spans if span.trace_id not in known]
            request = next((span for span in new if span.name == "GenerationService/Generate"), None)
    assert request.parent_id == ""
