"""A round costs kilobytes on the wire, independent of the vocabulary: measured on serialised messages."""

import pytest
import torch

from draft_service.drafters.model import ModelDrafterSettings
from specdec.exact import codec
from specdec.exact.sampling import draw, sparse_distributions
from specdec.exact.values import Proposal, Scores, TargetDistribution
from specdec.v1 import draft_pb2, target_pb2, types_pb2

VOCAB_SIZE = 152_064
NUM_DRAFT_TOKENS = 5
MAX_BYTES = 8_000
SETTINGS = ModelDrafterSettings()


def round_bytes(logits: torch.Tensor) -> dict[str, int]:
    """Return the size of each message of one round, for draft logits [K, V]."""
    distributions = sparse_distributions(logits.softmax(-1), SETTINGS.support_mass, SETTINGS.support_max)
    tokens = [draw(distribution, 0.5) for distribution in distributions]
    committed = [VOCAB_SIZE - 1] * (NUM_DRAFT_TOKENS + 1)
    timing = types_pb2.Timing(queue_s=0.1, forward_s=0.1, total_s=0.1)
    answers = [TargetDistribution(distribution.probs, 0.1, VOCAB_SIZE - 1) for distribution in distributions] + [
        TargetDistribution((), 1.0, VOCAB_SIZE - 1)
    ]
    scores = codec.scores_to_proto(Scores(tuple(answers)))
    scores.cached_len = 100_000
    scores.timing.CopyFrom(timing)
    scores.load.CopyFrom(types_pb2.Load(num_waiting=100, num_running=100, kv_cache_usage=0.5))
    proposal = Proposal(tuple(tokens), tuple(distributions))
    propose = draft_pb2.Propose(start=100_000, tokens=committed, num_draft_tokens=NUM_DRAFT_TOKENS)
    score = codec.score_to_proto(100_000, committed, proposal)
    answer = codec.proposal_to_proto(proposal)
    answer.cached_len = 100_000
    answer.timing.CopyFrom(timing)
    messages = {
        "ProposeRequest": draft_pb2.ProposeRequest(propose=propose),
        "ProposeResponse": answer,
        "ScoreRequest": target_pb2.ScoreRequest(score=score),
        "ScoreResponse": scores,
    }
    return {name: message.ByteSize() for name, message in messages.items()}


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0, 10.0])
def test_a_round_takes_few_kilobytes(scale: float) -> None:
    """From uniform distributions, whose supports have the maximum size, to nearly one-hot ones."""
    logits = scale * torch.randn(NUM_DRAFT_TOKENS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    sizes = round_bytes(logits)
    print(f"scale {scale}: {sum(sizes.values())} bytes a round: {sizes}")
    assert 0 < sum(sizes.values()) < MAX_BYTES
    assert sum(sizes.values()) < 4 * VOCAB_SIZE * NUM_DRAFT_TOKENS / 100, "far below dense float32 distributions"
