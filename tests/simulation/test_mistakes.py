"""The simulation finds each planted mistake near a seed that found it before."""

import pytest

from tests.simulation.mistakes import MISTAKES, Mistake, replaced
from tests.simulation.world import run_world

MARGIN = 150  # seeds after the one that found a mistake last: other changes move what seeds mean


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
@pytest.mark.long("a tail never takes over")
def test_mistake_is_found(mistake: Mistake) -> None:
    with mistake.planted():
        seeds = range(mistake.seed, mistake.seed + MARGIN)
        assert any(run_world(seed, mistake.hazards).violations for seed in seeds)


def test_mistake_that_does_not_fit_the_code_is_refused() -> None:
    with pytest.raises(AssertionError, match="occurs 0 times"):
        replaced("the code", "other code", "")
