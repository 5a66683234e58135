"""One clock for all processes: an answer lies within its question, which bounds how far two clocks are apart."""

from collections import deque
from collections.abc import Sequence

from specdec.timeline.recorded import Recorded, SpanTree

Hops = Sequence[tuple[Recorded, Recorded]]


def offset_ns(hops: Hops) -> int:
    """Return how far the answering process's clock is ahead of the asking one's; 0 where that is possible.

    A question from c0 to c1 and its answer from s0 to s1 allow offsets from s1 - c1 to s0 - c0. What all allow has a
    middle; where clocks drifted so that there is none, the quickest round trip decides by its own middle.
    """
    lowest = max(answer.end_ns - question.end_ns for question, answer in hops)
    highest = min(answer.begin_ns - question.begin_ns for question, answer in hops)
    if lowest <= 0 <= highest:
        return 0
    if lowest > highest:
        question, answer = min(hops, key=lambda hop: hop[0].elapsed_ms - hop[1].elapsed_ms)
        lowest, highest = answer.end_ns - question.end_ns, answer.begin_ns - question.begin_ns
    return (lowest + highest) // 2


def aligned(tree: SpanTree, reference: str) -> SpanTree:
    """Return all spans on the clock of one process; processes that have no hop to it stay as they are."""
    offsets = {reference: 0}
    waiting = deque([reference])
    while waiting:
        known = waiting.popleft()
        for other, between in _neighbours(tree, known).items():
            if other not in offsets:
                offsets[other] = offsets[known] + between
                waiting.append(other)
    return SpanTree(span.shifted(offsets.get(span.process, 0)) for span in tree.spans)


def _neighbours(tree: SpanTree, process: str) -> dict[str, int]:
    """Return how far the clocks of those that this process asks, or that ask it, are ahead of its own."""
    asked: dict[str, list[tuple[Recorded, Recorded]]] = {}
    asking: dict[str, list[tuple[Recorded, Recorded]]] = {}
    for question, answer in tree.hops:
        if question.process == process:
            asked.setdefault(answer.process, []).append((question, answer))
        elif answer.process == process:
            asking.setdefault(question.process, []).append((question, answer))
    return {other: -offset_ns(hops) for other, hops in asking.items()} | {
        other: offset_ns(hops) for other, hops in asked.items()
    }
