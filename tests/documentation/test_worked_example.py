"""docs/concepts.md: each number of its example is what production code computes, in fractions."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specdec.exact.acceptance import Block, BlockRule, Remainder, TokenRule
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution

PAGE = (Path(__file__).parents[2] / "docs/concepts.md").read_text()
VOCABULARY = "abcd"
TABLES = [
    [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].splitlines()]
    for match in re.finditer(r"(?:^\|.*\n)+", PAGE, re.M)
]


def fractions(cells: Sequence[str]) -> list[Fraction]:
    return [Fraction(cell) for cell in cells if cell not in ("", "-")]


(SPARSE, ONE_HOT) = [{row[0]: row[1:] for row in table} for table in TABLES if table[0][1:] == list(VOCABULARY)]
(TREE,) = [table[2:] for table in TABLES if table[0][0] == "child"]
(CHAINS,) = [table[2:] for table in TABLES if table[0][0] == "drafted"]
TARGET = fractions(SPARSE["p, the target"])


def draft_of(table: dict[str, list[str]]) -> SparseDistribution:
    probs: list[Any] = fractions(table["q, as shipped"])
    support = tuple(token for token, prob in enumerate(probs) if prob)
    return SparseDistribution(support, tuple(probs[token] for token in support))


def target_on(support: Sequence[int], tail_token: int = 3) -> TargetDistribution:
    """Return the target's answer for a support."""
    probs: Any = tuple(TARGET[token] for token in support)
    return TargetDistribution(probs, 1 - sum(probs), tail_token)


@pytest.mark.parametrize("table", [SPARSE, ONE_HOT], ids=["sparse", "one-hot"])
def test_one_position_is_as_computed(table: dict[str, list[str]]) -> None:
    draft = draft_of(table)
    remainder = Remainder.at(draft.token_ids, target_on(draft.token_ids))
    accepted: list[Any] = [Fraction(0)] * 4
    recovered, thresholds = accepted.copy(), []
    for token, prob in zip(draft.token_ids, draft.probs, strict=True):
        thresholds.append(min(1, remainder.threshold(token, draft)))
        accepted[token] = prob * thresholds[-1]
    residual = remainder.after_rejecting(draft)
    rejected = 1 - sum(accepted)
    tail = sum(TARGET[token] for token in range(4) if token not in draft.token_ids)
    for token in range(4):
        if token in draft.token_ids:
            weight = residual.weights[draft.token_ids.index(token)]
        else:
            weight = residual.tail_mass * TARGET[token] / tail
        recovered[token] = rejected * weight / residual.total
    assert fractions(table["p, the target"]) == TARGET
    assert fractions(table["accepted if drafted"]) == thresholds
    assert fractions(table["min(p, q): drafted and accepted"]) == accepted
    assert fractions(table["max(0, p - q): rejected and recovered"]) == recovered
    committed = [a + r for a, r in zip(accepted, recovered, strict=True)]
    assert fractions(table["committed"]) == committed == TARGET


def test_sentences_between_the_tables_are_as_computed() -> None:
    draft = draft_of(SPARSE)
    target: Any = target_on(draft.token_ids)
    residual: Any = Remainder.at(draft.token_ids, target).after_rejecting(draft)
    b, tail = residual.weights[1] / residual.total, residual.tail_mass / residual.total
    c, d = (TARGET[token] / target.tail_mass for token in (2, 3))
    chosen = sum(TARGET[:2])
    for sentence in (
        f"sends 1/2, 3/10 and T = {TARGET[2]} + {TARGET[3]} = {target.tail_mass}.",
        f"R is 1 - {1 - residual.total} = {residual.total}.",
        f"b is drawn with {residual.weights[1]} of {residual.total}, that is {b}, and the tail token with {tail};",
        f"it is c with {c} and d with {d}.",
        f"{residual.total} x {tail} x {c} = {residual.total * tail * c}, as p has it",
        f"{TARGET[0]} + {TARGET[1]} = {chosen}, the sum of the target's own probabilities. What remains, {1 - chosen},",
    ):
        assert sentence in " ".join(PAGE.split())


def test_a_tree_of_two_is_as_computed() -> None:
    children = [VOCABULARY.index(row[0]) for row in TREE]
    certain: Any = (Fraction(1),)
    drafts = tuple(SparseDistribution((child,), certain) for child in children)
    proposal = Proposal(tuple(children), drafts, (0, 0))
    leaf = TargetDistribution((), 1, 3)
    scores = Scores((target_on(children), leaf, leaf))
    thresholds = TokenRule().thresholds(proposal, scores).accept
    left: Any = Fraction(1)
    for row, threshold in zip(TREE, thresholds, strict=True):
        assert fractions(row[1:]) == [left, threshold, left * threshold]
        left -= left * threshold


def expected_accepted(probabilities: Sequence[Fraction]) -> Fraction:
    """Return 1 P(one) + 2 P(two)."""
    return probabilities[0] + 2 * probabilities[1]


def test_chains_are_as_computed() -> None:
    draft = draft_of(SPARSE)
    scores = Scores((target_on(draft.token_ids), target_on(draft.token_ids), TargetDistribution((), 1, 3)))
    totals = [Fraction(0)] * 2
    for row, (first, second) in zip(CHAINS, product((0, 1), repeat=2), strict=False):
        proposal = Proposal((first, second), (draft, draft))
        probability = Fraction(draft.probs[first]) * Fraction(draft.probs[second])
        t = [min(Fraction(1), Fraction(value)) for value in TokenRule().thresholds(proposal, scores).accept]
        h = [Fraction(value) for value in BlockRule().thresholds(proposal, scores).accept]
        assert h == Block.at(0, proposal, scores, proposal.children()).thresholds()
        by_token = expected_accepted([t[0] * (1 - t[1]), t[0] * t[1]])
        by_block = expected_accepted([(1 - h[1]) * h[0], h[1]])
        assert row[0] == f"{VOCABULARY[first]} {VOCABULARY[second]}"
        assert fractions(row[1:]) == [probability, by_token, t[0], *h, by_block]
        totals = [totals[0] + probability * by_token, totals[1] + probability * by_block]
    assert fractions(CHAINS[-1][1:]) == [1, *totals]
    assert f"accepts {float(totals[0]):.2f} tokens of two on average, the block rule {float(totals[1]):.2f}." in PAGE
