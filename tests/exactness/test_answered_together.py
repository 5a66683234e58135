"""Rounds that are answered together: whether an early answer is used depends on no draw that it has in it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from coordinator import rounds
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.generation import Generation, Limits, OutputToken, Round
from coordinator.rounds import DEFAULT_OPTIONS, RoundParts, Scored, ScoreOptions, run_rounds
from specdec.exact.acceptance import TokenRule
from specdec.exact.values import Proposal
from specdec.types import SamplingParams
from tests.support.toys import TOY, NoText, ToyDrafter, ToyModel, ToyScorer, markov_logits

END, PROMPT, NUM_TOKENS, NUM_SEEDS = 0, (1,), 6, 1500
LATER_LOAD = 4  # sessions at the target after two forwards of a message: others have arrived


@dataclass(slots=True)
class AnswersTogether(ToyScorer):
    """Answers plain rounds together up to the text's end, and tells of the load then."""

    answered: deque[tuple[Sequence[int], Scored]] = field(default_factory=deque)

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answer to the first round, and keep the others."""
        self.answered.clear()
        text, scored = list(committed), self.scored(committed, proposal)
        if options.num_rounds == 1 or proposal:
            return scored
        answers = [(tuple(text), scored)]
        while len(answers) < options.num_rounds and scored.scores.positions[0].tail_token != END and len(text) < 8:
            text.append(scored.scores.positions[0].tail_token)
            scored = self.scored(text, Proposal())
            answers.append((tuple(text), scored))
        load, num_more = LATER_LOAD if len(answers) > 2 else 1, len(answers)
        for known, each in answers:
            num_more -= 1
            self.answered.append((known, replace(each, num_sessions=load, waited_s=0.0, num_more=num_more)))
        return self.answered.popleft()[1]

    def known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        """Return the next one of those that were kept, if it is of this round."""
        text, scored = self.answered.popleft()
        return scored if tuple(committed) == text and not proposal else None


async def text_of(seed: int, is_together: bool) -> list[int]:
    sampling = SamplingParams(seed=seed, max_new_tokens=NUM_TOKENS)
    model, drafted = (ToyModel(markov_logits(number), sampling, prompt=PROMPT) for number in (1, 2))
    chooser = PlanChooser(SharedStatistics(), [TOY], 8)
    chooser._rest.begin_long()
    generation = Generation(PROMPT, sampling, Limits(NUM_TOKENS, 1000, frozenset({END})), NoText())
    scorer = AnswersTogether(model, seed) if is_together else ToyScorer(model, seed)

    async def publish(played: Round) -> None:
        """Commit nothing."""

    await run_rounds(generation, RoundParts({TOY: ToyDrafter(drafted, seed)}, scorer, TokenRule(), chooser), publish)
    return [entry.token for entry in generation.emitted]


class Interrupted(Exception):
    """The client has left, or a process is gone."""


@dataclass(slots=True)
class LosesAnswers(AnswersTogether):
    """Loses an answer that tells of more than one round: it is held until they are scored, and that is too long."""

    is_repeated: bool = False  # the round is asked again, at another worker; else the session is interrupted
    num_lost: int = 0

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Lose the first such answer."""
        scored = await AnswersTogether.score(self, committed, proposal, options)
        if self.num_lost or not self.answered:
            return scored
        self.num_lost = 1 + len(self.answered)
        self.answered.clear()
        if not self.is_repeated:
            raise Interrupted
        return replace(scored, num_sessions=LATER_LOAD, num_more=0, has_lost=True)


async def interrupted_text_of(seed: int, *, is_repeated: bool) -> tuple[list[int], int]:
    """Return a text of which an answer was lost, and how many rounds that told of; the session is awake after it."""
    sampling = SamplingParams(seed=seed, max_new_tokens=NUM_TOKENS)
    model, drafted = (ToyModel(markov_logits(number), sampling, prompt=PROMPT) for number in (1, 2))
    scorer = LosesAnswers(model, seed, is_repeated=is_repeated)
    committed: list[OutputToken] = []

    async def publish(played: Round) -> None:
        committed.extend(played.emitted)

    def parts(chooser: PlanChooser) -> RoundParts:
        return RoundParts({TOY: ToyDrafter(drafted, seed)}, scorer, TokenRule(), chooser)

    limits = Limits(NUM_TOKENS, 1000, frozenset({END}))
    rests = PlanChooser(SharedStatistics(), [TOY], 8)
    rests._rest.begin_long()
    try:
        await run_rounds(Generation(PROMPT, sampling, limits, NoText()), parts(rests), publish)
    except Interrupted:
        generation = Generation(PROMPT, sampling, limits, NoText(), emitted=list(committed))
        await run_rounds(generation, parts(PlanChooser(SharedStatistics(), [TOY], 8)), publish)
    return [entry.token for entry in committed], scorer.num_lost


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_what_was_lost_is_drawn_again_as_it_was(is_repeated: bool) -> None:
    """An answer that tells of an end at once is not lost: if others were drawn anew, ends would be found too often."""
    num_lost = 0
    for seed in range(200):
        text, num_rounds = await interrupted_text_of(seed, is_repeated=is_repeated)
        assert text == await text_of(seed, is_together=False)
        num_lost += num_rounds
    assert num_lost > 300


async def test_texts_change_where_lost_tokens_are_drawn_by_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the mistake: a session that goes on drafts at once what is drawn."""
    monkeypatch.setattr(rounds, "MAX_TOLD_TOKENS", 0)
    changed = 0
    for seed in range(60):
        text, _ = await interrupted_text_of(seed, is_repeated=False)
        changed += text != await text_of(seed, is_together=False)
    assert changed > 10


async def test_a_load_that_later_draws_decide_ends_no_rest_among_answers() -> None:
    """A text that ends early meets a lower load: a session that woke by it would draw again what was no end."""
    shares, counts = [], []
    for is_together in (False, True):
        texts = [await text_of(seed, is_together) for seed in range(NUM_SEEDS)]
        third = [text[2] for text in texts if len(text) > 2 and END not in text[:2]]
        counts.append(len(third))
        shares.append(third.count(END) / len(third))
    error = math.sqrt(sum(shares[0] * (1 - shares[0]) / count for count in counts))
    assert abs(shares[0] - shares[1]) < 4 * error, shares
