"""Draft streams of tests: their answers, and what a plain loop over the model would draft."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from specdec.exact import codec
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import SamplingContext, draw, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, SparseDistribution
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2 as pb
from tests.support.worker_streams import PLAIN, PROMPT, connected_draft
from tests.workers.conftest import NUM_TOKENS, Reference

SUPPORT_MASS, SUPPORT_MAX = 0.9, 40
in_module_loop = pytest.mark.asyncio(loop_scope="module")  # the event loop of the shared worker


@asynccontextmanager
async def served(folder: Path | None, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a draft worker with the supports that `expected` has, and connect to it."""
    limits = {"support_mass": SUPPORT_MASS, "support_max": SUPPORT_MAX}
    async with connected_draft(folder, **limits | settings) as channel:
        yield channel


def decoded(answer: pb.ProposeResponse, count: int) -> Proposal:
    """Check and unpack an answer as the coordinator does."""
    return codec.proposal_from_proto(answer, count, NUM_TOKENS)


def expected(
    reference: Reference,
    text: Sequence[int],
    count: int,
    sampling: SamplingParams = PLAIN,
) -> Proposal:
    """Draft by a plain loop over transformers' forward."""
    assert sampling.seed is not None
    tokens: list[int] = []
    distributions: list[SparseDistribution] = []
    for index in range(count):
        context = SamplingContext(sampling, text[: len(PROMPT)], [*text[len(PROMPT) :], *tokens])
        dense = next_token_distributions(reference([*text, *tokens])[-1:], [context], NUM_TOKENS)
        distributions += sparse_distributions(dense, SUPPORT_MASS, SUPPORT_MAX)
        tokens.append(draw(distributions[-1], uniform(sampling.seed, Key(len(text), index, Purpose.DRAFT))))
    return Proposal(tuple(tokens), tuple(distributions))


def assert_same(actual: Proposal, wanted: Proposal) -> None:
    """Equal tokens and supports, and probabilities within rounding."""
    assert actual.tokens == wanted.tokens
    for found, other in zip(actual.distributions, wanted.distributions, strict=True):
        assert dict(zip(found.token_ids, found.probs, strict=True)) == pytest.approx(
            dict(zip(other.token_ids, other.probs, strict=True)), abs=1e-5
        )


def guess_of(reference: Reference, text: Sequence[int]) -> int:
    """Return the most probable next token."""
    return int(reference(text)[-1].argmax())
