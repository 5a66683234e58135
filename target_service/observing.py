"""What a session's drafters are told of the target's forwards: of committed tokens alone, where that can be foreseen.

Which draft tokens will be committed is the coordinator's decision. It depends on the target's probabilities and on the
session's seed, which the worker has, and on the distributions of the draft tokens, which it does not get. Tokens that
were chosen rather than drawn have none: their distribution is 1 on the token. For them the worker follows the session's
acceptance rule with the same draws, and leaves out what it observed at tokens that will be rejected, which is most of
what a round with hidden states would send. Were it wrong, the drafter would know less: that costs acceptance, nothing
else.
"""

from dataclasses import dataclass, replace

from specdec.errors import InvalidArgumentError
from specdec.exact import codec
from specdec.exact.acceptance import RULES, AcceptanceRule
from specdec.exact.randomness import acceptance_uniforms
from specdec.exact.values import ObservationRequest, Proposal, Scores, Verdict, one_hot
from specdec.v1 import target_pb2
from target_service.scorer import ScoreRound

KNOWN_RULES = {name.value: rule for name, rule in RULES.items()}


@dataclass(frozen=True, slots=True)
class Observing:
    """What one session asked for; the default is nothing."""

    request: ObservationRequest = ObservationRequest()  # noqa: RUF009  # frozen
    rule: AcceptanceRule | None = None  # None: not told, or a newer one; then all draft tokens are observed

    def of_round(self, message: target_pb2.Score) -> ObservationRequest:
        """Return what a round shall observe."""
        return ObservationRequest() if message.without_observations else self.request

    def of_accepted(self, scores: Scores, given: ScoreRound, seed: int) -> Scores:
        """Return scores with observations of the draft tokens that will be accepted, where that can be foreseen.

        Those without hidden states stay: they are small, and the forecast would delay the answer.
        """
        observations = scores.observations
        if observations is None or not observations.hidden_states:
            return scores
        foreseen = verdict(self.rule, scores, given, seed)
        if foreseen is None:
            return scores
        path, first = foreseen.path, len(observations) - len(given.draft_tokens)
        kept = observations.select([*range(first), *(first + token for token in path)])
        return replace(scores, observations=kept, observed=path)


def verdict(rule: AcceptanceRule | None, scores: Scores, given: ScoreRound, seed: int) -> Verdict | None:
    """Return what the coordinator will decide; None without a rule, and where draft tokens were drawn."""
    if rule is None or not all(len(support) == 1 for support in given.supports):
        return None
    proposal = Proposal(tuple(given.draft_tokens), tuple(map(one_hot, given.draft_tokens)), given.parents)
    draws = acceptance_uniforms(seed, given.committed_length, len(given.draft_tokens))
    return rule.accept(proposal, scores, draws)


def observing_from_proto(opening: target_pb2.OpenTarget, num_layers: int) -> Observing:
    """Check what a session wants to know of a model of so many layers. Raises InvalidArgumentError."""
    try:
        request = codec.observation_request_from_proto(opening.observations, num_layers)
    except codec.MalformedReply as error:
        raise InvalidArgumentError({"open.observations": f"ask for too much: {error}"}) from None
    return Observing(request, KNOWN_RULES.get(opening.acceptance_rule))
