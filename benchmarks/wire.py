"""`python -m benchmarks.wire`: bytes that a round takes between the services, for each way of drafting.

Builds the four messages of a round with the services' own codec, for a target of hidden size 4,096 and a vocabulary of
152,064, and prints how long they are. Two draft tokens were accepted, so that each round commits three tokens.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import Message

from benchmarks import tables
from draft_service.drafter import NO_OBSERVATIONS
from draft_service.drafters.model import ModelDrafterSettings
from specdec.drafting.successors import NUM_SUCCESSORS
from specdec.exact import codec
from specdec.exact.prefix import DIGEST_BYTES
from specdec.exact.sampling import draw, sparse_distributions
from specdec.exact.tree import depths_of, path_to
from specdec.exact.values import (
    ObservationRequest,
    Observations,
    Proposal,
    Scores,
    TargetDistribution,
    one_hot,
)
from specdec.planning.acceptance import Acceptance
from specdec.planning.trees import best_tree
from specdec.v1 import draft_pb2, target_pb2, types_pb2

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 152_064, 4096, 36
BFLOAT16_BYTES = 2
COMMITTED = 100_000  # tokens before the round: a number of many digits
NUM_ACCEPTED = 2
CHAIN_TOKENS, TREE_TOKENS = 5, 32
PEAKED, FLAT = 10.0, 0.0  # scales of random logits; flat ones have supports of the maximum size
BY_RANK = Acceptance(((0.6, 0.15, 0.07, 0.04),))  # what shapes the trees
TIMING = types_pb2.Timing(queue_s=0.1, forward_s=0.1, total_s=0.1)
LOAD = types_pb2.Load(num_waiting=100, num_running=100, kv_cache_usage=0.5)


@dataclass(frozen=True, slots=True)
class Way:
    """What a way of drafting proposes, and what it asks the target for."""

    name: str
    proposal: Proposal
    wanted: ObservationRequest = NO_OBSERVATIONS


def drawn_chain(num_tokens: int, scale: float) -> Proposal:
    """Return a chain that was drawn from the distributions of random logits, truncated as they are shipped."""
    settings = ModelDrafterSettings()
    logits = scale * torch.randn(num_tokens, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    distributions = sparse_distributions(logits.softmax(-1), settings.support_mass, settings.support_max)
    return Proposal(tuple(draw(distribution, 0.5) for distribution in distributions), tuple(distributions))


def chosen(num_tokens: int, parents: Sequence[int] = ()) -> Proposal:
    """Return tokens that were chosen without a draw: a chain, or a tree."""
    tokens = tuple(random.Random(0).sample(range(VOCAB_SIZE), num_tokens))
    return Proposal(tokens, tuple(map(one_hot, tokens)), tuple(parents))


def chosen_tree(num_tokens: int) -> Proposal:
    """Return an optimal tree of chosen tokens."""
    nodes = best_tree(BY_RANK, num_tokens, num_tokens)
    places = {(): 0} | {node.path: place for place, node in enumerate(nodes, start=1)}
    return chosen(num_tokens, [places[node.path[:-1]] for node in nodes])


def ways() -> list[Way]:
    """Return every way of drafting with its usual shape."""
    tree = chosen_tree(TREE_TOKENS)
    return [
        Way("model, K = 5, 64 tokens a support", drawn_chain(CHAIN_TOKENS, FLAT)),
        Way("model, K = 5, peaked", drawn_chain(CHAIN_TOKENS, PEAKED)),
        Way("ngram, K = 5", chosen(CHAIN_TOKENS)),
        Way("suffix, tree of 32", tree),
        Way("recycle, tree of 32", tree, ObservationRequest(num_top_tokens=NUM_SUCCESSORS)),
        Way("medusa, tree of 32, 1 layer", tree, ObservationRequest((NUM_LAYERS,))),
        Way("eagle3, tree of 32, 3 layers", tree, ObservationRequest((2, 18, 33))),
        Way("eagle3, tree of 8, 3 layers", chosen_tree(8), ObservationRequest((2, 18, 33))),
        Way("dflash, tree of 32, 5 layers", tree, ObservationRequest((1, 9, 17, 25, 33))),
        Way("dflash, chain of 15, 5 layers", chosen(15), ObservationRequest((1, 9, 17, 25, 33))),
    ]


def observed(request: ObservationRequest, count: int) -> Observations | None:
    """Return observations at so many tokens, with random content; None if nothing is asked for."""
    if not request:
        return None
    generator = random.Random(0)
    hidden, top = len(request.hidden_layers) * HIDDEN_SIZE * BFLOAT16_BYTES, 4 * request.num_top_tokens
    return Observations(
        COMMITTED,
        tuple(generator.randbytes(hidden) for _ in range(count)) if hidden else (),
        tuple(generator.randbytes(top) for _ in range(count)) if top else (),
    )


def accepted(proposal: Proposal) -> tuple[int, ...]:
    """Return the path to the first token of that depth."""
    depths = depths_of(proposal.tree)
    return tuple(path_to(depths.index(NUM_ACCEPTED) + 1, proposal.tree))


def even_target(num_tokens: int) -> TargetDistribution:
    """Return a target's answer that is even over the tokens of a union and the rest."""
    prob = 1 / (num_tokens + 1)
    return TargetDistribution([prob] * num_tokens, prob, VOCAB_SIZE - 1)


def messages(proposal: Proposal, wanted: ObservationRequest) -> dict[str, Message]:
    """Return the four messages of a round.

    The target matches draft tokens that were chosen, and observes the last committed token and those that are accepted;
    the drafter gets the same.
    """
    committed = [VOCAB_SIZE - 1] * (NUM_ACCEPTED + 1)
    is_matched = proposal.is_chosen
    positions = tuple(even_target(0 if is_matched else len(token_ids)) for token_ids in proposal.unions())
    propose = draft_pb2.Propose(start=COMMITTED, tokens=committed, num_draft_tokens=len(proposal))
    if (known := observed(wanted, NUM_ACCEPTED + 1)) is not None:
        propose.observations.CopyFrom(codec.observations_to_proto(known))
    drafted = codec.proposal_to_proto(proposal)
    path = accepted(proposal) if known else None
    scored = codec.scores_to_proto(Scores(positions, observations=known, observed=path, is_matched=is_matched))
    for answer in (drafted, scored):
        answer.cached_len = COMMITTED
        answer.timing.CopyFrom(TIMING)
    scored.load.CopyFrom(LOAD)
    score = codec.score_to_proto(COMMITTED, committed, proposal)
    propose.prefix_digest = score.prefix_digest = bytes(DIGEST_BYTES)
    return {
        "ProposeRequest": draft_pb2.ProposeRequest(propose=propose),
        "ProposeResponse": drafted,
        "ScoreRequest": target_pb2.ScoreRequest(score=score),
        "ScoreResponse": scored,
    }


def sizes(way: Way) -> dict[str, int]:
    """Return the bytes of each message."""
    return {name: message.ByteSize() for name, message in messages(way.proposal, way.wanted).items()}


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"Bytes a round, hidden size {HIDDEN_SIZE:,}, vocabulary {VOCAB_SIZE:,}, {NUM_ACCEPTED} tokens accepted:\n")
    rows = []
    for way in ways():
        size = sizes(way)
        rows.append([way.name, *(f"{count:,}" for count in size.values()), f"{sum(size.values()):,}"])
    print(*tables.lines(["", *size, "together"], rows), sep="\n")


if __name__ == "__main__":
    main()
