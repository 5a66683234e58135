"""Trees of chosen candidates, grown where acceptance is most likely, from what followed similar contexts.

Each earlier occurrence of the text's end votes for the token that followed it there, the more strongly the more tokens
it has in common with the text. After a vote's token its context is one token longer, so it votes for what followed
next, up to TOKENS_PER_MATCHING times as far as its context reached. A token's chance is its share of the votes, with
UNSEEN votes left for tokens that none of them names; those go to the successors that the caller knows, by rank.
A tree takes the K candidates with the highest products of chances down from the root (Oliaro et al. 2024,
"SuffixDecoding", section 3; the matching of Hu et al. 2024, "SAM Decoding").

No candidate is drawn, so each has a one-hot distribution: the order and the choice depend on the text alone.
Constants: tried on the demo target's own texts at temperature 0 and 1; each may be halved or doubled for less than 2 %.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from specdec.exact.values import Proposal, one_hot

TOKENS_PER_MATCHING = 4
UNSEEN = 8.0  # votes; an occurrence with m tokens in common has m * m
RANK_CHANCES = (0.45, 0.13, 0.07, 0.045, 0.03, 0.025, 0.02, 0.015)  # that a successor of this rank follows
MIN_CHANCE = 0.01  # a candidate below is never worth its place in the target's forward


class Continuation(NamedTuple):
    """What followed an occurrence of the text's end."""

    tokens: Sequence[int]
    num_matching: int  # tokens in common before it


class Guesses(NamedTuple):
    """A tree of candidates, best first, each with its chance to be accepted; N of each."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()  # positions, see specdec/exact/tree.py
    chances: Sequence[float] = ()

    @property
    def proposal(self) -> Proposal:
        """The same tree as it is proposed."""
        return Proposal(tuple(self.tokens), tuple(map(one_hot, self.tokens)), tuple(self.parents))


class Candidate(NamedTuple):
    """A token that may follow a position of the tree."""

    token: int
    chance: float  # to be accepted where its parent is
    continuations: list[Continuation]  # those that agree with the path up to it


Successors = Callable[[int], Sequence[int]]
"""Gives tokens that may follow a token, the most likely first; at most as many as RANK_CHANCES count."""


def no_successors(token: int) -> Sequence[int]:
    """Know none."""
    return ()


def reach(num_matching: int, num_tokens: int) -> int:
    """Return how many tokens an occurrence votes for, at most `num_tokens`."""
    return min(TOKENS_PER_MATCHING * num_matching, num_tokens)


def candidates(continuations: Iterable[Continuation], depth: int, successors: Sequence[int]) -> Iterable[Candidate]:
    """Return the tokens that may follow a position at `depth`, each once; `successors` are of its last token."""
    votes: dict[int, float] = {}
    agreeing: dict[int, list[Continuation]] = {}
    for continuation in continuations:
        if depth < len(continuation.tokens):
            token = continuation.tokens[depth]
            votes[token] = votes.get(token, 0.0) + (continuation.num_matching + depth) ** 2
            agreeing.setdefault(token, []).append(continuation)
    total = sum(votes.values()) + UNSEEN
    for token, chance in zip(successors, RANK_CHANCES, strict=False):
        votes[token] = votes.get(token, 0.0) + UNSEEN * chance
    return [Candidate(token, votes[token] / total, agreeing.get(token, [])) for token in votes]


def grow(
    continuations: list[Continuation], last: int, successors: Successors, num_tokens: int, stop_below: float = 0.0
) -> Proposal:
    """Return the tree of the `num_tokens` most promising candidates, as `most_promising` finds them."""
    return most_promising(continuations, last, successors, num_tokens, stop_below).proposal


def most_promising(
    continuations: list[Continuation], last: int, successors: Successors, num_tokens: int, stop_below: float = 0.0
) -> Guesses:
    """Return the `num_tokens` most promising candidates after a text that ends with `last`.

    Candidates with a chance below `stop_below` are left out, so that a tree is large where much of it will be accepted.
    Siblings are in the order of their chances, candidates of equal chance in the order in which they were found.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    waiting: list[tuple[float, int, int, int, Candidate]] = []  # least: -chance, order of arrival, parent, depth
    num_found, min_chance = 0, max(MIN_CHANCE, stop_below)

    def find(position: int, depth: int, chance: float, token: int, agreeing: list[Continuation]) -> None:
        nonlocal num_found
        for candidate in candidates(agreeing, depth, successors(token)):
            if chance * candidate.chance >= min_chance:
                heappush(waiting, (-chance * candidate.chance, num_found, position, depth, candidate))
                num_found += 1

    find(0, 0, 1.0, last, continuations)
    while waiting and len(tokens) < num_tokens:
        negative, _, parent, depth, candidate = heappop(waiting)
        tokens.append(candidate.token)
        parents.append(parent)
        chances.append(-negative)
        find(len(tokens), depth + 1, -negative, candidate.token, candidate.continuations)
    return Guesses(tokens, parents, chances)
