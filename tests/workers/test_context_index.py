"""Matches of contexts: what a naive scan finds, after any appends and truncations, and in several texts at once."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.context_index import CONTEXT_TOKENS, ContextIndex, Match

tokens = st.integers(0, 3) | st.just(2**32 - 2)
texts = st.lists(tokens, max_size=60)
edits = st.lists(st.tuples(st.integers(0, 60), texts), max_size=6)


def index_of(text: Sequence[int]) -> ContextIndex:
    """Return the index of one text, token by token."""
    index = ContextIndex()
    for token in text:
        index.append(token)
    return index


def scanned(text: Sequence[int], context: Sequence[int]) -> list[Match]:
    """Find by definition: compare the tokens before each position with a context."""
    found = []
    for position in range(1, len(text)):
        count = 0
        while count < min(CONTEXT_TOKENS, position, len(context)) and text[position - 1 - count] == context[-1 - count]:
            count += 1
        if count:
            found.append(Match(position, count))
    return found


def lengths(matches: Sequence[Match]) -> list[int]:
    """Return how long matches are, the longest first."""
    return sorted((match.num_tokens for match in matches), reverse=True)


@settings(deadline=None)
@given(edits, st.integers(1, 70))
def test_it_finds_what_a_scan_finds(edits: list[tuple[int, list[int]]], count: int) -> None:
    index, text = ContextIndex(), list[int]()
    for length, more in edits:
        index.truncate(length)
        text = [*text[:length], *more]
        for token in more:
            index.append(token)
        assert list(index.tokens) == text
        wanted, found = scanned(text, text), index.matches(index.context(), count)
        assert set(found) <= set(wanted)
        assert [match.num_tokens for match in found] == lengths(wanted)[:count], "the longest, best first"
        assert len(set(found)) == len(found)


@settings(deadline=None)
@given(edits)
def test_truncation_leaves_no_trace(edits: list[tuple[int, list[int]]]) -> None:
    index, text = ContextIndex(), list[int]()
    for length, more in edits:
        index.truncate(length)
        text = [*text[:length], *more]
        for token in more:
            index.append(token)
        fresh = index_of(text)
        assert index.context() == fresh.context()
        assert index.matches(index.context(), 100) == fresh.matches(fresh.context(), 100)


@settings(deadline=None)
@given(st.lists(texts, max_size=5), texts)
def test_texts_sorted_at_once_equal_texts_appended(several: list[list[int]], looked_up: list[int]) -> None:
    at_once, appended = ContextIndex.of(several), ContextIndex()
    for text in several:
        for token in text:
            appended.append(token)
        appended.end_text()
    context = index_of(looked_up).context()
    assert at_once.matches(context, 1000) == appended.matches(context, 1000)


@settings(deadline=None)
@given(st.lists(texts, max_size=5), texts, st.integers(1, 9))
def test_matches_stay_within_their_text(several: list[list[int]], looked_up: list[int], count: int) -> None:
    """Neither the tokens in common nor those that follow reach into the text before or after."""
    index = ContextIndex.of(several)
    found = index.matches(index_of(looked_up).context(), 1000)
    wanted = [
        (match.num_tokens, text[match.position : match.position + count])
        for text in several
        for match in scanned(text, looked_up)
    ]
    assert sorted((match.num_tokens, list(index.following(match.position, count))) for match in found) == sorted(wanted)


def test_the_latest_of_equal_matches_is_first() -> None:
    text = [1, 2, 3, *range(10, 50), 5, *range(10, 50), 7, *range(10, 50)]
    index = index_of(text)
    assert [index.tokens[match.position] for match in index.matches(index.context(), 2)] == [7, 5]


def test_a_loop_is_continued_as_a_loop() -> None:
    index = index_of([9, 1, 2, 1, 2])
    (match,) = index.matches(index.context(), 1)
    assert list(index.repeating(match.position, 5)) == [1, 2, 1, 2, 1]
    assert list(index.following(match.position, 5)) == [1, 2]
