"""Which cached tokens a sequence keeps when the next round begins."""

from array import array

import pytest
import torch

from specdec.engine import CacheMiss, ContiguousPool, EngineError, KvCache, LayerShape
from specdec.exact.prefix import chain


class Texts:
    """A sequence whose keys and values are its token ids, so that a wrong copy is visible."""

    def __init__(self) -> None:
        self.pool = ContiguousPool([LayerShape(1, 2, 1), LayerShape(1, 2, 1)], num_bytes=1 << 14, block_tokens=4)
        self.cache = KvCache(self.pool)
        self.sequence = self.cache.open("a")

    def append(self, tokens: list[int], parents: tuple[int, ...] = (), num_committed: int | None = None) -> None:
        """Append tokens and write their keys and values, as a forward does."""
        sequence = self.sequence
        if num_committed is not None:
            sequence.mark_committed(num_committed)
        sequence.reserve(sequence.length + len(tokens))
        first = self.pool.first_slot(sequence.key) + sequence.length
        for layer in self.pool.layers:
            layer.keys[first : first + len(tokens), 0, 0] = torch.tensor(tokens, dtype=torch.float32)
            layer.values[first : first + len(tokens), 0, 0] = -torch.tensor(tokens, dtype=torch.float32)
        sequence.append(tokens, parents)

    def resume(
        self,
        start: int,
        tokens: list[int],
        min_fed: int = 1,
        match: bool = False,
        num_committed: int | None = None,
        on_draft: bool = False,
    ) -> list[int]:
        """Resume; all tokens count as committed unless `num_committed` is given."""
        committed = start + len(tokens) if num_committed is None else num_committed
        return self.sequence.resume(
            start, tokens, num_committed=committed, min_fed=min_fed, match=match, on_draft=on_draft
        )

    @property
    def contents(self) -> list[int]:
        """The token ids read from keys and values; they must equal the sequence's tokens."""
        if not self.sequence.length:
            return []
        linear = self.sequence.num_linear
        assert self.sequence.prefix_digest(linear) == chain(b"", self.sequence.tokens[:linear])
        first = self.pool.first_slot(self.sequence.key)
        rows = slice(first, first + self.sequence.length)
        for layer in self.pool.layers:
            assert layer.keys[rows, 0, 0].tolist() == list(self.sequence.tokens)
            assert layer.values[rows, 0, 0].tolist() == [-token for token in self.sequence.tokens]
        return list(self.sequence.tokens)


@pytest.fixture
def texts() -> Texts:
    return Texts()


# 10 ─ 11 ─ 12 ┬ 20 ┬ 30 ─ 40
#              │    └ 31 ─ 41
#              └ 21 ─ 30
TREE = [20, 21, 30, 31, 30, 40, 41]
PARENTS = (0, 0, 1, 1, 2, 3, 4)


def with_tree(texts: Texts) -> None:
    texts.append([10, 11])
    texts.append([12, *TREE], PARENTS, num_committed=3)


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([99], []),
        ([20, 99], [20]),
        ([21, 99], [21]),
        ([20, 31, 41, 99], [20, 31, 41]),
        ([20, 30, 40, 99], [20, 30, 40]),
        ([21, 30, 99], [21, 30]),
        ([21, 30, 40], [21, 30]),
        ([20, 30, 40], [20, 30]),  # at least one token is fed
    ],
)
def test_accepted_path_is_kept(texts: Texts, tokens: list[int], kept: list[int]) -> None:
    with_tree(texts)
    assert texts.resume(3, tokens) == tokens[len(kept) :]
    assert texts.contents == [10, 11, 12, *kept]
    assert (texts.sequence.num_committed, texts.sequence.parents) == (3 + len(tokens), ())


def test_accepted_chain_is_kept(texts: Texts) -> None:
    texts.append([10, 11, 12], num_committed=3)
    for token in (20, 30, 40):
        texts.append([token])
    assert texts.sequence.parents == (0, 1, 2)
    assert texts.resume(3, [20, 30, 99]) == [99]
    assert texts.contents == [10, 11, 12, 20, 30]


def test_equal_siblings_keep_the_longer_path(texts: Texts) -> None:
    texts.append([10, 20, 20, 30], (0, 0, 2), num_committed=1)
    assert texts.resume(1, [20, 30, 99]) == [99]
    assert texts.contents == [10, 20, 30]


def test_rows_are_fed_even_if_cached(texts: Texts) -> None:
    texts.append([10, 11, 12, 13], num_committed=4)
    assert texts.resume(4, [], min_fed=2) == [12, 13]
    assert texts.contents == [10, 11]


def test_start_before_the_tree_truncates(texts: Texts) -> None:
    with_tree(texts)
    assert texts.resume(1, [11, 12, 20]) == [11, 12, 20]
    assert texts.contents == [10]


def test_other_tokens_before_start_are_a_miss_of_all(texts: Texts) -> None:
    with_tree(texts)
    sequence = texts.sequence
    for digest in (chain(b"", [10, 11, 13]), chain(b"", [10, 11]), b""):
        with pytest.raises(CacheMiss) as caught:
            sequence.resume(3, [20, 99], num_committed=5, prefix_digest=digest)
        assert caught.value.cached_len == 0
    assert sequence.resume(3, [21, 99], num_committed=5, min_fed=1, prefix_digest=chain(b"", [10, 11, 12])) == [99]
    texts.append([99])
    digest = chain(b"", [10, 11, 12, 21, 99])
    assert sequence.resume(5, [7], num_committed=6, min_fed=1, prefix_digest=digest) == [7]


def test_matching_keeps_the_common_prefix(texts: Texts) -> None:
    with_tree(texts)
    assert texts.resume(0, [10, 11, 12, 21, 99], match=True) == [99]
    assert texts.contents == [10, 11, 12, 21]
    assert texts.resume(1, [11, 13, 14], match=True) == [13, 14]
    assert texts.contents == [10, 11]


def test_start_within_a_chain_truncates(texts: Texts) -> None:
    texts.append([10, 20, 30, 40], num_committed=1)
    assert texts.resume(2, [30, 99], num_committed=1, on_draft=True) == [30, 99]
    assert (texts.contents, texts.sequence.parents) == ([10, 20], (0,))


def test_drafting_ahead_keeps_the_pending_tree(texts: Texts) -> None:
    """A worker that drafts ahead extends its draft; the next round can still accept all of it."""
    texts.append([10, 20, 30], num_committed=1)
    assert texts.resume(3, [40], num_committed=1, on_draft=True) == [40]
    texts.append([40, 50, 60])
    assert texts.resume(1, [20, 30, 40, 50, 99]) == [99]
    assert texts.contents == [10, 20, 30, 40, 50]


def test_missing_prefix_is_reported(texts: Texts) -> None:
    texts.append([10, 11, 20], num_committed=2)
    with pytest.raises(CacheMiss) as missed:
        texts.resume(4, [12])
    assert missed.value.cached_len == 2, "20 is a draft token"
    assert texts.contents == [10, 11, 20]


def test_draft_tokens_do_not_count_as_prefix(texts: Texts) -> None:
    """A late message may have left a draft that was never accepted."""
    texts.append([10, 11, 20, 30], num_committed=2)
    with pytest.raises(CacheMiss) as missed:
        texts.resume(3, [31])
    assert missed.value.cached_len == 2
    assert texts.resume(2, [20, 31]) == [31], "what is repeated is compared, and kept"
    assert texts.contents == [10, 11, 20]


def test_branches_do_not_count_as_prefix(texts: Texts) -> None:
    with_tree(texts)
    assert texts.sequence.num_linear == 4
    with pytest.raises(CacheMiss) as missed:
        texts.resume(5, [99], on_draft=True)
    assert missed.value.cached_len == 3


class TestRepeatedMessage:
    """A repeated message feeds the same tokens onto the same cached prefix."""

    def test_keeps_the_same_prefix(self, texts: Texts) -> None:
        with_tree(texts)
        for _ in range(3):
            assert texts.resume(3, [20, 31, 50], min_fed=1) == [50]
            assert texts.contents == [10, 11, 12, 20, 31]
            texts.append([50, 60, 61], (0, 0))

    def test_first_message_is_fed_again_in_full(self, texts: Texts) -> None:
        for _ in range(2):
            assert texts.resume(0, [10, 11, 12]) == [10, 11, 12]
            texts.append([10, 11, 12, 20, 30])

    def test_same_tokens_after_a_failed_round(self, texts: Texts) -> None:
        with_tree(texts)
        for _ in range(2):
            assert texts.resume(3, [20, 99]) == [99]
            texts.sequence.truncate(texts.sequence.length)

    def test_other_tokens_are_not_kept(self, texts: Texts) -> None:
        with_tree(texts)
        texts.resume(3, [20, 31, 50])
        texts.append([50])
        assert texts.resume(3, [20, 30, 50]) == [30, 50]
        assert texts.contents == [10, 11, 12, 20]


def test_truncation_drops_tokens_and_tree(texts: Texts) -> None:
    with_tree(texts)
    texts.sequence.truncate(5)
    assert (texts.contents, texts.sequence.parents) == ([10, 11, 12, 20, 21], (0, 0))
    texts.sequence.truncate(2)
    assert (texts.contents, texts.sequence.parents, texts.sequence.num_committed) == ([10, 11], (), 2)
    texts.sequence.close()
    assert (texts.sequence.tokens, texts.sequence.num_committed) == (array("I"), 0)


def test_eviction_drops_tokens_and_tree(texts: Texts) -> None:
    with_tree(texts)
    texts.cache.open("b").reserve(texts.cache.num_tokens)
    assert (texts.sequence.length, texts.sequence.parents) == (0, ())
    with pytest.raises(CacheMiss):
        texts.resume(3, [20])


def test_appending_after_branches_is_refused(texts: Texts) -> None:
    with_tree(texts)
    with pytest.raises(EngineError, match="branches"):
        texts.append([1])
    with pytest.raises(EngineError, match="branches"):
        texts.sequence.mark_committed(1)


@pytest.mark.parametrize(("tokens", "parents"), [([1], (0,)), ([1], (0, 0)), ([5, 1, 2], (0, 0))])
def test_trees_need_a_committed_root(texts: Texts, tokens: list[int], parents: tuple[int, ...]) -> None:
    texts.sequence.mark_committed(2)
    with pytest.raises(EngineError, match="hangs from"):
        texts.sequence.check_append(tokens, parents)


def test_appending_needs_a_reservation(texts: Texts) -> None:
    with pytest.raises(EngineError, match="reserve it first"):
        texts.sequence.append([1])
