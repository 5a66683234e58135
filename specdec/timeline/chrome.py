"""A trace as the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process has lanes, in each of which a span lies within the one before it or after it: rounds overlap, as a round's
commit runs beside the next round.
"""

from collections.abc import Iterator
from typing import Any

from specdec.timeline.recorded import Recorded, SpanTree


class _Lanes:
    """The lanes of one process; each knows until when its open spans last."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []
        self._of_span: dict[str, int] = {}

    def place(self, span: Recorded) -> int:
        """Return the span's lane: its parent's if there is room. Spans come in the order of their begin."""
        first = self._of_span.get(span.parent_id, 0)
        number = next((each for each in (first, *range(len(self._open))) if self._fits(each, span)), len(self._open))
        if number == len(self._open):
            self._open.append([])
        self._open[number].append(span.end_ns)
        self._of_span[span.span_id] = number
        return number

    def _fits(self, number: int, span: Recorded) -> bool:
        if number >= len(self._open):
            return False
        ends = self._open[number]
        while ends and ends[-1] <= span.begin_ns:
            ends.pop()
        return not ends or ends[-1] >= span.end_ns


def chrome_trace(tree: SpanTree) -> dict[str, Any]:
    """Return the file's contents; times are microseconds from the first span on."""
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(tree), *_events(tree)]}


def _numbers(tree: SpanTree) -> dict[str, int]:
    """Number the processes, in the order in which they come in."""
    return {process: number + 1 for number, process in enumerate(dict.fromkeys(span.process for span in tree.spans))}


def _names(tree: SpanTree) -> Iterator[dict[str, Any]]:
    services = {span.process: span.service for span in tree.spans}
    for process, number in _numbers(tree).items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": services[process]}}


def _events(tree: SpanTree) -> Iterator[dict[str, Any]]:
    numbers = _numbers(tree)
    lanes = {process: _Lanes() for process in numbers}
    first_ns = tree.spans[0].begin_ns
    for span in tree.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.service,
            "pid": numbers[span.process],
            "tid": lanes[span.process].place(span),
            "ts": (span.begin_ns - first_ns) / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "args": dict(span.attributes),
        }
