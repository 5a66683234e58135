"""Target streams of tests: values of their answers, and what scores must be."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from specdec.exact import codec
from specdec.exact.acceptance import DEFAULT_RULE, RULES, matched
from specdec.exact.prefix import chain, chain_draft
from specdec.exact.race import Race, times
from specdec.exact.randomness import Key, Purpose, acceptance_uniforms, uniform
from specdec.exact.values import Proposal, Scores, SparseDistribution, Verdict
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from tests.support.worker_streams import TargetStream
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
    """The scores are those of the distributions [K + 1, V], with the tail tokens drawn by their own keys.

    The token of a plain round has won its race, of which nothing is left for the rest: the vocabulary is small.
    """
    supports = [*SUPPORTS[: len(distributions) - 1], []]
    for index, (position, distribution, support) in enumerate(
        zip(scores.positions, distributions, supports, strict=True)
    ):
        outside = distribution.double().clone()
        outside[support] = 0
        assert position.support_probs == pytest.approx(distribution[support].tolist(), abs=1e-5)
        assert position.tail_mass == pytest.approx(float(outside.sum()), abs=1e-5)
        assert np.float32(position.tail_mass) == position.tail_mass
        if len(distributions) == 1:
            (over,) = times([Race(seed, committed_length)], np.arange(NUM_TOKENS)[None]) / distribution.double().numpy()
            assert over[position.tail_token] <= over.min() * (1 + 1e-4)
            continue
        threshold = uniform(seed, Key(committed_length, index, Purpose.TAIL)) * outside.sum()
        begin, end = (
            outside.cumsum(0)[position.tail_token] - outside[position.tail_token],
            outside.cumsum(0)[position.tail_token],
        )
        assert begin - 1e-5 <= threshold <= end + 1e-5
        assert position.tail_token not in support


@dataclass
class Rounds:
    """A session whose rounds commit what is accepted, and say what follows, as a coordinator's do."""

    stream: TargetStream
    sampling: SamplingParams
    next_round: pb.NextRound
    text: list[int]
    start: int = 0  # tokens of the text that the worker has
    offer: Proposal = field(default_factory=Proposal)  # with the last answer
    drafts: list[Proposal] = field(default_factory=list)
    answers: list[pb.ScoreResponse] = field(default_factory=list)
    num_accepted: int = 0
    vocab_size: int = NUM_TOKENS
    num_together: int = 1  # rounds that may be answered together
    answered: deque[pb.ScoreResponse] = field(default_factory=deque)  # with another round
    num_messages: int = 0
    num_drafts_together: int = 0  # rounds with draft tokens that came with another one

    async def decode(self, num_tokens: int) -> None:
        """Decode plainly up to so many tokens."""
        while len(self.text) < num_tokens:
            await self.round(Proposal())

    async def run(self, num_rounds: int) -> None:
        """Run so many rounds."""
        for _ in range(num_rounds):
            await self.round(self.draft())

    def draft(self) -> Proposal:
        """Return the next round's draft: what was offered."""
        return self.offer

    async def round(self, draft: Proposal) -> None:
        """Run one round."""
        is_known = bool(self.answered)
        answer = self._known(draft) if is_known else await self._asked(draft)
        self.num_drafts_together += bool(draft) and (is_known or bool(self.answered))
        self.start = len(self.text)
        assert answer.cached_len == self.start
        self.drafts.append(draft)
        self.answers.append(answer)
        scores = codec.scores_from_proto(answer, draft, self.vocab_size)
        verdict = self._verdict(draft, scores)
        self.num_accepted += len(verdict.path)
        self.text += [*(draft.tokens[token] for token in verdict.path), verdict.next_token]
        self.offer = codec.offer_from_proto(answer.offer, self.next_round.num_offered, self.vocab_size)

    def _verdict(self, draft: Proposal, scores: Scores) -> Verdict:
        if scores.is_matched:
            return matched(draft.tokens, draft.tree, scores)
        assert self.sampling.seed is not None
        draws = acceptance_uniforms(self.sampling.seed, self.start, len(draft))
        return RULES[DEFAULT_RULE].accept(draft, scores, draws)

    def _known(self, draft: Proposal) -> pb.ScoreResponse:
        """Return the answer that came with another one, which must be that to this round."""
        answer = self.answered.popleft()
        assert answer.prefix_digest == chain_draft(chain(b"", self.text), draft.tokens, draft.tree)
        self.stream.text[:] = self.text
        return answer

    async def _asked(self, draft: Proposal) -> pb.ScoreResponse:
        message = codec.score_to_proto(self.start, self.text[self.start :], draft)
        message.next_round.CopyFrom(self.next_round)
        message.num_rounds = self.num_together
        self.num_messages += 1
        answer = await self.stream.ask(pb.ScoreRequest(score=message))
        self.answered.extend(answer.following)
        return answer
