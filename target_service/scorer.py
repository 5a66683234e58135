"""Scoring: K + 1 rows a session from one forward, on the draft's supports, with one token drawn from beside each.

The arithmetic is batched over the rows of all sessions that share the forward; row i of a session is the target's
distribution after its committed tokens and its first i draft tokens, under the same sampling parameters as the draft's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from specdec.engine import Task
from specdec.engine.held import HeldTokens
from specdec.errors import NonFiniteLogitsError
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import SamplingContext, draw_dense, drop_padding, is_finite, next_token_distributions
from specdec.exact.values import PositionLogprobs, Scores, TargetDistribution
from specdec.serving.session_stream import Session
from target_service.metrics import METRICS


@dataclass(frozen=True, slots=True)
class Round:
    """One round to score: append `tokens` behind `start`, then judge the draft tokens."""

    start: int
    tokens: Sequence[int]  # at least one
    draft_tokens: Sequence[int]  # [K]
    supports: Sequence[Sequence[int]]  # [K], each with its draft token

    @property
    def committed_length(self) -> int:
        """Tokens committed when the round began."""
        return self.start + len(self.tokens)


class ScoreTask(Task[Scores]):
    """One session's round in the engine: K + 1 rows at the last committed token and the K draft tokens."""

    def __init__(self, session: Session, given: Round, held: HeldTokens, match: bool) -> None:
        super().__init__(
            session.session_id, given.start, [*given.tokens, *given.draft_tokens], len(given.draft_tokens) + 1
        )
        self.session = session
        self.round = given
        self._held = held
        self._match = match

    def prepare(self) -> None:
        """Truncate to `start`; where a stream begins, keep what the cache holds of its tokens already."""
        self.tokens = self._held.resume(self.sequence, self.start, self.tokens, self.num_rows, self._match)

    def contexts(self) -> list[SamplingContext]:
        """Return what each row depends on, [K + 1]."""
        sampling = self.session.sampling
        if not sampling.has_penalties:
            return [SamplingContext(sampling)] * self.num_rows
        text = self._held.of(self.sequence)
        prompt = text[: self.session.num_prompt_tokens]
        ends = range(self.round.committed_length, self.round.committed_length + self.num_rows)
        return [SamplingContext(sampling, prompt, text[len(prompt) : end]) for end in ends]


class Scorer:
    """Turns logits into scores; the engine's processor."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._held = HeldTokens()

    def task(self, session: Session, given: Round, match: bool) -> ScoreTask:
        """Return the engine's task for one round; `match` keeps cached tokens behind `start` that are the same."""
        return ScoreTask(session, given, self._held, match)

    def __call__(self, tasks: Sequence[ScoreTask], logits: torch.Tensor) -> None:
        """End each task with its scores, or with NonFiniteLogitsError, from logits [sum of K + 1, V]."""
        METRICS.observe_batch(len(tasks))
        logits = drop_padding(logits, self._vocab_size)
        rows = next_token_distributions(
            logits, [context for task in tasks for context in task.contexts()], self._vocab_size
        )
        finite = is_finite(rows)
        target_rows = _target_distributions(tasks, rows)
        for task, (begin, end) in zip(tasks, _spans(tasks), strict=True):
            if not all(finite[begin:end]):
                task.fail(
                    NonFiniteLogitsError(
                        "the model's logits for this session are not finite; restart it, or its worker"
                    )
                )
                continue
            scored = target_rows[begin:end]
            task.finish(Scores(tuple(scored), _logprobs(task, scored, logits[begin:end])))


def _spans(tasks: Iterable[ScoreTask]) -> Iterable[tuple[int, int]]:
    """Return where each task's rows begin and end."""
    return pairwise(accumulate((task.num_rows for task in tasks), initial=0))


def _target_distributions(tasks: Sequence[ScoreTask], rows: torch.Tensor) -> list[TargetDistribution]:
    """Read the supports from rows [N, V], then draw one token a row from what is left; rows are overwritten."""
    supports = [support for task in tasks for support in (*task.round.supports, ())]  # [N], () for the last rows
    inside = _indices(supports, rows.device)
    support_probs = rows[inside].tolist()
    rows[inside] = 0
    draws = [
        uniform
        for task in tasks
        for uniform in uniforms(task.session.seed, task.round.committed_length, task.num_rows, Purpose.TAIL)
    ]
    tail_tokens, tail_masses = draw_dense(rows, draws)
    cuts = pairwise(accumulate(map(len, supports), initial=0))
    probs = [support_probs[begin:end] for begin, end in cuts]
    return list(map(TargetDistribution, probs, tail_masses, tail_tokens))


def _indices(token_lists: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) index pairs of one list of tokens a row, each [sum of lengths]."""
    row = [index for index, tokens in enumerate(token_lists) for _ in tokens]
    column = [token for tokens in token_lists for token in tokens]
    pairs = torch.tensor([row, column], dtype=torch.long, device=device)
    return pairs[0], pairs[1]


def _logprobs(
    task: ScoreTask, scored: Sequence[TargetDistribution], logits: torch.Tensor
) -> tuple[PositionLogprobs, ...]:
    """Return the model's own log probabilities, from logits [K + 1, V]; nothing where none were asked for."""
    num_top = task.session.sampling.num_logprobs
    if num_top is None:
        return ()
    logprobs = logits.log_softmax(dim=-1)
    supports = (*task.round.supports, ())
    wanted = [[*support, row.tail_token] for support, row in zip(supports, scored, strict=True)]
    flat = iter(logprobs[_indices(wanted, logits.device)].tolist())
    by_token = [{token: next(flat) for token in tokens} for tokens in wanted]
    top, top_ids = (values.tolist() for values in logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1))
    return tuple(
        PositionLogprobs(mapping, tuple(zip(ids, values, strict=True)))
        for mapping, ids, values in zip(by_token, top_ids, top, strict=True)
    )
