"""A drafter of trees without a model, for proofs and tests: drawn and deterministic siblings, and observations.

    python -m benchmarks.toy_drafters --drafters toy-tree      # a draft worker that also offers it

Its distribution after a token is the session's own bigram counts. At every branching position two siblings are drawn
from it independently, and a third is chosen: the token that the target reported as most probable when it last read the
position's token, or nothing where no observation arrived.
"""

from collections import Counter, deque
from contextlib import AsyncExitStack

import numpy as np
from pydantic import BaseModel

from draft_service.drafter import DrafterKind
from draft_service.registry import registered
from draft_service.session_texts import TextDrafter
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import draw
from specdec.exact.values import ObservationRequest, Observations, Proposal, SparseDistribution, one_hot
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession

SUPPORT_MAX = 3
NUM_DRAWN_SIBLINGS = 2


class BigramText:
    """A session's tokens, with how often each token followed each, and what the target predicted after it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.followers: dict[int, Counter[int]] = {}
        self.predicted: dict[int, int] = {}

    def append(self, token: int) -> None:
        """Add a token."""
        if self.tokens:
            self.followers.setdefault(self.tokens[-1], Counter())[token] += 1
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        while len(self.tokens) > length:
            token = self.tokens.pop()
            if self.tokens:
                self.followers[self.tokens[-1]][token] -= 1

    def distribution_after(self, token: int) -> SparseDistribution:
        """Return the bigram distribution, cut to its most frequent tokens; the token itself counts once."""
        counts = self.followers.get(token, Counter()) + Counter([token])
        chosen = sorted(counts, key=lambda follower: (-counts[follower], follower))[:SUPPORT_MAX]
        weights = np.array([counts[follower] for follower in chosen], np.float32)
        return SparseDistribution(tuple(chosen), tuple((weights / weights.sum(dtype=np.float32)).tolist()))


class ToyTreeDrafter(TextDrafter[BigramText]):
    """Drafts a tree, breadth first, until it has K tokens."""

    observations = ObservationRequest(num_top_tokens=1)

    def __init__(self) -> None:
        super().__init__("toy-tree", BigramText)

    def observe(self, session: WorkerSession, text: BigramText, observations: Observations) -> None:
        """Store the most probable token after each observed one."""
        for offset, top in enumerate(observations.top_tokens):
            text.predicted[text.tokens[observations.start + offset]] = int(np.frombuffer(top, "<u4")[0])

    def draft(
        self, session: WorkerSession, text: BigramText, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a tree. How many children a position gets is decided before any of them is drawn."""
        draws = uniforms(session.seed, len(text.tokens), num_draft_tokens, Purpose.DRAFT)
        tokens: list[int] = []
        distributions: list[SparseDistribution] = []
        parents: list[int] = []
        positions = deque([(0, text.tokens[-1])])
        while positions and len(tokens) < num_draft_tokens:
            position, last = positions.popleft()
            distribution = text.distribution_after(last)
            chosen = [text.predicted[last]] if last in text.predicted else []
            for source in [distribution] * NUM_DRAWN_SIBLINGS + [one_hot(token) for token in chosen]:
                if len(tokens) == num_draft_tokens:
                    break
                tokens.append(draw(source, draws[len(tokens)]))
                distributions.append(source)
                parents.append(position)
                positions.append((len(tokens), tokens[-1]))
        return Proposal(tuple(tokens), tuple(distributions), tuple(parents))


class NoSettings(BaseModel):
    """The toy has none."""


async def build(settings: NoSettings, server: Server, stack: AsyncExitStack) -> ToyTreeDrafter:
    """Return the drafter."""
    return ToyTreeDrafter()


KIND = DrafterKind("toy-tree", NoSettings, build)
KINDS = {**registered(), KIND.name: KIND}
