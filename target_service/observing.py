"""What a session's drafters are told of the target's forwards: of committed tokens alone, where that can be foreseen.

Which draft tokens will be committed is the coordinator's decision where they were drawn: it depends on distributions
that the worker does not get. In a round that is matched the worker's own draws decide. Of such a round it leaves out
what it observed at tokens that will be rejected, which is most of what a round with hidden states would send.
"""

from dataclasses import replace

from specdec.errors import InvalidArgumentError
from specdec.exact import codec
from specdec.exact.acceptance import matched
from specdec.exact.values import ObservationRequest, Scores
from specdec.v1 import target_pb2
from target_service.scorer import ScoreRound


def of_accepted(scores: Scores, given: ScoreRound) -> Scores:
    """Return scores with observations of the draft tokens that will be accepted, where that can be foreseen.

    Those without hidden states stay: they are small, and to select some would delay the answer.
    """
    observations = scores.observations
    if observations is None or not observations.hidden_states or not given.is_matched:
        return scores
    path, first = matched(given.draft_tokens, given.tree, scores).path, len(observations) - len(given.draft_tokens)
    kept = observations.select([*range(first), *(first + token for token in path)])
    return replace(scores, observations=kept, observed=path)


def request_from_proto(opening: target_pb2.OpenTarget, num_layers: int) -> ObservationRequest:
    """Check what a session wants to know of a model of so many layers. Raises InvalidArgumentError."""
    try:
        return codec.observation_request_from_proto(opening.observations, num_layers)
    except codec.MalformedReply as error:
        raise InvalidArgumentError({"open.observations": f"ask for too much: {error}"}) from None
