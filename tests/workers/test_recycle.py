"""Recycling: reports of the target become siblings, are taken back with their text, and are shared with care."""

import struct
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.recycle import MAX_SHARED_TABLES, RecycleDrafter, RecycledText
from specdec.drafting.request import DraftRequest
from specdec.drafting.successors import SessionSuccessors, SharedTable
from specdec.exact.tree import children_of
from specdec.exact.values import Observations, Proposal, one_hot
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams


def session(name: str, seed: int = 1, target: str = "target", temperature: float = 1.0) -> WorkerSession:
    """Return a session."""
    return WorkerSession(name, 1, SamplingParams(seed=seed, temperature=temperature), 0, target)


def report(*tokens: int) -> bytes:
    """Return what the target sends."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


async def ask(
    drafter: RecycleDrafter,
    asking: WorkerSession,
    start: int,
    tokens: Sequence[int],
    count: int = 4,
    observations: Observations | None = None,
) -> Proposal:
    """Play one round."""
    request = DraftRequest(start, tokens, count, observations)
    return (await drafter.propose(asking, request, match=False)).proposal


def observed(start: int, *reports: bytes) -> Observations:
    """Return observations from a position on."""
    return Observations(start, top_tokens=reports)


def roots(proposal: Proposal) -> list[int]:
    """Return the tokens that follow the text."""
    return [proposal.tokens[child] for child in children_of(proposal.tree)[0]]


async def test_reported_tokens_become_siblings() -> None:
    drafter = RecycleDrafter()
    assert await ask(drafter, session("s"), 0, [1, 2]) == Proposal(), "nothing is known yet"
    reports = observed(0, report(2, 8, 9), report(7, 1))
    proposal = await ask(drafter, session("s"), 2, [1], 32, reports)
    assert roots(proposal) == [2, 8, 9], "what was reported after 1; 2 followed it, too, and is there once"
    assert {7, 1} <= set(proposal.tokens), "and along the way what was reported after 2"
    assert proposal.distributions == tuple(map(one_hot, proposal.tokens))


async def test_lookup_and_successors_are_joined() -> None:
    drafter = RecycleDrafter()
    text = [5, 6, 7, 30, 31, 32, 33, 5, 6, 7]
    proposal = await ask(drafter, session("s"), 0, text, 32, observed(2, report(40, 41), report(31, 42)))
    children = children_of(proposal.tree)
    assert roots(proposal)[0] == 30, "what followed before is the first branch"
    assert set(roots(proposal)) == {30, 40, 41}, "what was reported stands beside it"
    assert [proposal.tokens[child] for child in children[proposal.tokens.index(30) + 1]] == [31, 42], "and along it"


async def test_the_budget_is_the_number_of_tokens() -> None:
    drafter = RecycleDrafter()
    reports = observed(0, *(report(*(token for token in range(8) if token != before)) for before in range(8)))
    await ask(drafter, session("s"), 0, list(range(8)), 0, reports)
    for count in (1, 5, 32):
        assert len(await ask(drafter, session("s"), 8, [], count)) == count


async def test_reports_leave_with_their_tokens() -> None:
    """Tokens that were never committed must not influence the round that is played again in their place."""
    drafter = RecycleDrafter(shares=False)
    await ask(drafter, session("s"), 0, [1, 2, 1], 4, observed(0, report(50), report(51), report(60)))
    assert roots(await ask(drafter, session("s"), 3, [], 4)) == [60, 2]
    assert roots(await ask(drafter, session("s"), 2, [3, 1], 4)) == [50, 2]


edits = st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 3)), max_size=6)


@settings(deadline=None)
@given(edits)
def test_the_latest_report_of_the_current_text_counts(edits: list[tuple[int, list[int], int]]) -> None:
    """Reports may come late, with gaps, and twice."""
    text, tokens, known = RecycledText(), list[int](), dict[int, bytes]()
    for number, (length, more, gap) in enumerate(edits):
        text.truncate(length)
        tokens = [*tokens[:length], *more]
        known = {position: top for position, top in known.items() if position < length}
        for token in more:
            text.append(token)
        for position in [*range(gap, len(tokens))] * 2:
            text.report(position, report(number))
            if position > max(known, default=-1):
                known[position] = report(number)
        for token in range(4):
            reports = [top for position, top in sorted(known.items()) if tokens[position] == token]
            assert text.successors(token) == (reports[-1] if reports else None)


async def test_malformed_reports_are_cut() -> None:
    """A worker that sends half a number, or more than was asked for, harms nobody."""
    drafter = RecycleDrafter()
    await ask(drafter, session("s"), 0, [1, 2], 0, observed(0, report(*range(10, 30)), report(7)[:3]))
    assert len(roots(await ask(drafter, session("s"), 2, [1], 32))) == 9, "eight successors, and what followed"
    assert roots(await ask(drafter, session("s"), 2, [2], 32)) == [2], "only what followed"


# ---- sharing


async def taught(shares: bool = True, **teacher: object) -> RecycleDrafter:
    """Return a drafter that another session taught that 9 follows 1."""
    drafter = RecycleDrafter(shares)
    values = {"name": "teacher", "seed": 7} | teacher
    await ask(drafter, session(**values), 0, [1], 0, observed(0, report(9)))  # type: ignore[arg-type]
    return drafter


def greedy(name: str, seed: int = 1, target: str = "target") -> WorkerSession:
    """Return a session that no draw judges."""
    return session(name, seed, target, temperature=0.0)


async def test_greedy_sessions_of_one_target_share() -> None:
    assert roots(await ask(await taught(), greedy("s"), 0, [1])) == [9]
    assert roots(await ask(await taught(), greedy("s", target="other"), 0, [1])) == []
    assert roots(await ask(await taught(target=""), greedy("s", target=""), 0, [1])) == [], "an unknown target"
    assert roots(await ask(await taught(shares=False), greedy("s"), 0, [1])) == []


async def test_sampled_sessions_read_nothing_of_others() -> None:
    """Not even of other seeds: what those were told of may have been drafted from what this one's draws left."""
    for seed, temperature in ((1, 1.0), (2, 1.0), (1, 0.0)):
        drafter = await taught(seed=seed, temperature=temperature)
        assert roots(await ask(drafter, session("s", seed=1), 0, [1])) == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=12),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_what_truncation_leaves_depends_on_nothing_behind_it(
    reports: list[tuple[int, int]], length: int, max_log: int, max_tokens: int
) -> None:
    """However little is kept: it is all that was known there, or nothing."""
    kept, known = SessionSuccessors(max_log, max_tokens), SessionSuccessors(max_log, max_tokens)
    for position, (token, top) in enumerate(reports):
        kept.report(position, token, report(top))
        if position < length:
            known.report(position, token, report(top))
    kept.truncate(length)
    assert [kept.of(token) for token in range(6)] in ([known.of(token) for token in range(6)], [None] * 6)


async def test_tables_are_bounded() -> None:
    table = SharedTable(max_tokens=2)
    for token in range(4):
        table.report(token, report(9))
    assert [table.of(token) is not None for token in range(4)] == [True, True, False, False]
    drafter = await taught()
    for number in range(MAX_SHARED_TABLES):
        await ask(drafter, greedy("s", target=f"target {number}"), 0, [1])
    assert roots(await ask(drafter, greedy("t"), 0, [1])) == [], "the least recently used target is forgotten"
