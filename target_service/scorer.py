"""Scoring: the N + 1 positions of a tree of N draft tokens from one forward, batched over sessions.

At each position the target's distribution is read on the union of the supports of the position's children, and one
token is drawn from the rest. Where all draft tokens were chosen nothing is read, and the token that is drawn decides.
The distributions are taken under the same sampling parameters as the draft's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch

from specdec.drafting.successors import NUM_SUCCESSORS
from specdec.engine import Feed, Task
from specdec.engine.rows import bytes_of, largest_tokens, read_and_draw
from specdec.errors import InvalidArgumentError, NonFiniteLogitsError
from specdec.exact.race import Draw
from specdec.exact.randomness import Purpose, own_draws, uniforms
from specdec.exact.sampling import SamplingContext, drop_padding, indices
from specdec.exact.tree import chain_parents, children_of, depths_of, path_to, union
from specdec.exact.values import ObservationRequest, Observations, PositionLogprobs, Scores, TargetDistribution
from specdec.serving.session_stream import WorkerSession
from target_service.metrics import METRICS
from target_service.offering import SessionOffers
from target_service.own_head import MAX_WAITING, States

MAX_OBSERVED_BYTES = 8 << 20  # of the prompt's hidden states in one answer: half of the largest message


@dataclass(frozen=True, slots=True)
class ScoreRound:
    """One round to score: append `tokens` after `start`, then score the draft tokens."""

    start: int
    tokens: Sequence[int]  # at least one
    draft_tokens: Sequence[int]  # [N]
    supports: Sequence[Sequence[int]]  # [N], each with its draft token
    parents: tuple[int, ...] = ()  # [N], see exact/tree.py; empty: a chain
    prefix_digest: bytes | None = None  # of the first `start` tokens, to be proved; None: not asked for
    is_matched: bool = False  # its draft tokens were chosen, and are accepted where they are what the target draws

    @property
    def committed_length(self) -> int:
        """Tokens committed when the round began."""
        return self.start + len(self.tokens)

    @property
    def tree(self) -> tuple[int, ...]:
        """The parents, also of a chain."""
        return self.parents or chain_parents(len(self.draft_tokens))

    def unions(self) -> list[tuple[int, ...]]:
        """Return the token ids to answer on at each position, [N + 1]; none where the draft tokens are matched."""
        if self.is_matched:
            return [()] * (len(self.draft_tokens) + 1)
        return [union(self.supports[child] for child in children) for children in children_of(self.tree)]

    def draws(self, seed: int) -> Sequence[Draw]:
        """Return the draws from outside the unions, [N + 1]; where all are empty, the target's own."""
        length = self.committed_length
        if self.draft_tokens and not self.is_matched:
            return list(map(Draw, uniforms(seed, length, len(self.draft_tokens) + 1, Purpose.TAIL)))
        depths = [0, *depths_of(self.tree)]
        own = own_draws(seed, length, max(depths) + 1)
        return [own[depth] for depth in depths]


@dataclass(frozen=True, slots=True)
class Watch:
    """What is observed of a round: what the session's drafter asked for, and what the worker's own head reads."""

    request: ObservationRequest = ObservationRequest()  # noqa: RUF009  # frozen
    window: int = 0  # committed tokens at which the drafter's is observed, at most
    own_layers: tuple[int, ...] = ()  # whose states the head reads

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """All layers whose states are observed."""
        return tuple(sorted({*self.request.hidden_layers, *self.own_layers}))

    def num_observed(self, num_draft_tokens: int) -> int:
        """Return at how many of a round's tokens states are observed, at most."""
        windows = (self.window if self.request.hidden_layers else 0, MAX_WAITING if self.own_layers else 0)
        return max(windows) + num_draft_tokens if any(windows) else 0


class ScoreTask(Task[Scores]):
    """One session's round in the engine: logits at the last committed token and at the N draft tokens."""

    digest = b""  # of the committed tokens, once they are cached
    offers: SessionOffers | None = None  # where drafts are offered
    reports_to: SessionOffers | None = None  # the same, where they are drafted from the most probable tokens

    def __init__(
        self, session: WorkerSession, given: ScoreRound, watch: Watch, match: bool, num_committed: int | None = None
    ) -> None:
        """`num_committed` is less than the committed length where a token that is not yet committed counts as one."""
        num_draft_tokens = len(given.draft_tokens)
        super().__init__(
            session.key,
            given.start,
            [*given.tokens, *given.draft_tokens],
            num_draft_tokens + 1,
            parents=given.parents,
            num_committed=given.committed_length if num_committed is None else num_committed,
            match=match,
            on_draft=given.prefix_digest is not None,  # which proves what is kept
            prefix_digest=given.prefix_digest,
            hidden_layers=watch.hidden_layers,
            num_observed=watch.num_observed(num_draft_tokens),
            group=session.group,
            has_text=given.committed_length > session.num_prompt_tokens,
        )
        self.session = session
        self.round = given
        self.watch = watch

    @property
    def num_positions(self) -> int:
        """Positions to score, N + 1."""
        return len(self.round.draft_tokens) + 1

    def score_instead(self, given: ScoreRound) -> None:
        """Score another round than it was made for; before it runs."""
        self.round = given
        self.append_instead(given.start, [*given.tokens, *given.draft_tokens], self.num_positions, given.parents)
        self.prefix_digest, self.on_draft = given.prefix_digest, True
        self.num_observed = self.watch.num_observed(len(given.draft_tokens))

    def prepare(self) -> None:
        """Truncate to `start`, keeping the accepted path; observed tokens that are fed need logits too."""
        super().prepare()
        if self.watch.request.num_top_tokens:
            self.num_rows = min(len(self.tokens), self.watch.window + self.num_positions - 1)

    def note_fed(self, feed: Feed, hidden_states: torch.Tensor | None) -> None:
        """Take note of a forward; with the last one the committed text is cached."""
        super().note_fed(feed, hidden_states)
        if not self.tokens:
            self.digest = self.sequence.prefix_digest(self.round.committed_length)

    def states_of(self, layers: Sequence[int], window: int) -> torch.Tensor | None:
        """Return the states [N, len(layers), hidden_size] of the draft tokens, and of `window` tokens before them."""
        if self.hidden_states is None or not layers:
            return None
        rows = self.hidden_states[-(window + len(self.round.draft_tokens)) :]
        if tuple(layers) == tuple(self.hidden_layers):
            return rows
        return rows[:, [self.hidden_layers.index(layer) for layer in layers]]

    def own_states(self, path: Sequence[int]) -> States | None:
        """Return what the worker's own head reads of the tokens that are committed once the draft's `path` is."""
        rows = self.states_of(self.watch.own_layers, MAX_WAITING)
        if rows is None:
            return None
        num_before = len(rows) - len(self.round.draft_tokens)
        kept = [*range(num_before), *(num_before + token for token in path)]
        is_beginning = kept == list(range(len(kept)))  # a view is made in a fraction of a copy's time
        return States(self.round.committed_length - num_before, rows[: len(kept)] if is_beginning else rows[kept])

    def contexts(self) -> list[SamplingContext]:
        """Return what each position's distribution depends on, [N + 1]. Raises InvalidArgumentError by its grammar."""
        sampling, grammar = self.session.sampling, self.session.grammar.text
        if not sampling.has_penalties and not grammar:
            return [SamplingContext(sampling)] * self.num_positions
        given, num_prompt = self.round, self.session.num_prompt_tokens
        text = given.start, self.sequence.tokens, given.committed_length, num_prompt
        counts = self.session.counts.update(*text) if sampling.has_penalties else None
        if grammar:
            grammar.follow(*text).check_fits()
        contexts = []
        for position in range(self.num_positions):
            path = [given.draft_tokens[index] for index in path_to(position, given.tree)]
            allowed = grammar.allowed(path) if grammar else None
            contexts.append(SamplingContext(sampling, completion=path, counts=counts, allowed=allowed))
        return contexts


class Scorer:
    """Turns logits into scores; the engine's processor."""

    def __init__(
        self,
        vocab_size: int,
        observation_window: int,
        hidden_size: int = 0,
        own_layers: tuple[int, ...] = (),
        when_scored: Callable[[Sequence[ScoreTask]], None] = lambda tasks: None,
    ) -> None:
        """`own_layers` are those whose states the worker's own head reads; `when_scored` takes what was scored."""
        self._vocab_size = vocab_size
        self._observation_window = observation_window
        self._hidden_size = hidden_size
        self._own_layers, self._when_scored = own_layers, when_scored

    def task(
        self, session: WorkerSession, given: ScoreRound, request: ObservationRequest, match: bool, learns: bool = False
    ) -> ScoreTask:
        """Return the engine's task for one round.

        `match` keeps all cached tokens that are the same; `learns`: the worker's own head reads the round's states.
        """
        return ScoreTask(session, given, self.watch(request, learns), match)

    def watch(self, request: ObservationRequest, learns: bool) -> Watch:
        """Return what is observed of a round."""
        return Watch(request, self._window(request) if request else 0, self._own_layers if learns else ())

    def _window(self, request: ObservationRequest) -> int:
        """Return how many committed tokens are observed: as many as fit into an answer."""
        token_bytes = 2 * len(request.hidden_layers) * self._hidden_size
        return min(self._observation_window, max(1, MAX_OBSERVED_BYTES // max(1, token_bytes)))

    def __call__(self, tasks: Sequence[ScoreTask], logits: torch.Tensor) -> None:
        """End each task with its scores, or with its error, from logits [sum of num_rows, V]."""
        METRICS.observe_batch(len(tasks))
        logits = drop_padding(logits, self._vocab_size)
        parts = torch.split(logits, [task.num_rows for task in tasks])
        tasks, rows_of, contexts = _with_contexts(tasks, parts)
        if not tasks:
            return
        scored = _joined([rows[-task.num_positions :] for task, rows in zip(tasks, rows_of, strict=True)], logits)
        offers = [task.reports_to for task in tasks]  # now: a task may be told while it runs
        spans = _spans(tasks)
        reports = _reports(scored, offers, spans)
        unions = [token_ids for task in tasks for token_ids in task.round.unions()]
        answers = read_and_draw(scored, contexts, unions, _draws(tasks))
        for task, rows, told, report, (begin, end) in zip(tasks, rows_of, offers, reports, spans, strict=True):
            positions = tuple(answer for answer in answers[begin:end] if answer)
            if len(positions) < end - begin:
                message = "the model's logits for this session are not finite; restart it, or its worker"
                task.fail(NonFiniteLogitsError(message))
                continue
            if told:
                tokens = [task.round.tokens[-1], *task.round.draft_tokens]
                told.report(task.round.committed_length, tokens, report)
            logprobs = _logprobs(task, positions, rows[-len(positions) :])
            observed = _observed(task, rows)
            task.finish(Scores(positions, logprobs, observed, is_matched=task.round.is_matched))
        self._when_scored(tasks)


def _reports(
    logits: torch.Tensor, offers: Sequence[SessionOffers | None], spans: Sequence[tuple[int, int]]
) -> list[tuple[bytes, ...]]:
    """Return each task's most probable tokens by its rows of logits [sum of N + 1, V]; none where nobody is told."""
    told = [row for each, (begin, end) in zip(offers, spans, strict=True) if each for row in range(begin, end)]
    found = iter(largest_tokens(logits if len(told) == len(logits) else logits[told], NUM_SUCCESSORS) if told else ())
    counts = [end - begin if each else 0 for each, (begin, end) in zip(offers, spans, strict=True)]
    return [tuple(islice(found, count)) for count in counts]


def _draws(tasks: Sequence[ScoreTask]) -> list[Draw]:
    """Return the draws from outside the unions, [sum of N + 1]; where nothing is drawn, some numbers."""
    return [draw for task in tasks for draw in _draws_of(task)]


def _draws_of(task: ScoreTask) -> Sequence[Draw]:
    if not task.session.sampling.temperature:
        return [Draw(0.0)] * task.num_positions
    return task.round.draws(task.session.seed)


def _with_contexts(
    tasks: Sequence[ScoreTask], rows_of: Sequence[torch.Tensor]
) -> tuple[list[ScoreTask], list[torch.Tensor], list[SamplingContext]]:
    """Return the tasks that can be scored, the rows of each, and the contexts of all positions; fail the others."""
    scorable, their_rows, contexts = list[ScoreTask](), list[torch.Tensor](), list[SamplingContext]()
    for task, rows in zip(tasks, rows_of, strict=True):
        try:
            contexts += task.contexts()
        except InvalidArgumentError as error:
            task.fail(error)
        else:
            scorable.append(task)
            their_rows.append(rows)
    return scorable, their_rows, contexts


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Return the parts, one after the other, [sum of N + 1, V]; without a copy where they are all there is."""
    return whole if sum(map(len, parts)) == len(whole) else torch.cat(list(parts))


def _spans(tasks: Iterable[ScoreTask]) -> list[tuple[int, int]]:
    """Return where each task's positions begin and end."""
    return list(pairwise(accumulate((task.num_positions for task in tasks), initial=0)))


def _logprobs(
    task: ScoreTask, positions: Sequence[TargetDistribution], logits: torch.Tensor
) -> tuple[PositionLogprobs, ...]:
    """Return the model's own log probabilities, from logits [N + 1, V]; nothing where none were asked for."""
    num_top = task.session.sampling.num_logprobs
    if num_top is None:
        return ()
    logprobs = logits.log_softmax(dim=-1)
    pairs = zip(task.round.unions(), positions, strict=True)
    wanted = [[*token_ids, position.tail_token] for token_ids, position in pairs]
    flat = iter(logprobs[indices(wanted, logits.device)].tolist())
    by_token = [{token: next(flat) for token in tokens} for tokens in wanted]
    top, top_ids = (values.tolist() for values in logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1))
    return tuple(
        PositionLogprobs(mapping, tuple(zip(ids, values, strict=True)))
        for mapping, ids, values in zip(by_token, top_ids, top, strict=True)
    )


def _observed(task: ScoreTask, logits: torch.Tensor) -> Observations | None:
    """Return what the session's drafter asked for, at the last tokens of the round; logits [num_rows, V]."""
    request = task.watch.request
    if not request:
        return None
    states = task.states_of(request.hidden_layers, task.watch.window)
    hidden = bytes_of(states.to(torch.bfloat16)) if states is not None else ()
    top: tuple[bytes, ...] = ()
    if request.num_top_tokens:
        top = largest_tokens(logits, request.num_top_tokens)
    length = task.round.committed_length + len(task.round.draft_tokens)
    return Observations(length - max(len(hidden), len(top)), hidden, top)
