"""What a drafter is asked for in a round."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafting.candidate_tree import Guesses
from specdec.exact.values import Observations


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One round to draft for: truncate to `start`, append `tokens`, then draft at most `num_draft_tokens`."""

    start: int
    tokens: Sequence[int]
    num_draft_tokens: int
    observations: Observations | None = None  # at committed tokens, where the drafter asked for them; may be lost
    stop_below: float = 0.0  # it may stop before a token with less chance of being accepted, decided before the draw
    prefix_digest: bytes | None = None  # of the first `start` tokens, to be proved; None: a request of the worker's own
    guesses: Guesses = Guesses()  # noqa: RUF009  # immutable; what is known without a model, to be joined with its own

    @property
    def committed_length(self) -> int:
        """Tokens committed when the round began."""
        return self.start + len(self.tokens)
