"""The loop: what is committed when, what ends it, that commits are awaited, and who gets the observations."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from prometheus_client import REGISTRY

from coordinator import metrics
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.lookups import LOOKUP
from coordinator.choosing.plans import MIN_FOUND, NOTHING, PLAIN, RESTING, DraftPlan, Found, RoundOutcome
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.generation import NO_DRAFTER, Generation, Limits, Round
from coordinator.rounds import (
    DEFAULT_OPTIONS,
    MAX_TOGETHER,
    Drafted,
    RoundParts,
    Scored,
    ScoreOptions,
    committed_observations,
    run_rounds,
)
from specdec.errors import FencedError, UnavailableError
from specdec.exact.acceptance import TokenRule
from specdec.exact.lookup import Match, TextLookup
from specdec.exact.values import Observations, Proposal, Scores, Verdict
from specdec.types import FinishReason, SamplingParams, Statistics, TokenOrigin
from tests.support.toy_coordinator import until
from tests.support.toys import (
    TOY,
    NoText,
    ObservedScorer,
    RepeatingDrafter,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    TreeDrafter,
    markov_logits,
)

PROMPT = (1,)
SEED = 5
SAMPLING = SamplingParams(seed=SEED, max_new_tokens=24)


def new_generation() -> Generation:
    return Generation(PROMPT, SAMPLING, Limits(24, 1000), NoText())


@dataclass
class Trace:
    """What happened, in order, and the store's view."""

    events: list[tuple[str, int]] = field(default_factory=list)
    committed: list[Round] = field(default_factory=list)
    num_at_once: int = 0


@dataclass(slots=True)
class TracedScorer(ToyScorer):
    """The toy scorer; records when it is called, and can be made to wait or fail."""

    trace: Trace
    before: Callable[[int], Awaitable[object] | None] = lambda number: None
    promised: list[bool] = field(default_factory=list)  # of each call: that a plain round follows

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        number = sum(kind == "score" for kind, _ in self.trace.events)
        self.trace.events.append(("score", number))
        self.promised.append(options.next_round is not None and options.next_round.plain)
        waiting = self.before(number)
        if waiting is not None:
            await waiting
        return await ToyScorer.score(self, committed, proposal, options)


class Rounds:
    """One generation's loop with toys, and a commit that the test controls."""

    def __init__(self, fixed: int = 3) -> None:
        self.generation = new_generation()
        self.trace = Trace()
        self.traced = TracedScorer(ToyModel(markov_logits(1), SAMPLING, prompt=PROMPT), SEED, self.trace)
        self.scorer: ToyScorer = self.traced
        self.drafter: ToyDrafter = ToyDrafter(ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT), SEED)
        self.has_drafter = True
        self.chooser = PlanChooser(SharedStatistics(), [TOY], 8, fixed)
        self.gates: dict[int, asyncio.Event] = {}  # commits that wait
        self.failing: dict[int, Exception] = {}  # commits that fail

    async def run(self) -> None:
        drafters = {TOY: self.drafter} if self.has_drafter else {}
        parts = RoundParts(drafters, self.scorer, TokenRule(), self.chooser)
        await run_rounds(self.generation, parts, self.publish)

    async def publish(self, played: Round) -> None:
        number = sum(kind == "commit" for kind, _ in self.trace.events)
        self.trace.events.append(("commit", number))
        self.trace.num_at_once += 1
        assert self.trace.num_at_once == 1
        if number in self.gates:
            await self.gates[number].wait()
        else:
            await asyncio.sleep(0)
        self.trace.num_at_once -= 1
        if number in self.failing:
            raise self.failing[number]
        self.trace.committed.append(played)
        self.trace.events.append(("committed", number))

    @property
    def tokens(self) -> list[int]:
        return [entry.token for played in self.trace.committed for entry in played.emitted]


async def settle() -> None:
    """Let other tasks run as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_rounds_are_committed_one_by_one_in_order() -> None:
    rounds = Rounds()
    await rounds.run()
    assert rounds.generation.finish is FinishReason.LENGTH
    assert rounds.tokens == [entry.token for entry in rounds.generation.emitted]
    lengths = [played.base_length for played in rounds.trace.committed]
    ends = [played.base_length + len(played.emitted) for played in rounds.trace.committed]
    assert lengths == [len(PROMPT), *ends[:-1]]
    assert [number for kind, number in rounds.trace.events if kind == "committed"] == list(range(len(lengths)))


async def test_without_drafters_each_round_but_the_last_says_that_a_plain_one_follows() -> None:
    rounds = Rounds()
    rounds.has_drafter = False
    rounds.chooser = PlanChooser(SharedStatistics(), [], 8)
    await rounds.run()
    assert rounds.traced.promised == [True] * 23 + [False]


@pytest.mark.parametrize("expected", [True, False])
async def test_with_drafters_the_choice_says_whether_a_plain_round_follows(expected: bool) -> None:
    rounds = Rounds()
    rounds.chooser = Promising(expected)
    await rounds.run()
    assert rounds.traced.promised == [expected] * 23 + [False]


class Promising(PlanChooser):
    """Decodes plainly, and expects what it is told to."""

    def __init__(self, expected: bool) -> None:
        super().__init__(SharedStatistics(), [TOY], 0)
        self._expected = expected

    def expects_plain_after(self, plan: DraftPlan) -> bool:
        assert plan == PLAIN
        return self._expected


async def test_one_round_overlaps_a_commit() -> None:
    rounds = Rounds()
    rounds.gates[0] = asyncio.Event()
    task = asyncio.create_task(rounds.run())
    await until(lambda: ("score", 1) in rounds.trace.events)
    await settle()
    assert [entry for entry in rounds.trace.events if entry[1] > 0] == [("score", 1)]
    assert ("committed", 0) not in rounds.trace.events
    rounds.gates[0].set()
    await task
    assert rounds.trace.events.index(("committed", 0)) < rounds.trace.events.index(("commit", 1))


@pytest.mark.parametrize("number", [0, 2])
async def test_a_failed_commit_ends_the_loop(number: int) -> None:
    rounds = Rounds()
    rounds.failing[number] = FencedError("another coordinator has it")
    with pytest.raises(FencedError):
        await rounds.run()
    assert len(rounds.trace.committed) == number
    assert max(index for kind, index in rounds.trace.events if kind == "commit") == number


async def test_a_failed_last_commit_is_raised() -> None:
    whole = Rounds()
    await whole.run()
    rounds = Rounds()
    rounds.failing[len(whole.trace.committed) - 1] = UnavailableError("the store is gone")
    with pytest.raises(UnavailableError):
        await rounds.run()


def wait_from_second(event: asyncio.Event, number: int) -> Awaitable[object] | None:
    return event.wait() if number else None


def has_scored_twice(rounds: Rounds) -> bool:
    return ("score", 1) in rounds.trace.events


async def test_cancellation_awaits_the_commit() -> None:
    """While the next round runs, and while the loop waits for the commit."""
    for is_scoring in (True, False):
        rounds = Rounds()
        rounds.gates[0] = asyncio.Event()
        if is_scoring:
            rounds.traced.before = partial(wait_from_second, asyncio.Event())
        task = asyncio.create_task(rounds.run())
        await until(partial(has_scored_twice, rounds))
        await settle()
        task.cancel()
        await settle()
        assert not task.done()
        rounds.gates[0].set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [entry for entry in rounds.trace.events if entry[0] == "committed"] == [("committed", 0)]


@pytest.mark.parametrize("num_cancellations", [1, 2, 3])
async def test_however_often_it_is_cancelled_it_awaits_the_commit_and_raises_its_error(num_cancellations: int) -> None:
    rounds = Rounds()
    rounds.gates[0], rounds.failing[0] = asyncio.Event(), FencedError("another coordinator has it")
    rounds.traced.before = partial(wait_from_second, asyncio.Event())
    task = asyncio.create_task(rounds.run())
    await until(partial(has_scored_twice, rounds))
    for _ in range(num_cancellations):
        task.cancel()
        await settle()
        assert not task.done()
    rounds.gates[0].set()
    with pytest.raises(FencedError):
        await task


async def test_a_failed_round_awaits_the_commit() -> None:
    rounds = Rounds()
    rounds.gates[0] = asyncio.Event()

    def fail(number: int) -> None:
        if number == 1:
            rounds.gates[0].set()
            raise UnavailableError("no target worker")

    rounds.traced.before = fail
    with pytest.raises(UnavailableError, match="no target"):
        await rounds.run()
    assert len(rounds.trace.committed) == 1


async def test_a_failed_commit_wins_over_a_failed_round() -> None:
    """FencedError or cancellation is more specific than a worker's failure."""
    rounds = Rounds()
    rounds.failing[0] = FencedError("another coordinator has it")

    def fail(number: int) -> None:
        if number == 1:
            raise UnavailableError("no target worker")

    rounds.traced.before = fail
    with pytest.raises(FencedError):
        await rounds.run()


@dataclass(slots=True)
class LostDrafter(ToyDrafter):
    """A drafter whose worker is unavailable from the third round on."""

    num_calls: int = 0
    observed: list[Observations] = field(default_factory=list)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        self.num_calls += 1
        return await ToyDrafter.propose(self, committed, num_draft_tokens) if self.num_calls < 3 else Drafted()

    def observe(self, observations: Observations) -> None:
        self.observed.append(observations)


def toy_model() -> ToyModel:
    return ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT)


def lost_drafter() -> LostDrafter:
    return LostDrafter(toy_model(), SEED)


async def test_without_a_draft_worker_rounds_go_on() -> None:
    rounds = Rounds()
    rounds.drafter = lost_drafter()
    await rounds.run()
    assert len(rounds.tokens) == 24
    assert [played.statistics.num_draft_tokens for played in rounds.trace.committed[1:3]] == [6, 6]


@dataclass(slots=True)
class AskedDrafter(ToyDrafter):
    """Records its requests."""

    requests: list[tuple[int, int]] = field(default_factory=list)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        self.requests.append((len(committed), num_draft_tokens))
        return await ToyDrafter.propose(self, committed, num_draft_tokens)


@pytest.mark.parametrize("fixed", [0, 1, 3, 8])
async def test_drafts_fit_into_the_remaining_tokens(fixed: int) -> None:
    rounds = Rounds(fixed)
    drafter = AskedDrafter(rounds.drafter.model, SEED)
    rounds.drafter = drafter
    await rounds.run()
    assert all(length + count + 1 <= len(PROMPT) + 24 for length, count in drafter.requests)
    assert max((count for _, count in drafter.requests), default=0) == fixed
    assert len(rounds.tokens) == 24


class RecordingChooser(PlanChooser):
    """Notes the outcomes that it observes."""

    def __init__(self, fixed: int) -> None:
        super().__init__(SharedStatistics(), [TOY], 8, fixed)
        self.outcomes: list[RoundOutcome] = []

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


@dataclass(slots=True)
class ReplacedScorer(TracedScorer):
    """A worker that had to read everything in the fourth round."""

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        scored = await TracedScorer.score(self, committed, proposal, options)
        number = sum(kind == "score" for kind, _ in self.trace.events)
        return replace(scored, num_fed=41) if number == 4 else scored


async def test_rounds_with_a_prefill_are_no_cost_observations() -> None:
    """The first, whose streams opened, and one whose worker was replaced by another that had to read everything."""
    rounds = Rounds()
    chooser = RecordingChooser(3)
    rounds.scorer = ReplacedScorer(rounds.scorer.model, SEED, rounds.trace)
    rounds.chooser = chooser
    await rounds.run()
    assert len(chooser.outcomes) > 5
    had_prefill = [number for number, outcome in enumerate(chooser.outcomes) if outcome.has_prefill]
    assert had_prefill == [0, 3]


# ---- trees and observations


async def test_a_tree_commits_the_accepted_path() -> None:
    rounds = Rounds(6)
    rounds.drafter = TreeDrafter(rounds.drafter.model, SEED)
    await rounds.run()
    assert len(rounds.tokens) == 24
    assert any(len(played.emitted) == 3 for played in rounds.trace.committed)
    assert all(len(played.emitted) <= 4 for played in rounds.trace.committed)


async def test_the_drafter_observes_committed_tokens_only() -> None:
    """The bytes that the target sent for the last committed token and for the accepted ones; lost worker or not."""
    rounds, drafter = Rounds(), lost_drafter()
    target = rounds.scorer.model
    rounds.drafter, rounds.scorer = drafter, ObservedScorer(target, SEED)
    await rounds.run()
    committed = rounds.generation.committed
    assert len(drafter.observed) == len(rounds.trace.committed)
    for observed, played in zip(drafter.observed, rounds.trace.committed, strict=True):
        assert observed.start == played.base_length - 1
        assert len(observed) == sum(entry.origin is TokenOrigin.ACCEPTED for entry in played.emitted) + 1
        seen = range(observed.start, observed.end)
        tops = [int(target.logits[committed[index]].argmax()).to_bytes(4, "little") for index in seen]
        assert list(observed.top_tokens) == tops


def test_observations_follow_the_accepted_path() -> None:
    """Two committed tokens and a tree of four; the second child of the root and its child were accepted."""
    scores = Scores((), observations=letters("abcdef"))
    assert committed_observations(scores, 4, Verdict((1, 3), 9, TokenOrigin.BONUS)) == letters("abdf")


@pytest.mark.parametrize(
    ("observed", "given", "kept"),
    [((1, 3), "abdf", "abdf"), ((1, 2), "abde", "abd"), ((), "ab", "ab"), ((0, 3), "abcf", "ab")],
    ids=["those accepted", "one of them", "none", "only later ones"],
)
def test_observations_end_before_a_draft_token_that_was_not_observed(
    observed: tuple[int, ...], given: str, kept: str
) -> None:
    """Two committed tokens; the second of four draft tokens and the fourth, which follows it, were accepted."""
    scores = Scores((), observations=letters(given), observed=observed)
    assert committed_observations(scores, 4, Verdict((1, 3), 9, TokenOrigin.BONUS)) == letters(kept)


def letters(states: str) -> Observations:
    """Return observations of one letter a token, from token 10 on."""
    return Observations(10, tuple(letter.encode() for letter in states))


async def test_no_observations_are_sent_on_unasked() -> None:
    rounds, drafter = Rounds(), lost_drafter()
    rounds.drafter = drafter
    await rounds.run()
    assert drafter.observed == []


# ---- proposals that no round uses


@dataclass(slots=True)
class GatedDrafter(ToyDrafter):
    """The toy drafter; notes the texts that it was asked to continue, and may wait."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    texts: list[list[int]] = field(default_factory=list)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        self.texts.append(committed)
        await self.gate.wait()
        return Drafted()


class AlwaysCompares(PlanChooser):
    """Asks a second drafter whenever it may; K is 3."""

    def __init__(self) -> None:
        super().__init__(SharedStatistics(), [TOY, "other"], 8)

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        return DraftPlan(TOY, min(3, remaining_tokens - 1))

    def choose_compared(self, chosen: DraftPlan, available: Iterable[str]) -> DraftPlan | None:
        return DraftPlan("other", 2)


async def compared_rounds(is_open: bool) -> tuple[Rounds, GatedDrafter]:
    """Run a generation of which another drafter is asked, too; unless `is_open` it does not answer before the end."""
    rounds = Rounds()
    other = GatedDrafter(rounds.drafter.model, SEED)
    rounds.chooser = AlwaysCompares()
    parts = RoundParts({TOY: rounds.drafter, "other": other}, rounds.scorer, TokenRule(), rounds.chooser)
    if is_open:
        other.gate.set()
    task = asyncio.create_task(run_rounds(rounds.generation, parts, rounds.publish))
    await until(lambda: rounds.generation.done)
    other.gate.set()
    await task
    return rounds, other


async def test_no_round_waits_for_an_unused_proposal() -> None:
    """It is asked of once where it does not answer, and all is committed meanwhile."""
    _, quick = await compared_rounds(is_open=True)
    rounds, slow = await compared_rounds(is_open=False)
    assert len(rounds.tokens) == 24
    assert len(slow.texts) == 1
    assert len(quick.texts) > 5


async def test_unused_proposals_leave_the_text_unchanged() -> None:
    alone = Rounds()
    await alone.run()
    rounds, other = await compared_rounds(is_open=True)
    assert rounds.tokens == alone.tokens
    assert all(text == [*PROMPT, *alone.tokens][: len(text)] for text in other.texts)


async def test_an_unused_proposal_ends_with_the_loop() -> None:
    """A round fails while another drafter is being asked."""
    rounds = Rounds()
    rounds.failing[0] = FencedError("another coordinator has it")
    other = GatedDrafter(rounds.drafter.model, SEED)
    rounds.chooser = AlwaysCompares()
    parts = RoundParts({TOY: rounds.drafter, "other": other}, rounds.scorer, TokenRule(), rounds.chooser)
    with pytest.raises(FencedError):
        await run_rounds(rounds.generation, parts, rounds.publish)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@dataclass(slots=True)
class RareDrafter(RepeatingDrafter):
    """Finds as many tokens as the last one says: none, one or two."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        return await RepeatingDrafter.propose(self, committed, min(num_draft_tokens, committed[-1]))


@dataclass(slots=True)
class FailingDrafter(ToyDrafter):
    """A drafter whose worker is away."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        return Drafted(has_failed=True)


class AlwaysRests(PlanChooser):
    """Rests from the beginning."""

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        return RESTING


async def test_a_resting_session_observes_nothing() -> None:
    """Neither does the target observe, nor is a drafter told or asked; the text is plain decoding's."""
    rounds, plain = Rounds(), Rounds(fixed=0)
    rounds.scorer = ObservedScorer(rounds.traced.model, SEED)
    rounds.drafter = drafter = LostDrafter(rounds.drafter.model, SEED)
    rounds.chooser = AlwaysRests(SharedStatistics(), [TOY], 8)
    await rounds.run()
    await plain.run()
    assert rounds.tokens == plain.tokens
    assert (drafter.num_calls, drafter.observed) == (0, [])


@dataclass(slots=True)
class AnswersTogether(TracedScorer):
    """Says with every third round that the answers to the next two are here; records what it was asked for."""

    asked: list[tuple[int, bool]] = field(default_factory=list)  # rounds that may be answered; is the next one told of
    forgets: bool = False  # it knows none of the answers that it said were here

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        self.asked.append((options.num_rounds, options.next_round is not None))
        return self._counted(await TracedScorer.score(self, committed, proposal, options))

    def known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        if self.forgets:
            return None
        self.asked.append((1, False))
        return self._counted(self.scored(committed, proposal))

    def _counted(self, scored: Scored) -> Scored:
        return replace(scored, num_more=2 - (len(self.asked) - 1) % 3)


def together(fixed: int = 0) -> tuple[Rounds, AnswersTogether]:
    rounds = Rounds(fixed=fixed)
    scorer = AnswersTogether(rounds.traced.model, SEED, rounds.trace)
    rounds.scorer = scorer
    return rounds, scorer


async def test_rounds_that_are_answered_together_are_committed_together() -> None:
    plain, (rounds, scorer) = Rounds(fixed=0), together()
    rounds.has_drafter = plain.has_drafter = False
    await plain.run()
    await rounds.run()
    assert rounds.tokens == plain.tokens
    assert [len(played.emitted) for played in rounds.trace.committed] == [3] * 8
    digests = [played.digest for played in rounds.trace.committed]
    assert [played.base_digest for played in rounds.trace.committed[1:]] == digests[:-1]
    assert rounds.generation.statistics.num_rounds == 24
    assert scorer.asked[0] == (1, True), "nobody waits longer for the first token"
    assert scorer.asked[3:6] == [(MAX_TOGETHER, True), (1, False), (1, False)]


async def test_what_ends_the_text_ends_rounds_that_are_answered_together() -> None:
    rounds, _ = together()
    rounds.has_drafter = False
    rounds.generation.limits = Limits(23, 1000)
    await rounds.run()
    assert [len(played.emitted) for played in rounds.trace.committed] == [*[3] * 7, 2]
    assert rounds.trace.committed[-1].finish is FinishReason.LENGTH


async def test_only_rounds_of_a_rest_may_be_answered_together() -> None:
    unknown, scorer = together()
    unknown.chooser = AlwaysRests(SharedStatistics(), [TOY], 8)
    await unknown.run()
    assert {num_rounds for num_rounds, _ in scorer.asked} == {1}, "nobody knows whether it goes on"
    rests, scorer = together()
    rests.chooser = PlanChooser(SharedStatistics(), [TOY], 8)
    rests.chooser._rest.begin_long()
    await rests.run()
    assert rests.tokens == await plain_tokens()
    assert scorer.asked[0] == (1, True), "nobody waits longer for the first token"
    assert {num_rounds for num_rounds, _ in scorer.asked} == {1, MAX_TOGETHER}


async def test_rounds_do_not_wait_for_an_answer_that_is_not_here() -> None:
    rounds, scorer = together()
    rounds.chooser = PlanChooser(SharedStatistics(), [TOY], 8)
    rounds.chooser._rest.begin_long()
    scorer.forgets = True
    await rounds.run()
    assert rounds.tokens == await plain_tokens()
    assert rounds.trace.events.index(("commit", 0)) < rounds.trace.events.index(("score", 2))
    assert [len(played.emitted) for played in rounds.trace.committed] == [1] * 24
    assert all(is_told for _, is_told in scorer.asked[:-1]), "the target is told what follows, as in any other round"


async def test_what_was_foreseen_is_kept_to() -> None:
    """Whatever the load is now: it was measured after later draws."""
    shared = SharedStatistics()
    chooser = PlanChooser(shared, [TOY], 8)
    chooser._rest.begin_long()
    assert chooser.choose(100) == RESTING
    left = chooser._rest.num_left
    shared.costs.num_sessions = 50
    assert chooser.choose(100, found=Found(is_foreseen=True)) == RESTING
    assert chooser._rest.num_left == left - 1
    assert chooser.choose(100) != RESTING


class LooksUp(PlanChooser):
    """Rests, and drafts what was looked up in every second round."""

    num_rounds = 0

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        self.num_rounds += 1
        room = min(2, remaining_tokens - 1)
        return DraftPlan(LOOKUP, room, observes=False) if self.num_rounds % 2 and room else RESTING


class FindsTheBeginning(TextLookup):
    """Finds that the text goes on as it began."""

    def find(self, text: Sequence[int]) -> Match:
        return Match(position=1, num_tokens=3)


def counted(name: str, drafter: str) -> float:
    return REGISTRY.get_sample_value(f"specdec_{name}_total", {"drafter": drafter}) or 0.0


async def test_what_is_looked_up_is_answered_with_others() -> None:
    """And each round is counted for its own drafter."""
    rounds, _ = together()
    before = {drafter: counted("drafter_tokens", drafter) for drafter in (NO_DRAFTER, LOOKUP)}
    rounds.chooser = LooksUp(SharedStatistics(), [TOY], 8, looks_up=True)
    parts = RoundParts({TOY: rounds.drafter}, rounds.scorer, TokenRule(), rounds.chooser, lookup=FindsTheBeginning())
    await run_rounds(rounds.generation, parts, rounds.publish)
    statistics = rounds.generation.statistics
    assert statistics.num_draft_tokens > statistics.num_rounds / 2
    assert len(rounds.trace.committed) == math.ceil(statistics.num_rounds / 3)
    metrics.observe_round(Statistics(), rounds.trace.committed[0], 0.0)
    played = rounds.trace.committed[0].joined
    assert {each.drafter for each in played} == {NO_DRAFTER, LOOKUP}
    for drafter in (NO_DRAFTER, LOOKUP):
        tokens = sum(len(each.emitted) for each in played if each.drafter == drafter)
        assert counted("drafter_tokens", drafter) - before[drafter] == tokens


async def plain_tokens() -> list[int]:
    plain = Rounds(fixed=0)
    await plain.run()
    return plain.tokens


# ---- a drafter to fall back on


class FallsBack(RecordingChooser):
    """Looks up first, and notes what was not used."""

    def __init__(self) -> None:
        super().__init__(3)
        self.unused: list[tuple[str | None, int]] = []

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        room = min(3, remaining_tokens - 1)
        return DraftPlan("lookup", room, fallback=DraftPlan(TOY, room)) if room else PLAIN

    def choose_compared(self, chosen: DraftPlan, available: Iterable[str]) -> DraftPlan | None:
        return None

    def observe_unused(self, plan: DraftPlan, proposal: Proposal, base_length: int) -> None:
        self.unused.append((plan.drafter, base_length))


async def falling_back(lookup: ToyDrafter, drafter: ToyDrafter | None = None) -> tuple[Rounds, FallsBack]:
    rounds, chooser = Rounds(), FallsBack()
    drafters = {"lookup": lookup, TOY: drafter or rounds.drafter}
    parts = RoundParts(drafters, rounds.scorer, TokenRule(), chooser)
    await run_rounds(rounds.generation, parts, rounds.publish)
    assert len(rounds.tokens) == 24
    return rounds, chooser


async def test_what_is_missed_is_drafted_by_the_fallback() -> None:
    """Each round is the one's or the other's; what was missed is compared with the text, and its time counts."""
    rounds, chooser = await falling_back(RareDrafter(toy_model(), SEED))
    missed = [outcome.missed for outcome in chooser.outcomes if outcome.missed]
    used = {outcome.plan.drafter for outcome in chooser.outcomes if outcome.num_drafted}
    assert used == {"lookup", TOY}
    assert [plan for plan, _ in chooser.unused] == ["lookup"] * len(missed)
    assert all(len(each.proposal) < MIN_FOUND for each in missed)
    assert rounds.trace.committed[-1].statistics.draft_s == pytest.approx(
        sum(outcome.draft_s for outcome in chooser.outcomes) + sum(each.elapsed_s for each in missed)
    )


async def test_a_failed_fallback_leaves_what_was_found() -> None:
    """A token that was found is scored where the other drafter's worker is away."""
    _, chooser = await falling_back(RareDrafter(toy_model(), SEED), FailingDrafter(toy_model(), SEED))
    assert {outcome.plan.drafter for outcome in chooser.outcomes} - {None} == {"lookup"}
    assert 1 in {outcome.num_drafted for outcome in chooser.outcomes}
    assert not chooser.unused


async def test_a_failed_first_drafter_is_not_missed() -> None:
    _, chooser = await falling_back(FailingDrafter(toy_model(), SEED))
    assert {outcome.plan.drafter for outcome in chooser.outcomes} - {None} == {TOY}
    assert not any(outcome.missed for outcome in chooser.outcomes)
