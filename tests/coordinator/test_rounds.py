"""The loop: what is committed when, what ends it, and that a commit under way is never left alone."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from coordinator.draft import Drafted
from coordinator.draft_length import Costs, DraftLength
from coordinator.generation import Generation, Limits, Round
from coordinator.rounds import run_rounds
from coordinator.target import Scored
from specdec.errors import FencedError, UnavailableError
from specdec.exact.values import Proposal
from specdec.types import FinishReason, SamplingParams
from tests.support.toys import NoText, ToyDrafter, ToyModel, ToyScorer, markov_logits

PROMPT = (1,)
MAX_TURNS = 100_000  # of the event loop: what has not happened by then waits for itself
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


class TracedScorer(ToyScorer):
    """The toy scorer; tells when it is asked, and can be told to wait or to fail."""

    trace: Trace
    before: Callable[[int], object]

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        number = sum(kind == "score" for kind, _ in self.trace.events)
        self.trace.events.append(("score", number))
        waiting = self.before(number)
        if waiting is not None:
            await waiting  # type: ignore[misc]
        return await super().score(committed, proposal)


class Rounds:
    """One generation's loop with toys, and a commit that a test holds in its hands."""

    def __init__(self, fixed: int = 3) -> None:
        self.generation = new_generation()
        self.trace = Trace()
        self.scorer = TracedScorer(ToyModel(markov_logits(1), SAMPLING, prompt=PROMPT), SEED)
        self.scorer.trace, self.scorer.before = self.trace, lambda number: None
        self.drafter = ToyDrafter(ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT), SEED)
        self.length = DraftLength(Costs(), 8, fixed)
        self.gates: dict[int, asyncio.Event] = {}  # commits that wait
        self.failing: dict[int, Exception] = {}  # commits that fail

    async def run(self) -> None:
        await run_rounds(self.generation, self.drafter, self.scorer, self.length, self.publish)

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


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until something is so."""
    for _ in range(MAX_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def settle() -> None:
    """Let other tasks run as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_all_rounds_are_committed_one_at_a_time_and_in_order() -> None:
    rounds = Rounds()
    await rounds.run()
    assert rounds.generation.finish is FinishReason.LENGTH
    assert rounds.tokens == [entry.token for entry in rounds.generation.emitted]
    lengths = [played.base_length for played in rounds.trace.committed]
    ends = [played.base_length + len(played.emitted) for played in rounds.trace.committed]
    assert lengths == [len(PROMPT), *ends[:-1]]
    assert [number for kind, number in rounds.trace.events if kind == "committed"] == list(range(len(lengths)))


async def test_the_next_round_overlaps_the_commit_and_the_one_after_does_not() -> None:
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
async def test_a_commit_that_fails_ends_the_loop(number: int) -> None:
    rounds = Rounds()
    rounds.failing[number] = FencedError("another coordinator has it")
    with pytest.raises(FencedError):
        await rounds.run()
    assert len(rounds.trace.committed) == number
    assert max(index for kind, index in rounds.trace.events if kind == "commit") == number


async def test_a_failing_last_commit_is_not_overlooked() -> None:
    whole = Rounds()
    await whole.run()
    rounds = Rounds()
    rounds.failing[len(whole.trace.committed) - 1] = UnavailableError("the store is gone")
    with pytest.raises(UnavailableError):
        await rounds.run()


async def test_cancellation_awaits_the_commit_under_way() -> None:
    """Wherever it strikes: while the next round is played, and while the loop waits for the commit."""
    for is_scoring in (True, False):
        rounds = Rounds()
        rounds.gates[0] = asyncio.Event()
        if is_scoring:
            never = asyncio.Event()
            rounds.scorer.before = lambda number, never=never: never.wait() if number else None
        task = asyncio.create_task(rounds.run())
        await until(lambda rounds=rounds: ("score", 1) in rounds.trace.events)
        await settle()
        task.cancel()
        await settle()
        assert not task.done()
        rounds.gates[0].set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [entry for entry in rounds.trace.events if entry[0] == "committed"] == [("committed", 0)]


async def test_a_round_that_fails_still_awaits_the_commit() -> None:
    rounds = Rounds()
    rounds.gates[0] = asyncio.Event()

    def fail(number: int) -> None:
        if number == 1:
            rounds.gates[0].set()
            raise UnavailableError("no target worker")

    rounds.scorer.before = fail
    with pytest.raises(UnavailableError, match="no target"):
        await rounds.run()
    assert len(rounds.trace.committed) == 1


async def test_a_commit_s_failure_wins_over_the_round_s() -> None:
    """FencedError or cancelled says more than that a worker also failed."""
    rounds = Rounds()
    rounds.failing[0] = FencedError("another coordinator has it")

    def fail(number: int) -> None:
        if number == 1:
            raise UnavailableError("no target worker")

    rounds.scorer.before = fail
    with pytest.raises(FencedError):
        await rounds.run()


class ForgetfulDrafter(ToyDrafter):
    """A drafter whose worker is gone from the third round on."""

    num_calls = 0
    kept: list[tuple[int, int]]

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        self.num_calls += 1
        return await super().propose(committed, num_draft_tokens) if self.num_calls < 3 else Drafted()

    def keep(self, num_tokens: int, cached_len: int) -> None:
        self.kept.append((num_tokens, cached_len))


async def test_without_a_draft_worker_it_goes_on_and_nothing_is_noted_of_its_cache() -> None:
    rounds = Rounds()
    rounds.drafter = drafter = ForgetfulDrafter(ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT), SEED)
    drafter.kept = []
    await rounds.run()
    assert len(rounds.tokens) == 24
    assert len(drafter.kept) == 2
    played = rounds.trace.committed[0]
    assert drafter.kept[0] == (played.base_length + played.statistics.num_accepted_tokens, len(PROMPT))


@pytest.mark.parametrize("fixed", [0, 1, 3, 8])
async def test_never_more_drafted_than_there_is_room_for(fixed: int) -> None:
    rounds = Rounds(fixed)
    asked: list[tuple[int, int]] = []
    propose = rounds.drafter.propose

    class Asked(ToyDrafter):
        async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
            asked.append((len(committed), num_draft_tokens))
            return await propose(committed, num_draft_tokens)

    rounds.drafter = Asked(rounds.drafter.model, SEED)
    await rounds.run()
    assert all(length + count + 1 <= len(PROMPT) + 24 for length, count in asked)
    assert max(count for _, count in asked) == fixed
    assert len(rounds.tokens) == 24


async def test_rounds_that_had_more_to_read_than_a_round_s_tokens_do_not_count_as_what_a_round_costs() -> None:
    """The first, whose streams opened, and one whose worker was replaced by another that had to read everything."""
    rounds, observed = Rounds(), list[int]()

    @dataclass(slots=True)
    class Recorder(Costs):
        def observe(self, num_draft_tokens: int, draft_s: float, score_s: float) -> None:
            observed.append(len(rounds.generation.committed))

    class Replaced(TracedScorer):
        async def score(self, committed: list[int], proposal: Proposal) -> Scored:
            scored = await super().score(committed, proposal)
            return replace(scored, num_fed=41) if len(self.trace.committed) == 3 else scored

    rounds.scorer.__class__ = Replaced
    rounds.length.costs = Recorder()
    await rounds.run()
    counted = [played.base_length + len(played.emitted) for played in rounds.trace.committed]
    assert len(counted) > 5
    assert observed == [length for number, length in enumerate(counted) if length in observed]
    assert len(observed) == len(counted) - 2
    assert counted[0] not in observed
