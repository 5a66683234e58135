"""Spans as they were received, and the tree that they make."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

REQUEST, ROUND, PROPOSE, SCORE = "GenerationService/Generate", "round", "propose", "score"  # as services name them
CLIENT = "client"  # the process that asks


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span of a process; its times are nanoseconds on that process's clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    process: str  # the id of one process
    service: str  # what that process is
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, object] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def elapsed_ms(self) -> float:
        """Its duration."""
        return (self.end_ns - self.begin_ns) / 1e6

    def shifted(self, offset_ns: int) -> "Recorded":
        """Return it on a clock that is so much behind."""
        return replace(self, begin_ns=self.begin_ns - offset_ns, end_ns=self.end_ns - offset_ns)


class SpanTree:
    """The spans of one trace."""

    def __init__(self, spans: Iterable[Recorded]) -> None:
        self.spans: Sequence[Recorded] = sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))
        self.by_id = {span.span_id: span for span in self.spans}
        self._children: dict[str, list[Recorded]] = {}
        for span in self.spans:
            self._children.setdefault(span.parent_id, []).append(span)

    def children(self, span: Recorded, name: str | None = None) -> list[Recorded]:
        """Return the spans within one, all or those of a name, in order."""
        return [child for child in self._children.get(span.span_id, ()) if name in (None, child.name)]

    def named(self, name: str) -> list[Recorded]:
        """Return the spans of a name, in order."""
        return [span for span in self.spans if span.name == name]

    @property
    def hops(self) -> Iterator[tuple[Recorded, Recorded]]:
        """Give each span that was answered by another process, with the answer."""
        for span in self.spans:
            parent = self.by_id.get(span.parent_id)
            if parent is not None and parent.process != span.process:
                yield parent, span

    @property
    def missing(self) -> str | None:
        """Say what has not come yet, if the request's rounds were all traced; None: nothing."""
        requests = self.named(REQUEST)
        if not requests:
            return "the coordinator's request"
        counts = Counter(span.name for span in self.spans)
        num_rounds = requests[0].attributes.get("specdec.num_rounds", 0)
        if isinstance(num_rounds, int) and counts[ROUND] < num_rounds:
            return f"{num_rounds - counts[ROUND]} of {num_rounds} rounds"
        answered = {parent.span_id for parent, _ in self.hops}
        asked = [span for span in self.spans if span.name in (PROPOSE, SCORE) and not span.has_failed]
        num_silent = sum(span.span_id not in answered for span in asked)
        return f"the workers' side of {num_silent} of {len(asked)} calls" if num_silent else None
