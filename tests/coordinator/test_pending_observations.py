"""What a drafter has not asked for yet is kept, but no more than a message holds."""

import pytest

from coordinator.draft import MAX_PENDING_BYTES, MAX_PENDING_OBSERVATIONS, DraftLimits, SessionDrafter
from specdec.channel import MAX_MESSAGE_BYTES
from specdec.errors import SpecdecError
from specdec.exact.values import ObservationRequest, Observations


def raised(error: SpecdecError) -> None:
    """Fail: nothing is asked for here."""
    raise error


@pytest.mark.parametrize(("token_bytes", "kept"), [(8, MAX_PENDING_OBSERVATIONS), (2 * 8 * 8192, 64)])
def test_pending_observations_fit_into_a_message(token_bytes: int, kept: int) -> None:
    asked = ObservationRequest(hidden_layers=(1,))
    drafter = SessionDrafter(None, DraftLimits(10, wanted=asked, observed=asked), raised)  # type: ignore[arg-type]
    for start in range(0, 1000, 100):
        drafter.observe(Observations(start, tuple(bytes(token_bytes) for _ in range(100))))
    pending = drafter._observations
    assert pending
    assert (len(pending), pending.end) == (kept, 1000)
    assert kept * token_bytes <= MAX_PENDING_BYTES <= MAX_MESSAGE_BYTES // 2
