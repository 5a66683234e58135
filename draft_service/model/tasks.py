"""The engine tasks of a draft model: K forwards a round, batched with every other session that drafts."""

from collections.abc import Callable, Sequence

import torch

from draft_service.metrics import METRICS
from draft_service.model.drafted import NOTHING, UNDRAFTED, Drafted
from draft_service.model.forecasts import Forecast, Rival, forecast_of_race, forecasts_of
from specdec.drafting.request import DraftRequest
from specdec.engine import Task
from specdec.engine.rows import likely_winner
from specdec.errors import NonFiniteLogitsError
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import (
    SamplingContext,
    allowed_logits,
    draft_distributions,
    draw,
    drop_padding,
    for_draft,
)
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.serving.session_stream import WorkerSession


class ProposeTask(Task[Proposal]):
    """One session's round in the engine: the committed tokens, then each draft token but the last.

    It goes on from `begun`, what was drafted of the round before, and ends early, with at least one more token, once
    `interrupted` returns True. `num_committed` is less than the request's length where the request is a guess, whose
    last `num_new` tokens are those that the request itself would feed.

    It stops before a token that is reached and accepted with a chance below the request's `stop_below`, as far as the
    draft's confidence tells: the distributions after the tokens drawn so far decide, never a token that is left out. In
    a matched session it draws nothing: each token is who most likely wins the target's race.
    """

    def __init__(
        self,
        session: WorkerSession,
        request: DraftRequest,
        match: bool,
        begun: Drafted = UNDRAFTED,
        interrupted: Callable[[], bool] = lambda: False,
        num_committed: int | None = None,
        num_new: int = 1,
    ) -> None:
        super().__init__(
            session.key,
            request.start,
            [*request.tokens, *begun.proposal.tokens],
            min(1, request.num_draft_tokens),
            num_committed=request.committed_length if num_committed is None else num_committed,
            match=match or bool(begun.proposal),
            prefix_digest=request.prefix_digest,
            on_draft=True,  # the worker's own, ahead of the verdict or accepted
            group=session.group,
            has_text=request.committed_length > session.num_prompt_tokens,
        )
        self.session = session
        self.request = request
        self.uniforms = uniforms(session.seed, request.committed_length, request.num_draft_tokens, Purpose.DRAFT)
        self.place = request.committed_length  # of the first token in the target's text
        self.drawn: list[int] = []
        self.distributions: list[SparseDistribution] = []
        self.chances: list[float] = []  # of each token, when it was about to be drawn
        self.rivals: list[Rival] = []  # of each token
        self.stopped_chance: float | None = None  # of the token before which it stopped
        self.digest = b""  # of the text that is drafted after, as the cache holds it
        self._begun = begun
        self._interrupted = interrupted
        self._num_new = num_new

    @property
    def drafted(self) -> Drafted:
        """What it has drafted."""
        proposal = Proposal(tuple(self.drawn), tuple(self.distributions))
        return Drafted(proposal, tuple(self.chances), tuple(self.rivals), self.stopped_chance)

    @property
    def num_together(self) -> int:
        """As many as a request feeds, so that a round drafted ahead runs forwards of the same shape as that one."""
        return min(self._num_new, len(self.tokens)) if self._num_new > 1 else super().num_together

    def prepare(self) -> None:
        """Truncate to `start`; keep what the cache holds of the tokens where a stream or `begun` says that it may."""
        begun = self._begun
        self.drawn, self.distributions = list(begun.proposal.tokens), list(begun.proposal.distributions)
        self.chances, self.rivals, self.stopped_chance = list(begun.chances), list(begun.rivals), None
        super().prepare()
        if not self.tokens:
            self.finish(NOTHING)

    def context(self) -> SamplingContext:
        """Return what the next distribution depends on."""
        sampling, grammar = self.session.sampling, self.session.grammar.text
        if not sampling.has_penalties and not grammar:
            return SamplingContext(sampling)
        text, num_committed = self.sequence.tokens, min(self.num_committed, self.sequence.length)
        known = self.start, text, num_committed, self.session.num_prompt_tokens
        counts = self.session.counts.update(*known) if sampling.has_penalties else None
        drafted = text[num_committed:]
        allowed = grammar.allowed_in_draft(*known, drafted) if grammar else None
        return SamplingContext(sampling, completion=drafted, counts=counts, allowed=allowed)

    def draw_from(self, distribution: SparseDistribution, forecast: Forecast) -> None:
        """Draw a token and continue with it, or finish with the K-th, whose state is not needed.

        `forecast` depends on nothing but the tokens before it; of who wins a race another one is known.
        """
        token = None
        self.digest = self.digest or self.sequence.prefix_digest(self.request.committed_length)
        if race := self.session.race(self.place + len(self.drawn)):
            forecast = forecast_of_race(distribution, race)
            token = forecast.tokens[0]
        chance = forecast.confidence * (self.chances[-1] if self.chances else 1.0)
        if chance < self.request.stop_below:
            self.stopped_chance = chance
            self.finish(self.drafted.proposal)
            return
        self.chances.append(chance)
        if token is None:
            token = draw(distribution, self.uniforms[len(self.drawn)])
        self.rivals.append(forecast.rival(token))
        self.drawn.append(token)
        self.distributions.append(one_hot(token) if race else distribution)
        if len(self.drawn) == self.request.num_draft_tokens or self._interrupted():
            self.finish(self.drafted.proposal)
            return
        self.proceed([self.to_feed(token)])

    def to_feed(self, token: int) -> int:
        """Return the id by which the model knows a drawn token."""
        return token


class GuessTask(ProposeTask):
    """Reads a proposal's last token and guesses the token that closes the round: the most probable one, or who
    most likely wins.

    It draws nothing and consumes no key.
    """

    def draw_from(self, distribution: SparseDistribution, forecast: Forecast) -> None:
        """End with the most probable token."""
        if race := self.session.race(self.place):
            token, _ = likely_winner(distribution, race)
        else:
            _, token = max(zip(distribution.probs, distribution.token_ids, strict=True))
        self.finish(Proposal((token,), (distribution,)))


class DraftProcessor:
    """Turns logits into draft tokens; the engine's processor."""

    def __init__(self, vocab_size: int, support_mass: float, support_max: int) -> None:
        self._vocab_size = vocab_size
        self._support_mass = support_mass
        self._support_max = support_max

    def __call__(self, tasks: Sequence[ProposeTask], logits: torch.Tensor) -> None:
        """Give each task its next token from logits [number of tasks that want one, V]."""
        METRICS.observe_batch(len(tasks))
        drafting = [task for task in tasks if task.num_rows]
        for task in tasks:
            if not task.num_rows:
                task.finish(NOTHING)
        if not drafting:
            return
        contexts = [task.context() for task in drafting]
        logits = drop_padding(self.in_target_ids(logits), self._vocab_size)
        contexts = for_draft(logits, contexts)
        distributions = draft_distributions(logits, contexts, self._vocab_size, self._support_mass, self._support_max)
        forecasts = forecasts_of(allowed_logits(logits, contexts))
        for task, distribution, forecast in zip(drafting, distributions, forecasts, strict=True):
            if distribution.token_ids:
                task.draw_from(distribution, forecast)
            else:
                task.fail(NonFiniteLogitsError("the draft model's logits for this session are not finite"))

    def in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] by the target's token ids, which are the model's."""
        return logits
