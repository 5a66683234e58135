"""What drafters get of a target's observations, also of ones that nobody asked for."""

import pytest

from coordinator.observing import part_of
from specdec.exact.values import ObservationRequest, Observations

TOP = ObservationRequest(num_top_tokens=1)
LAYER = ObservationRequest(hidden_layers=(2,))


def test_each_drafter_gets_its_own_layers() -> None:
    whole = ObservationRequest(hidden_layers=(1, 2), num_top_tokens=2)
    seen = Observations(5, (b"aabb",), (b"12345678",))
    assert part_of(seen, whole, LAYER) == Observations(5, (b"bb",))
    assert part_of(seen, whole, TOP) == Observations(5, (), (b"1234",))


@pytest.mark.parametrize(("whole", "wanted", "seen"), [
    (TOP, TOP, Observations(5, (b"hidden",), (b"1234",))),
    (LAYER, LAYER, Observations(5, (b"bb",), (b"1234",))),
])  # fmt: skip
def test_what_nobody_asked_for_is_left_out(
    whole: ObservationRequest, wanted: ObservationRequest, seen: Observations
) -> None:
    part = part_of(seen, whole, wanted)
    assert part is not None
    assert (part.hidden_states, part.top_tokens) == (
        seen.hidden_states if wanted is LAYER else (),
        seen.top_tokens if wanted is TOP else (),
    )
