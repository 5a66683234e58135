"""Prompt lookup: what it finds, how it truncates, and the limit on what it holds."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafter import DraftResult
from draft_service.drafters.ngram import NgramDrafter, SuffixIndex
from draft_service.session_texts import CHUNK_TOKENS, SESSION_TOKENS
from specdec.drafting.request import DraftRequest
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams

texts = st.lists(st.integers(0, 3), max_size=40)


def index_of(text: Sequence[int], shortest: int = 1, longest: int = 4) -> SuffixIndex:
    """Return the index of a text."""
    index = SuffixIndex(shortest, longest)
    for token in text:
        index.append(token)
    return index


def looked_up(text: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    """Draft by the definition: scan for the longest suffix, the latest occurrence first."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for begin in range(len(text) - length - 1, -1, -1):
            if text[begin : begin + length] == text[len(text) - length :]:
                grown = list(text)
                for index in range(count):
                    grown.append(grown[begin + length + index])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 1], [1, 1, 1]),
        ([1, 2, 1], [2, 1, 2]),
        ([1, 2, 3, 9, 8, 1, 2], [3, 9, 8]),  # a pair is preferred to a single token
        ([2, 7, 1, 2, 8, 1, 2, 9, 2], [9, 2, 9]),  # of equal lengths, the latest
        ([1, 2, 3, 4, 5, 0, 2, 3, 4, 6, 1, 2, 3, 4], [5, 0, 2]),  # the longer, though earlier
    ],
)
def test_continuations_of_small_texts(text: list[int], expected: list[int]) -> None:
    assert index_of(text).continuation(3) == expected


@settings(deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_it_finds_what_a_scan_finds(text: list[int], shortest: int, more: int, count: int) -> None:
    index = index_of(text, shortest, shortest + more)
    assert index.continuation(count) == looked_up(text, shortest, shortest + more, count)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), texts), max_size=6))
def test_truncation_leaves_no_trace(edits: list[tuple[int, list[int]]]) -> None:
    """After any truncations and appends the index is the one of its text."""
    index = SuffixIndex(1, 4)
    text: list[int] = []
    for length, tokens in edits:
        index.truncate(length)
        text = [*text[:length], *tokens]
        for token in tokens:
            index.append(token)
        assert list(index.tokens) == text
        assert vars(index) == vars(index_of(text))
        assert index.continuation(5) == looked_up(text, 1, 4, 5)


async def ask(drafter: NgramDrafter, name: str, start: int, tokens: Sequence[int], count: int = 3) -> DraftResult:
    """Run one round."""
    return await drafter.propose(
        WorkerSession(name, 1, SamplingParams(seed=1), 0), DraftRequest(start, tokens, count), match=False
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), min_size=1, max_size=12)), max_size=6))
async def test_rounds_draft_from_the_current_text_only(rounds: list[tuple[int, list[int]]]) -> None:
    drafter = NgramDrafter(1, 4)
    text: list[int] = []
    for anywhere, tokens in rounds:
        start = anywhere % (len(text) + 2)  # at times more than it holds
        drafted = await ask(drafter, "s", start, tokens)
        if start > len(text):
            assert (drafted.cached_len, drafted.proposal.tokens) == (len(text), ())
            continue
        text = [*text[:start], *tokens]
        assert drafted.cached_len == len(text)
        assert list(drafted.proposal.tokens) == looked_up(text, 1, 4, 3)


async def test_a_long_text_is_taken_in_pieces() -> None:
    """Longer than one piece; every piece counts towards the limit."""
    text = [token * token % 1009 for token in range(5000)]
    drafted = await ask(NgramDrafter(1, 4), "s", 0, text)
    assert list(drafted.proposal.tokens) == index_of(text).continuation(3)


async def test_sessions_are_separate_and_forget_frees_them() -> None:
    drafter = NgramDrafter(1, 4)
    await ask(drafter, "a", 0, [1, 2, 3])
    assert (await ask(drafter, "b", 0, [1])).proposal.tokens == ()
    drafter.forget(WorkerSession("a", 1, SamplingParams(seed=1), 0))
    assert (await ask(drafter, "a", 3, [1])).cached_len == 0


async def test_the_least_recently_used_text_is_evicted() -> None:
    drafter = NgramDrafter(1, 4, max_held_tokens=1000)
    for name in ("a", "b", "a", "c"):
        await ask(drafter, name, 0, list(range(400)))
    assert (await ask(drafter, "b", 400, [1])).cached_len == 0, "forgotten"
    assert (await ask(drafter, "a", 400, [1])).cached_len == 401
    assert (await ask(drafter, "d", 0, list(range(5000)))).cached_len == 5000, "the last one always stays"


async def test_a_lost_text_is_not_held_until_it_comes_whole() -> None:
    drafter = NgramDrafter(1, 4)
    assert (await ask(drafter, "s", 5, [1])).cached_len == 0
    assert drafter.num_sessions == 0


async def test_many_short_texts_are_evicted() -> None:
    drafter = NgramDrafter(1, 4, max_held_tokens=1000)
    for number in range(1000):
        await ask(drafter, f"s{number}", 0, [])
    assert drafter.num_sessions <= 1000 // SESSION_TOKENS + 1


def test_longer_texts_than_it_may_hold_do_not_fit() -> None:
    assert NgramDrafter(1, 4, max_held_tokens=1000).model.context_length == 1000


async def test_other_work_runs_during_a_long_truncation() -> None:
    drafter = NgramDrafter(1, 4)
    await ask(drafter, "s", 0, [1] * (5 * CHUNK_TOKENS))
    num_turns = 0
    asking = asyncio.create_task(ask(drafter, "s", 0, [2]))
    while not asking.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= 5
    assert (await asking).cached_len == 1
