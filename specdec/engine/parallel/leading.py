"""The process that leads: it schedules, keeps the cache's books and samples; its forwards run in all processes."""

from collections.abc import Sequence

from specdec.engine.attention import AttentionBackend, AttentionPlan, Segment
from specdec.engine.decoder import Decoder, DecoderOutput, PackedRow, ReplaceLinear
from specdec.engine.errors import ModelRefused
from specdec.engine.model import LanguageModel
from specdec.engine.parallel.group import Group, GroupLost
from specdec.engine.parallel.messages import Change, Compact, ForwardMessage, Resize
from specdec.engine.pool import KvPool


def leading(model: LanguageModel, group: Group) -> LanguageModel:
    """Return the same model, whose forwards the followers compute too."""
    forwards = _SharedForwards(model.decoder, model.backend, group)
    return LanguageModel(model.facts, forwards, forwards)


class _RecordedPool:
    """A pool that remembers what was done to it; a `KvPool`."""

    def __init__(self, pool: KvPool) -> None:
        self.changes: list[Change] = []
        self._pool = pool
        self.block_tokens = pool.block_tokens
        self.num_blocks = pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See `KvPool`."""
        return self._pool.num_free_blocks

    def num_blocks_of(self, key: str) -> int:
        """See `KvPool`."""
        return self._pool.num_blocks_of(key)

    def resize(self, key: str, num_blocks: int) -> None:
        """See `KvPool`."""
        self._pool.resize(key, num_blocks)
        self.changes.append(Resize(key, num_blocks))

    def compact(self, key: str, first: int, slots: Sequence[int]) -> None:
        """See `KvPool`."""
        self._pool.compact(key, first, slots)
        self.changes.append(Compact(key, first, slots))


class _SharedForwards:
    """A decoder and its attention backend, of which each forward is announced to the followers first.

    Once a forward has failed, nobody knows how far the others came in it: all later ones fail at once, and the engine's
    watch ends the process.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, group: Group) -> None:
        self.pool = _RecordedPool(backend.pool)
        self._decoder, self._backend, self._group = decoder, backend, group
        self._segments: Sequence[Segment] = ()
        self._is_lost = False

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """See `AttentionBackend`."""
        self._segments = segments
        return self._backend.plan(segments)

    def __call__(self, row: PackedRow) -> DecoderOutput:
        """See `Decoder`. Raises GroupLost after a forward that failed."""
        if self._is_lost:
            raise GroupLost("a forward has failed in a process that shares the model; only a new start helps")
        try:
            self._group.send(ForwardMessage(self.pool.changes, self._segments, row).encode())
            self.pool.changes.clear()
            return self._decoder(row)
        except BaseException:
            self._is_lost = True
            raise

    def cover(self, num_positions: int) -> None:
        """See `Decoder`."""
        self._decoder.cover(num_positions)

    def replace_linears(self, replace: ReplaceLinear) -> None:
        """Raise ModelRefused: the followers' weights would stay as they are."""
        raise ModelRefused("the weights of a model that several processes share cannot be quantised; use one process")
