"""One session's round at a head: what it knows, what it asks for, how it ends."""

import asyncio
import time
from collections.abc import Sequence

import torch

from specdec.drafting.request import DraftRequest
from specdec.engine import TaskTimes
from specdec.engine.rows import likely_winner
from specdec.errors import NonFiniteLogitsError
from specdec.exact.race import Race
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import SamplingContext, draw
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.heads.drafting.predictions import ranking_params
from specdec.heads.drafting.sessions import HeldSession
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams

NOTHING = Proposal()


class SessionLost(Exception):
    """The worker holds less of the session than the request starts from."""

    def __init__(self, cached_len: int) -> None:
        super().__init__(f"{cached_len} tokens are held")
        self.cached_len = cached_len


class HeadRound:
    """A round; everything but the constructor, `submit` and `deliver` runs on the head's thread."""

    event_loop: asyncio.AbstractEventLoop  # of the coroutine that awaits it
    future: asyncio.Future[Proposal] | None = None

    def __init__(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None) -> None:
        self.session = session
        self.request = request
        self.states = states  # [N, layers, hidden_size], the target's, from `request.observations.start` on
        self.held: HeldSession  # set before the round begins
        self.times = TaskTimes()
        self.proposal: Proposal | None = None
        self.error: Exception | None = None
        self._arrived_s = time.perf_counter()
        self._ranking = ranking_params(session.sampling)

    @property
    def done(self) -> bool:
        """Whether the round has ended, or nobody waits for it any more."""
        is_abandoned = self.future is not None and self.future.done()
        return self.proposal is not None or self.error is not None or is_abandoned

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.request.num_draft_tokens

    def submit(self) -> asyncio.Future[Proposal]:
        """Return what a coroutine may await, which `deliver` wakes."""
        self.event_loop = asyncio.get_running_loop()
        self.future = self.event_loop.create_future()
        return self.future

    def begin(self) -> None:
        """Note that the round has left the queue."""
        self.times.queue_s = time.perf_counter() - self._arrived_s

    def finish(self, proposal: Proposal) -> None:
        """End with a proposal."""
        self.proposal = proposal
        self.times.total_s = time.perf_counter() - self._arrived_s

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error = error

    def fail_not_finite(self) -> None:
        """End with the error of logits that are not finite."""
        self.fail(NonFiniteLogitsError("the head's logits for this session are not finite"))

    def deliver(self) -> None:
        """Wake who awaits the round; runs on the event loop."""
        if self.future is None or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.proposal or NOTHING)

    def context(self, path: Sequence[int] = ()) -> SamplingContext:
        """Return what the distribution of a token depends on that is drawn after the text and `path`."""
        return self._context(self.session.sampling, path)

    def ranking(self, path: Sequence[int] = ()) -> SamplingContext:
        """Return what the rank of a candidate depends on after the text and `path`."""
        return self._context(self._ranking, path)

    def race(self, depth: int) -> Race | None:
        """Return the race for the token that follows the text and a path of `depth` tokens; None: none is run."""
        return self.session.race(len(self.held.tokens) + depth)

    @property
    def depends_on_path(self) -> bool:
        """Whether distributions depend on what was drawn before, besides the head's logits."""
        return self.session.sampling.has_penalties or self.session.grammar.text is not None

    def _context(self, sampling: SamplingParams, path: Sequence[int]) -> SamplingContext:
        if not self.depends_on_path:
            return SamplingContext(sampling)
        session, text, grammar = self.session, self.held.tokens, self.session.grammar.text
        known = self.request.start, text, len(text), session.num_prompt_tokens
        counts = session.counts.update(*known) if sampling.has_penalties else None
        allowed = grammar.allowed_in_draft(*known, path) if grammar else None
        return SamplingContext(sampling, completion=path, counts=counts, allowed=allowed)


class DrawnChain:
    """A chain in the making: each token is drawn from the distribution that is shipped, or is who wins a race by it."""

    def __init__(self, session: WorkerSession, request: DraftRequest) -> None:
        self.tokens: list[int] = []
        self.distributions: list[SparseDistribution] = []
        self._session, self._length = session, request.committed_length
        self._uniforms = uniforms(session.seed, request.committed_length, request.num_draft_tokens, Purpose.DRAFT)

    @property
    def is_complete(self) -> bool:
        """Whether all tokens that were asked for are drawn."""
        return len(self.tokens) == len(self._uniforms)

    def draw_from(self, distribution: SparseDistribution) -> int:
        """Draw the next token."""
        if race := self._session.race(self._length + len(self.tokens)):
            token, _ = likely_winner(distribution, race)
            distribution = one_hot(token)
        else:
            token = draw(distribution, self._uniforms[len(self.tokens)])
        self.tokens.append(token)
        self.distributions.append(distribution)
        return token

    def proposal(self) -> Proposal:
        """Return the chain."""
        return Proposal(tuple(self.tokens), tuple(self.distributions))
