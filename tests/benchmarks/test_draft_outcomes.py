"""Outcomes of a round: ranked by the draft's own probabilities, and counted as rounds end."""

from pathlib import Path

import pytest
import torch

from benchmarks.draft_outcomes import Counts, Outcome, Player, ranked_outcomes
from tests.engine.tiny_models import ReferenceModel, load
from tests.support.architectures import build

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("probs", "likeliest"),
    [
        ([[0.99, 0.01, 0.0], [0.0, 0.99, 0.01]], Outcome(1, 1)),  # sure of its token: then the one after it
        ([[0.4, 0.05, 0.35], [0.0, 0.9, 0.1]], Outcome(1, 1)),
        ([[0.34, 0.33, 0.33], [0.01, 0.005, 0.0]], Outcome(0, 1)),  # unsure: its second choice instead
    ],
)
def test_outcomes_are_ranked_by_the_drafts_confidence(probs: list[list[float]], likeliest: Outcome) -> None:
    ranked = ranked_outcomes(torch.tensor(probs))
    assert ranked[0] == likeliest
    assert {outcome.num_accepted for outcome in ranked} == {0, 1}


def test_rounds_are_counted_by_the_rank_of_their_end() -> None:
    counts, ranked = Counts(1), [Outcome(0, 7), Outcome(1, 8)]
    for ended in (Outcome(0, 7), Outcome(1, 8), Outcome(1, 8), Outcome(0, 9)):
        counts.note(ranked, ended)
    assert (counts.share_within(1), counts.share_within(2)) == (0.25, 0.75)
    assert (counts.num_rounds, counts.num_tokens, counts.num_bets_won) == (4, 6, 2)


def test_rounds_write_the_targets_text(tmp_path: Path) -> None:
    """A draft that is the target wins each bet; another one loses some, and the text stays."""
    folders = [build("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    reference, expected = ReferenceModel(folders[0]), list(PROMPT)
    for _ in range(20):
        expected.append(int(reference.logits(expected)[-1].argmax()))
    for draft, wins in ((folders[0], True), (folders[1], False)):
        player, counts = Player(load(draft), load(folders[0]), PROMPT), Counts(3)
        while len(player.text) < len(expected):
            player.round(counts)
        player.close()
        assert player.text[: len(expected)] == expected
        assert (counts.num_bets_won == counts.num_rounds) == wins
        assert counts.num_fitting >= 0
