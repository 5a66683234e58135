"""`specdec trace`: one clock, lanes in which spans nest, and the table of phases."""

import asyncio
from dataclasses import replace

import pytest

from specdec.timeline.chrome import chrome_trace
from specdec.timeline.clocks import aligned, offset_ns
from specdec.timeline.phases import phases, table
from specdec.timeline.receiver import SpanReceiver
from specdec.timeline.recorded import Recorded, SpanTree

MS = 1_000_000
SECOND = 1_000_000_000


def span(name: str, begin_ms: float, end_ms: float, parent: str = "", process: str = "c") -> Recorded:
    """Return a span whose id is its name and begin."""
    span_id = f"{name}@{begin_ms:g}"
    times = (round(begin_ms * MS), round(end_ms * MS))
    return Recorded(name, "t", span_id, parent, process, {"c": "coordinator"}.get(process, process), *times)


def round_at(begin_ms: float, ahead_ms: float = 0.0) -> list[Recorded]:
    """A round of 10 ms whose commit takes 4 more; the workers' clocks are ahead."""
    own = f"round@{begin_ms:g}"
    propose, score = begin_ms + 1, begin_ms + 3
    drafted, scored = propose + 0.1 + ahead_ms, score + 0.3 + ahead_ms
    return [
        span("round", begin_ms, begin_ms + 14),
        span("propose", propose, propose + 2, own),
        span("DraftService/Propose", drafted, drafted + 1.6, f"propose@{propose:g}", "draft"),
        span("forward", drafted, drafted + 1, f"DraftService/Propose@{drafted:g}", "draft"),
        span("score", score, score + 6, own),
        span("TargetService/Score", scored, scored + 5, f"score@{score:g}", "target"),
        span("queue", scored, scored + 0.5, f"TargetService/Score@{scored:g}", "target"),
        span("forward", scored + 0.5, scored + 4, f"TargetService/Score@{scored:g}", "target"),
        span("sampling", scored + 4, scored + 5, f"TargetService/Score@{scored:g}", "target"),
        span("accept", begin_ms + 9, begin_ms + 9.5, own),
        span("commit", begin_ms + 10, begin_ms + 14, own),
        span("emit", begin_ms + 14, begin_ms + 14.3, own),
    ]


def trace(num_rounds: int, ahead_ms: float = 0.0) -> SpanTree:
    return SpanTree(each for number in range(num_rounds) for each in round_at(10.0 * number, ahead_ms))


@pytest.mark.parametrize("ahead_ms", [-3_600_000.0, -50.0, 50.0, 86_400_000.0])
def test_clocks_that_differ_are_aligned(ahead_ms: float) -> None:
    tree = aligned(trace(3, ahead_ms), "c")
    for question, answer in tree.hops:
        assert question.begin_ns <= answer.begin_ns <= answer.end_ns <= question.end_ns


def test_clocks_that_may_agree_are_left_alone() -> None:
    assert aligned(trace(3), "c").spans == trace(3).spans


def test_clocks_that_drift_follow_the_quickest_round_trip() -> None:
    hops = [
        (span("score", 0, 10), span("answer", 100, 102, process="target")),
        (span("score", 20, 21), span("answer", 220.4, 220.6, process="target")),
    ]
    assert offset_ns(hops) == round(200 * MS)


def test_all_processes_are_reached_over_others() -> None:
    asked = span("Generate", 0, 100, process="client")
    request = replace(span("Generate", 5_000, 5_090, asked.span_id), span_id="request")
    answer = span("answer", 9_000, 9_080, "request", "target")
    tree = aligned(SpanTree([asked, request, answer]), "client")
    assert max(each.end_ns for each in tree.spans) <= 100 * MS


def test_spans_of_a_lane_nest() -> None:
    events = [each for each in chrome_trace(trace(4))["traceEvents"] if each["ph"] == "X"]
    lanes = {(each["pid"], each["tid"]) for each in events}
    assert len(events) == 4 * 12
    assert len({pid for pid, _ in lanes}) == 3
    for lane in lanes:
        own = [each for each in events if (each["pid"], each["tid"]) == lane]
        for one in own:
            for other in own:
                begin, end = other["ts"], other["ts"] + other["dur"]
                apart = end <= one["ts"] + 1e-6 or begin >= one["ts"] + one["dur"] - 1e-6
                within = begin >= one["ts"] - 1e-6 and end <= one["ts"] + one["dur"] + 1e-6
                around = begin <= one["ts"] + 1e-6 and end >= one["ts"] + one["dur"] - 1e-6
                assert apart or within or around


def test_every_process_has_its_name() -> None:
    named = [each for each in chrome_trace(trace(1))["traceEvents"] if each["ph"] == "M"]
    assert {each["args"]["name"] for each in named} == {"coordinator", "draft", "target"}


def test_phases_and_the_tax() -> None:
    medians = {(line.depth, line.name): line.median_ms for line in phases(trace(5))}
    assert medians[0, "round"] == pytest.approx(10)
    assert medians[0, "propose"] == pytest.approx(2)
    assert medians[0, "score"] == pytest.approx(6)
    assert medians[0, "forwards"] == pytest.approx(1 + 3.5)
    assert medians[0, "tax"] == pytest.approx(10 - 4.5)
    assert medians[0, "commit"] == pytest.approx(4)
    assert medians[1, "sampling"] in (pytest.approx(0), pytest.approx(1))


def test_the_way_of_a_call_is_what_its_worker_did_not_take() -> None:
    ways = [line.median_ms for line in phases(trace(3)) if line.name == "way"]
    assert ways == [pytest.approx(2 - 1), pytest.approx(6 - 5)]


def test_the_round_that_reads_the_prompt_is_left_out() -> None:
    slow = [replace(each, end_ns=each.end_ns + SECOND) if each.name == "round" else each for each in round_at(-2000.0)]
    lines = phases(SpanTree([*slow, *trace(3).spans]))
    assert {len(line.ms) for line in lines if line.name == "round"} == {3}
    assert table(lines)[0].split() == ["phase", "median", "ms", "max", "ms", "rounds"]


def test_what_is_missing_is_said() -> None:
    request = replace(span("GenerationService/Generate", 0, 100), attributes={"specdec.num_rounds": 3})
    assert SpanTree([]).missing == "the coordinator's request"
    assert SpanTree([request, *trace(2).spans]).missing == "1 of 3 rounds"
    assert SpanTree([request, *trace(3).spans]).missing is None
    own = [each for each in trace(3).spans if each.process != "target"]
    assert SpanTree([request, *own]).missing == "the workers' side of 3 of 6 calls"


async def test_a_trace_is_waited_for_as_long_as_spans_come() -> None:
    receiver, whole_trace = SpanReceiver(), trace(2).spans
    request = replace(span("GenerationService/Generate", 0, 100), attributes={"specdec.num_rounds": 2})
    waiting = asyncio.create_task(receiver.until_complete("t", quiet_s=3600.0))
    for each in (*whole_trace, request):
        await asyncio.sleep(0)
        assert not waiting.done()
        receiver.take([replace(each, trace_id="another"), each])
    assert len((await waiting).spans) == len(whole_trace) + 1


async def test_a_trace_of_which_nothing_comes_is_given_up() -> None:
    receiver = SpanReceiver()
    receiver.take(trace(1).spans)
    assert (await receiver.until_complete("t", quiet_s=0.01)).missing == "the coordinator's request"
