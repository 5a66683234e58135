"""A session whose logits are not finite fails alone, whatever else is in its forward."""

import math

import pytest
import torch

from specdec.engine.task import Submission
from specdec.errors import NonFiniteLogitsError
from specdec.exact.values import ObservationRequest, Scores
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from target_service.scorer import Scorer, ScoreRound, ScoreTask

VOCAB_SIZE = 256
DRAFT = [3, 5]


def task_at(temperature: float, number: int) -> ScoreTask:
    """Return a round of two draft tokens that is in a loop."""
    session = WorkerSession(f"s{number}", 1, SamplingParams(seed=number, temperature=temperature), 4)
    given = ScoreRound(4, [1], DRAFT, [[token] for token in DRAFT])
    task = Scorer(VOCAB_SIZE, 4).task(session, given, ObservationRequest(), match=False)
    task.submit(Submission(number))
    return task


@pytest.mark.parametrize("temperatures", [(0, 0, 0), (1, 1, 1), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("token", [DRAFT[0], 17], ids=["of_the_draft", "other"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_a_bad_row_fails_its_session_alone(temperatures: tuple[float, ...], token: int, bad: float) -> None:
    logits = torch.randn(9, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    spoiled = logits.clone()
    spoiled[3, token] = bad
    good, mixed = [[task_at(each, number) for number, each in enumerate(temperatures)] for _ in range(2)]
    Scorer(VOCAB_SIZE, 4)(good, logits)
    Scorer(VOCAB_SIZE, 4)(mixed, spoiled)
    errors = [task.submission.error for task in mixed]
    assert [error is None for error in errors] == [True, False, True]
    assert isinstance(errors[1], NonFiniteLogitsError)
    for index in (0, 2):
        scores = mixed[index].submission.result
        assert isinstance(scores, Scores)
        assert scores == good[index].submission.result
