"""What the leader tells its followers before each forward: the changes of the KV pool, and the packed row.

The pools of all processes have as many blocks and get the same changes in the same order, so a sequence lies in the
same slots everywhere; what differs is which attention heads a process stores.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.attention import Segment
from specdec.engine.decoder import PackedRow
from specdec.engine.pool import KvPool

END = b""  # the leader has ended: no forward follows


class Resize(NamedTuple):
    """`KvPool.resize`."""

    key: str
    num_blocks: int

    def apply(self, pool: KvPool) -> None:
        """Do it."""
        pool.resize(self.key, self.num_blocks)


class Compact(NamedTuple):
    """`KvPool.compact`."""

    key: str
    first: int
    slots: Sequence[int]

    def apply(self, pool: KvPool) -> None:
        """Do it."""
        pool.compact(self.key, self.first, self.slots)


Change = Resize | Compact
_CHANGES = {kind.__name__: kind for kind in (Resize, Compact)}


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    """One forward, and what happened to the pool since the one before."""

    changes: Sequence[Change]
    segments: Sequence[Segment]
    row: PackedRow

    def encode(self) -> bytes:
        """Return the message as JSON: it is read by other processes, and must not be code."""
        row = self.row
        content = {
            "changes": [[type(change).__name__, *change] for change in self.changes],
            "segments": [[segment.key, segment.past, segment.num_tokens, segment.parents] for segment in self.segments],
            "row": [row.tokens, row.positions, row.logit_rows, row.observed_rows, row.hidden_layers],
        }
        return json.dumps(content).encode()


def decode(message: bytes) -> ForwardMessage:
    """Undo `ForwardMessage.encode`."""
    content = json.loads(message)
    tokens, positions, logit_rows, observed_rows, hidden_layers = content["row"]
    return ForwardMessage(
        [_CHANGES[name](*fields) for name, *fields in content["changes"]],
        [Segment(key, past, num_tokens, tuple(parents)) for key, past, num_tokens, parents in content["segments"]],
        PackedRow(tokens, positions, logit_rows, observed_rows, tuple(hidden_layers)),
    )
