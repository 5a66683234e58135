"""Target streams of tests: values of their answers, and what scores must be."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.values import Proposal, Scores, SparseDistribution
from specdec.v1 import target_pb2 as pb
from tests.workers.conftest import NUM_TOKENS

SUPPORTS = [[11, 12, 200], [13], [14, 15]]
DRAFT = [12, 13, 14]
in_module_loop = pytest.mark.asyncio(loop_scope="module")  # the event loop of the shared worker


def decoded(answer: pb.ScoreResponse, supports: Sequence[Sequence[int]] = SUPPORTS) -> Scores:
    """Check and unpack an answer as the coordinator does."""
    uniform_ones = tuple(SparseDistribution(tuple(ids), (1 / len(ids),) * len(ids)) for ids in supports)
    return codec.scores_from_proto(answer, Proposal(tuple(ids[0] for ids in supports), uniform_ones), NUM_TOKENS)


def values(answer: pb.ScoreResponse) -> tuple[object, ...]:
    """All fields of an answer except times."""
    return answer.support_probs, answer.tail_mass, answer.tail_tokens, answer.cached_len, list(answer.logprobs)


def assert_scores(scores: Scores, distributions: torch.Tensor, committed_length: int, seed: int = 7) -> None:
    """The scores are those of the distributions [K + 1, V], with the tail tokens drawn by their own keys."""
    supports = [*SUPPORTS[: len(distributions) - 1], []]
    for index, (position, distribution, support) in enumerate(
        zip(scores.positions, distributions, supports, strict=True)
    ):
        outside = distribution.double().clone()
        outside[support] = 0
        assert position.support_probs == pytest.approx(distribution[support].tolist(), abs=1e-5)
        assert position.tail_mass == pytest.approx(float(outside.sum()), abs=1e-5)
        assert np.float32(position.tail_mass) == position.tail_mass
        threshold = uniform(seed, Key(committed_length, index, Purpose.TAIL)) * outside.sum()
        begin, end = (
            outside.cumsum(0)[position.tail_token] - outside[position.tail_token],
            outside.cumsum(0)[position.tail_token],
        )
        assert begin - 1e-5 <= threshold <= end + 1e-5
        assert position.tail_token not in support
