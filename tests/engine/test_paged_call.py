"""Texts in parts give what the whole texts give, whatever their lengths, and see nothing of what others hold."""

from typing import Any

import pytest
import torch

from specdec.engine.paged_call import MAX_PART_ROWS, MAX_PARTS, WHOLE_PAGES, DividedChains, PagedCall, num_parts
from specdec.engine.paged_pool import LayerPages
from specdec.engine.pool import LayerShape
from specdec.engine.varlen import Attended, masked_attention, varlen_attn

HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE = 6, 2, 8, 4
PAGE_TOKENS, SCALING = 4, 0.6
# queries of each entry, and tokens that are cached of it, those queries included
CHAINS = [
    [(1, 1), (1, 3), (1, 4), (1, 5), (1, 16), (1, 39)],
    # texts of no tokens, parts' ends within a chain and just before one, and no query
    [(3, 3), (6, 7), (1, 1), (5, 18), (2, 14), (3, 19), (4, 24), (0, 1), (2, 40)],
]


class Entries:
    """Random entries of a paged cache, whose other pages hold no numbers, and what whole texts give for each."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self._pages = iter((torch.randperm(69, generator=self._generator) + 1).tolist())
        self._tables = torch.zeros(len(lengths), 10, dtype=torch.int32)
        self.layer = LayerPages(LayerShape(KV_HEADS, KEY_SIZE, VALUE_SIZE), 70, PAGE_TOKENS, torch.float32, "cpu")
        self.layer.keys.fill_(torch.nan)  # what other sequences hold
        self.layer.values.fill_(torch.nan)
        entries = [self._entry(table, *numbers) for table, numbers in zip(self._tables, lengths, strict=True)]
        self.query, self.key, self.value, self.output, self.lse = map(torch.cat, zip(*entries, strict=True))

    def call(self) -> PagedCall:
        cu_q, cu_k = (torch.tensor([0, *numbers]).cumsum(0).int() for numbers in zip(*self.lengths, strict=True))
        used = torch.tensor([num_keys for _, num_keys in self.lengths], dtype=torch.int32)
        return PagedCall(cu_q, cu_k, used, self._tables, max(num_queries for num_queries, _ in self.lengths))

    def _entry(self, table: torch.Tensor, num_queries: int, num_keys: int) -> tuple[torch.Tensor, ...]:
        query, key, value = (
            torch.randn(*shape, generator=self._generator)
            for shape in (
                (num_queries, HEADS, KEY_SIZE),
                (num_keys, KV_HEADS, KEY_SIZE),
                (num_keys, KV_HEADS, VALUE_SIZE),
            )
        )
        slots = torch.arange(num_keys)
        table[: -(-num_keys // PAGE_TOKENS)] = torch.tensor([next(self._pages) for _ in slots[::PAGE_TOKENS]])
        self.layer.store(table.long()[slots // PAGE_TOKENS] * PAGE_TOKENS + slots % PAGE_TOKENS, key, value)
        first = num_keys - num_queries
        seen = slots <= torch.arange(first, num_keys)[:, None]
        whole = masked_attention(query[None], key[None], value[None], seen[None], scale=SCALING, softcap=None)
        return query, key[first:], value[first:], whole[0][0], whole[1][0]

    def forget(self, entry: int) -> None:
        """Let what is stored of an entry be no numbers."""
        own = self._tables[entry, : -(-self.lengths[entry][1] // PAGE_TOKENS)].long()
        self.layer.keys[own] = torch.nan
        self.layer.values[own] = torch.nan

    def attend(self, count: int) -> Attended:
        """Attend to the texts in so many parts."""
        chains = DividedChains(self.call(), count, len(self.query), PAGE_TOKENS)
        return chains.attend(self.query, self.key, self.value, self.layer, SCALING, wants_lse=True)


@pytest.fixture(autouse=True)
def within_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's function for GPUs reads as many tokens as it is told, also past the end of a part's row of the table."""

    def checked(*given: Any, **options: Any) -> Any:
        if (tables := options.get("block_table")) is not None:
            assert int(options["seqused_k"].max()) <= tables.shape[1] * PAGE_TOKENS
        return varlen_attn(*given, **options)

    monkeypatch.setattr("specdec.engine.paged_call.varlen_attn", checked)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("lengths", CHAINS, ids=["single tokens", "chains"])
def test_parts_give_what_whole_texts_give(lengths: list[tuple[int, int]], count: int) -> None:
    entries = Entries(lengths, seed=count)
    output, lse = entries.attend(count)
    torch.testing.assert_close(output, entries.output)
    torch.testing.assert_close(lse, entries.lse)


@pytest.mark.parametrize("lengths", CHAINS, ids=["single tokens", "chains"])
def test_an_entry_sees_nothing_of_the_others(lengths: list[tuple[int, int]]) -> None:
    for forgotten in range(len(lengths)):
        entries = Entries(lengths, seed=forgotten)
        entries.forget(forgotten)
        output, lse = entries.attend(4)
        first = sum(num_queries for num_queries, _ in lengths[:forgotten])
        others = torch.ones(len(output), dtype=torch.bool)
        others[first : first + lengths[forgotten][0]] = False
        torch.testing.assert_close(output[others], entries.output[others])
        torch.testing.assert_close(lse[others], entries.lse[others])


def test_long_texts_of_few_tokens_have_many_parts() -> None:
    assert num_parts(WHOLE_PAGES, 1) == 1
    assert [num_parts(pages, 1) for pages in (WHOLE_PAGES + 1, 16, 31, 32, 1000)] == [4, 8, 8, 16, MAX_PARTS]
    assert num_parts(1000, MAX_PART_ROWS + 1) == 1


def test_parts_multiply_tokens_to_a_limit() -> None:
    for num_rows in range(MAX_PART_ROWS):
        count = num_parts(1000, num_rows)
        assert count & (count - 1) == 0
        assert count * num_rows <= MAX_PART_ROWS
