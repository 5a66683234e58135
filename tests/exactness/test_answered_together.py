"""Rounds that are answered together: whether an early answer is used depends on no draw that it has in it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.generation import Generation, Limits, Round
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
