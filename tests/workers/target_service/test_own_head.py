"""A head of the target worker's own: it drafts what that offers, from the states where they are computed."""

import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
import pytest_asyncio
import torch

from benchmarks.random_heads import save_heads
from specdec.drafting.candidate_tree import Guesses
from specdec.engine import EngineError, EngineLoop
from specdec.exact.lookup import NextRound, TextLookup
from specdec.exact.values import ObservationRequest, Proposal, one_hot
from specdec.heads.drafting.loading import HeadParts, load_runner
from specdec.heads.formats.target import target_folder
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from target_service import loading, own_head, servicer
from target_service.ahead import AheadTask, Following, Outlook, ScoringAhead, look_ahead
from target_service.offering import SessionOffers
from target_service.own_head import (
    MAX_JUDGED,
    MAX_OUTLIER,
    MAX_PIECES,
    MAX_WAITING,
    NUM_FIRST,
    NUM_PROBED,
    PROBED_EVERY,
    WEIGHT,
    HeadDraft,
    OwnHead,
    States,
    WaitingStates,
)
from target_service.scorer import ScoreRound, ScoreTask, Watch
from target_service.settings import TargetSettings
from tests.support.head_drafting import KINDS, TargetStates, asked, drafting
from tests.support.head_drafting import session as head_session
from tests.support.worker_streams import PROMPT, TargetStream, connected_target
from tests.workers.target_service.streams import Rounds, in_module_loop, values

ASKED = pb.NextRound(plain=True, num_offered=6, learns=True)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, seed=1),
    "drawn": SamplingParams(temperature=0.7, top_k=4, seed=2),
    "penalties": SamplingParams(temperature=0.5, seed=3, frequency_penalty=-0.2, presence_penalty=0.1),
}
NUM_ROUNDS = 12


@pytest.fixture(scope="module")
def heads(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained heads of every kind."""
    return dict(save_heads(model_folder, tmp_path_factory.mktemp("heads")))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def with_head(
    request: pytest.FixtureRequest, model_folder: Path, heads: dict[str, Path]
) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """The kind of a head, and a worker that has one; its weights are as they were saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "has_fast_int8", lambda device: False)
        patch.setattr(own_head, "MAX_SHARE", math.inf)
        settings = {"head": str(heads[request.param]), "head_kind": request.param}
        async with connected_target(model_folder, **settings) as connected:
            yield request.param, connected


def rounds(channel: grpc.aio.Channel, name: str, sampling: SamplingParams, asked_for: pb.NextRound = ASKED) -> Rounds:
    return Rounds(TargetStream(channel, name, sampling), sampling, asked_for, list(PROMPT))


@in_module_loop
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("num_together", [1, 8])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_offers_are_scored_as_any_other_draft(
    with_head: tuple[str, grpc.aio.Channel],
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    name: str,
    num_together: int,
) -> None:
    offered = rounds(with_head[1], next(names), SAMPLINGS[name])
    offered.num_together = num_together
    await offered.run(NUM_ROUNDS)
    await offered.stream.close()
    num_begun = NUM_ROUNDS + len(offered.answered)
    assert counted() == (num_begun, num_begun - 1), "only the last one was not asked for"
    assert (offered.num_drafts_together > 0) == (num_together > 1)
    assert sum(map(len, offered.drafts)) > NUM_ROUNDS
    again = rounds(without, next(names), SAMPLINGS[name])
    for draft in offered.drafts:
        await again.round(draft)
    assert again.text == offered.text
    assert list(map(values, again.answers)) == list(map(values, offered.answers))
    plain = rounds(without, next(names), SAMPLINGS[name])
    await plain.decode(len(offered.text))
    assert plain.text == offered.text, "no draft changes a token"


@in_module_loop
async def test_offers_are_the_heads(
    with_head: tuple[str, grpc.aio.Channel],
    names: Iterator[str],
    model_folder: Path,
    heads: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a draft worker drafts with the same head, which gets states that are rounded to bfloat16."""
    own_states = ScoreTask.own_states

    def rounded(self: ScoreTask, path: Sequence[int]) -> States | None:
        found = own_states(self, path)
        return found and States(found.start, found.rows.bfloat16())

    monkeypatch.setattr(ScoreTask, "own_states", rounded)
    kind, channel = with_head
    offered = rounds(channel, next(names), SAMPLINGS["greedy"])
    target, num_equal = TargetStates(model_folder), 0
    with drafting(kind, heads[kind], model_folder) as drafter:
        for number in range(NUM_ROUNDS):
            await offered.round(offered.offer)
            session = head_session(f"{number}", len(PROMPT), temperature=0.0)
            states = target.observations(offered.text, drafter.observations.hidden_layers)
            expected = (await asked(drafter, session, offered.text, states, ASKED.num_offered)).proposal
            assert expected
            num_equal += (offered.offer.tokens, offered.offer.tree) == (expected.tokens, expected.tree)
    assert num_equal >= NUM_ROUNDS - 1, "transformers' states may be rounded otherwise"


@in_module_loop
async def test_rounds_that_show_the_head_nothing_cost_drafts_alone(
    with_head: tuple[str, grpc.aio.Channel], without: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """The states of a round that learns nothing are lost; later ones heal that."""
    kind, channel = with_head
    offered = rounds(channel, next(names), SAMPLINGS["greedy"])
    sizes = []
    for number in range(NUM_ROUNDS):
        offered.next_round = pb.NextRound(plain=True) if number in (3, 4) else ASKED
        await offered.round(offered.offer)
        sizes.append(len(offered.offer))
    assert sizes[3:5] == [0, 0]
    assert all(sizes[6:]), f"{kind} drafts again once it sees the states at the text's end"
    again = rounds(without, next(names), SAMPLINGS["greedy"])
    for draft in offered.drafts:
        await again.round(draft)
    assert again.text == offered.text


@in_module_loop
async def test_a_head_that_fails_costs_drafts_alone(
    with_head: tuple[str, grpc.aio.Channel], names: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rounds(with_head[1], next(names), SAMPLINGS["greedy"])
    await whole.run(NUM_ROUNDS)

    def fail(self: OwnHead, *args: object) -> list[Proposal]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(OwnHead, "_drafted", fail)
    failing = rounds(with_head[1], next(names), SAMPLINGS["greedy"])
    while len(failing.text) < len(whole.text):
        await failing.run(1)
    assert failing.text[: len(whole.text)] == whole.text


@in_module_loop
@pytest.mark.parametrize("method", ["after", "offered"])
async def test_what_follows_may_fail(
    with_head: tuple[str, grpc.aio.Channel], names: Iterator[str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the engine's thread: the round that was scored is answered, and so are those that come."""
    whole = rounds(with_head[1], next(names), SAMPLINGS["greedy"])
    await whole.run(NUM_ROUNDS)

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Following, method, fail)
    failing = rounds(with_head[1], next(names), SAMPLINGS["greedy"])
    while len(failing.text) < len(whole.text):
        await failing.run(1)
        assert not failing.offer
    assert failing.text[: len(whole.text)] == whole.text


@in_module_loop
async def test_many_sessions_do_not_wait_for_the_head(
    with_head: tuple[str, grpc.aio.Channel], names: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of = list[Sequence[HeadDraft]]()
    draft = OwnHead.draft

    def noted(self: OwnHead, given: Sequence[HeadDraft]) -> list[Proposal]:
        asked_of.append(given)
        return draft(self, given)

    monkeypatch.setattr(OwnHead, "draft", noted)
    monkeypatch.setattr(servicer, "MAX_HEAD_SESSIONS", -1)
    await rounds(with_head[1], next(names), SAMPLINGS["greedy"]).run(NUM_ROUNDS)
    assert not asked_of
    monkeypatch.setattr(servicer, "MAX_HEAD_SESSIONS", 99)
    await rounds(with_head[1], next(names), SAMPLINGS["greedy"]).run(NUM_ROUNDS)
    assert asked_of


def states(start: int, count: int) -> States:
    return States(start, torch.arange(start, start + count, dtype=torch.float32).view(-1, 1, 1))


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ((3, 4), (7, 2), (3, 6)),  # goes on
        ((3, 4), (5, 1), (3, 3)),  # went back
        ((3, 4), (3, 1), (3, 1)),  # went back to the beginning
        ((3, 4), (8, 2), (8, 2)),  # some are missing
        ((3, 4), (2, 2), (2, 2)),  # went back further
        ((0, MAX_WAITING), (MAX_WAITING, 5), (5, MAX_WAITING)),
    ],
)
def test_states_of_rounds_are_joined(first: tuple[int, int], later: tuple[int, int], expected: tuple[int, int]) -> None:
    waiting = WaitingStates()
    for each in (first, later):
        waiting.add(states(*each))
    joined = waiting.take()
    assert (joined.start, joined.rows.flatten().tolist()) == (
        expected[0],
        [float(position) for position in range(expected[0], sum(expected))],
    )


@pytest.mark.parametrize(("end", "count"), [(2, None), (3, None), (4, 1), (6, 3), (9, 3)])
def test_states_of_a_text_that_was_left_go(end: int, count: int | None) -> None:
    waiting = WaitingStates()
    for position in (3, 4, 5):
        waiting.add(states(position, 1))
    waiting.truncate(end)
    assert waiting.end == (3 + count if count else -1)
    assert count is None or waiting.take().rows.flatten().tolist() == [3.0 + index for index in range(count)]


def test_states_of_many_rounds_wait_in_few_pieces() -> None:
    waiting = WaitingStates()
    for position in range(2 * MAX_WAITING):
        waiting.add(states(position, 1))
        assert len(waiting._pieces) <= MAX_PIECES
    joined = waiting.take()
    assert (joined.start, joined.end, joined.rows[0].item()) == (MAX_WAITING, 2 * MAX_WAITING, MAX_WAITING)
    assert waiting.end == -1


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_that_draft_together_draft_as_alone(kind: str, model_folder: Path, heads: dict[str, Path]) -> None:
    target = target_folder(str(model_folder))

    def new_head() -> OwnHead:
        device = torch.device("cpu")
        return OwnHead(load_runner(kind, HeadParts(str(heads[kind]), target, 300, device, torch.float32, 1 << 24)))

    def asked_of(number: int, head: OwnHead) -> HeadDraft:
        rows = torch.randn(9, len(head.layers), target.hidden_size, generator=torch.Generator().manual_seed(number))
        return HeadDraft(head_session(f"{number}"), list(range(number, number + 10)), States(0, rows), 4 + number)

    together, alone = new_head(), new_head()
    drafts = together.draft([asked_of(number, together) for number in range(3)])
    assert all(drafts)
    assert len({draft.tokens for draft in drafts}) == 3
    for number, draft in enumerate(drafts):
        assert alone.draft([asked_of(number, alone)]) == [draft]


class Rules:
    """What follows a round of a session: a draft of the head's, or nothing that it drafts."""

    def __init__(self, number: int, is_of_head: bool) -> None:
        self.head, self._number, self._is_of_head = self, number, is_of_head

    def draft(self, asked: Sequence[HeadDraft]) -> list[Proposal]:
        return [chain_of(each.count) for each in asked]

    def after(self, task: object) -> Outlook:
        session = head_session(f"{self._number}")
        draft = HeadDraft(session, [], states(0, 1), 10 * self._number)
        return Outlook([self._number], text=[], head_draft=draft if self._is_of_head else None)

    def offered(self, task: object, outlook: Outlook, drafted: Proposal) -> Outlook:
        return replace(outlook, draft=drafted)


def chain_of(*tokens: int) -> Proposal:
    return Proposal(tokens, tuple(map(one_hot, tokens)))


class Ahead(AheadTask):
    """Notes what it is to score."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules  # type: ignore[assignment]

    def expect(self, previous: object, outlook: Outlook) -> None:
        self.noted = outlook


def test_each_session_of_a_forward_gets_its_own_draft() -> None:
    """Also where the head drafts for some of them alone."""
    aheads = [Ahead(Rules(number, is_of_head=number != 2)) for number in range(1, 5)]
    tasks = [
        SimpleNamespace(
            session=head_session(f"{number}"),
            following=ahead,
            submission=SimpleNamespace(error=None, abandoned=number == 3),
        )
        for number, ahead in enumerate(aheads, start=1)
    ]
    look_ahead(tasks)  # type: ignore[arg-type]
    assert [ahead.noted.draft for ahead in aheads if ahead.has_looked] == [chain_of(10), Proposal(), chain_of(40)]
    assert [ahead.has_looked for ahead in aheads] == [True, True, False, True], "nobody awaits the third"


@pytest.mark.parametrize("was_worth", [None, False, True])
@pytest.mark.parametrize("num_offered", [0, 4])
async def test_what_a_head_makes_needless_is_left_out(
    was_worth: bool | None, num_offered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it drafts nobody is told of the most probable tokens; only where it may draft another thread is asked."""
    offers = SessionOffers(head_session(), None)
    head = None if was_worth is None else cast(OwnHead, SimpleNamespace(was_worth=was_worth))
    engine = cast(EngineLoop[ScoreTask], SimpleNamespace(follow=lambda previous, task: None))
    looked_on = list[str]()  # threads
    monkeypatch.setattr(AheadTask, "look", lambda ahead, previous: looked_on.append(threading.current_thread().name))
    ahead = ScoringAhead(engine, True, lambda: offers)
    task = scored(torch.zeros(0), 6, [], Watch(), num_tokens=4)
    ahead.begin(task, Watch(), NextRound(plain=True, num_offered=num_offered, learns=True), head)
    assert task.offers is offers
    assert task.reports_to is (None if was_worth else offers)
    await ahead.note_scored(task)
    is_own = looked_on == [threading.current_thread().name]
    assert is_own == (head is None or not num_offered)
    assert len(looked_on) == 1


def scored(states_at: torch.Tensor, start: int, draft: Sequence[int], watch: Watch, num_tokens: int) -> ScoreTask:
    """Return a task that was scored: a text of `start` and `num_tokens` tokens, then a draft."""
    given = ScoreRound(start, range(num_tokens), draft, [(token,) for token in draft], (0, 0, 2)[: len(draft)])
    task = ScoreTask(head_session(), given, watch, match=False)
    task.hidden_states = states_at
    return task


def test_the_head_reads_its_layers_at_committed_tokens_alone() -> None:
    """Of a tree the accepted path; beside what a drafter asked for, which gets its own window of its own layers."""
    watch = Watch(ObservationRequest(hidden_layers=(1, 5)), window=2, own_layers=(0, 5))
    assert watch.hidden_layers == (0, 1, 5)
    assert watch.num_observed(3) == MAX_WAITING + 3
    at = torch.tensor([[[100.0 * layer + place] for layer in watch.hidden_layers] for place in range(4 + 3)])
    task = scored(at, 6, [7, 8, 9], watch, num_tokens=4)
    own = task.own_states((1, 2))
    assert own is not None
    assert (own.start, own.end) == (6, 12)
    assert own.rows.squeeze(-1).tolist() == [[place, 500.0 + place] for place in (0, 1, 2, 3, 5, 6)]
    for path, places in (((), (0, 1, 2, 3)), ((0,), (0, 1, 2, 3, 4)), ((1,), (0, 1, 2, 3, 5))):
        kept = task.own_states(path)
        assert kept is not None
        assert kept.rows[:, 0, 0].tolist() == list(places)
    asked_for = task.states_of(watch.request.hidden_layers, watch.window)
    assert asked_for is not None
    assert asked_for.squeeze(-1).tolist() == [[100.0 + place, 500.0 + place] for place in (2, 3, 4, 5, 6)]
    assert scored(at, 6, [7, 8, 9], Watch(), num_tokens=4).own_states(()) is None
    assert Watch().num_observed(3) == 0


def test_the_head_drafts_from_the_states_at_the_end_of_the_text() -> None:
    offers, text, asked_for = SessionOffers(head_session(), None), list(range(10)), NextRound(num_offered=4)
    assert offers.head_draft(text, TextLookup(), asked_for) is None
    offers.observe(5, states(3, 4))
    assert offers.head_draft(text, TextLookup(), asked_for) is None, "states before the last token are missing"
    offers.observe(8, states(7, 2))
    drafted = offers.head_draft(text, TextLookup(), asked_for)
    assert drafted is not None
    assert (drafted.states.start, drafted.states.end, drafted.count) == (3, 9, 4)
    assert offers.head_draft(text, TextLookup(), asked_for) is None, "it has them now"


def test_states_of_rounds_that_are_taken_back_go() -> None:
    """Also by a round at which nothing is observed."""
    offers, asked_for = SessionOffers(head_session(), None), NextRound(num_offered=4)
    offers.observe(5, states(3, 6))
    offers.observe(6, None)
    assert offers.head_draft(list(range(10)), TextLookup(), asked_for) is None
    drafted = offers.head_draft(list(range(7)), TextLookup(), asked_for)
    assert drafted is not None
    assert (drafted.states.start, drafted.states.end) == (3, 6)


def test_what_followed_the_texts_end_before_joins_the_heads_tree() -> None:
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    offers = SessionOffers(head_session(), None)
    offers.observe(8, states(3, 6))
    drafted = offers.head_draft(text, TextLookup(), NextRound(num_offered=3, stop_below=0.02))
    assert drafted is not None
    assert (drafted.guesses.tokens, drafted.guesses.parents) == ([8, 9, 1], [0, 1, 2])
    assert 1 > drafted.guesses.chances[0] > drafted.guesses.chances[1] > drafted.guesses.chances[2] > 0.02
    assert drafted.stop_below == 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_drafted_beside_what_the_head_finds(kind: str, model_folder: Path, heads: dict[str, Path]) -> None:
    target, device = target_folder(str(model_folder)), torch.device("cpu")
    head = OwnHead(load_runner(kind, HeadParts(str(heads[kind]), target, 300, device, torch.float32, 1 << 24)))
    rows = torch.randn(9, len(head.layers), target.hidden_size, generator=torch.Generator().manual_seed(1))

    def drafted(number: int, guesses: Guesses, stop_below: float = 0.0) -> Proposal:
        asked = HeadDraft(head_session(f"{number}"), list(range(10)), States(0, rows), 6, stop_below, guesses)
        (proposal,) = head.draft([asked])
        return proposal

    alone = drafted(1, Guesses())
    joined = drafted(2, Guesses([250, 251], [0, 1], [0.9, 0.8]))
    assert joined.tokens[:2] == (250, 251)
    assert joined.parents[:2] == (0, 1)
    assert set(joined.tokens[2:]) & set(alone.tokens)
    assert len(joined.tokens) == 6
    assert drafted(3, Guesses([250], [0], [0.9]), stop_below=0.99) == Proposal()


def test_an_offer_is_never_larger_than_the_text_may_grow() -> None:
    for max_length, count in ((9, 0), (11, 0), (12, 1), (99, 4)):
        offers = SessionOffers(head_session(), None)
        offers.observe(8, states(3, 6))
        drafted = offers.head_draft(list(range(10)), TextLookup(), NextRound(num_offered=4, max_length=max_length))
        assert (drafted.count if drafted else 0) == count


class SlowRunner:
    """A head whose drafts take as long as they are said to."""

    class observations:
        hidden_layers = (1,)


def head_with_drafts_of(seconds: float) -> OwnHead:
    head = OwnHead(SlowRunner())  # type: ignore[arg-type]
    head._num_drafts, head._draft_s = NUM_FIRST, seconds
    return head


def test_a_head_drafts_where_that_takes_little_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_head, "MAX_SHARE", 0.5)
    head = head_with_drafts_of(0.004)
    assert all(head.is_worth(0.010) for _ in range(2 * PROBED_EVERY))
    probed = [head.is_worth(0.006) for _ in range(2 * PROBED_EVERY)]
    assert probed == 2 * [*[False] * (PROBED_EVERY - NUM_PROBED), *[True] * NUM_PROBED], "it is measured now and then"


@pytest.mark.parametrize(("num_read", "factor"), [(MAX_JUDGED, 1 + WEIGHT * (MAX_OUTLIER - 1)), (MAX_JUDGED + 1, 1)])
def test_only_drafts_that_read_little_are_judged(num_read: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft of a session reads its prompt; one slow draft does not end drafting either."""
    head = head_with_drafts_of(0.001)
    monkeypatch.setattr(head, "_begun", lambda asked: asked)
    monkeypatch.setattr(head, "_drafted", lambda rounds: time.sleep(0.01))
    both = [HeadDraft(head_session(f"s{count}"), [1], states(0, count), 4) for count in (1, num_read)]
    head.draft(both)
    assert head._draft_s == pytest.approx(0.001 * factor)


def test_a_head_that_reads_much_whenever_it_is_measured_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_head, "MAX_SHARE", 0.5)
    head = head_with_drafts_of(0.004)
    monkeypatch.setattr(head, "_begun", lambda asked: asked)
    monkeypatch.setattr(head, "_drafted", lambda rounds: [])
    for _ in range(10 * PROBED_EVERY):
        if head.is_worth(0.006) and not head.was_worth:
            head.draft([HeadDraft(head_session("s"), [1], states(0, MAX_JUDGED + 1), 4)])
    assert head.was_worth


def test_first_drafts_are_not_judged() -> None:
    head = OwnHead(SlowRunner())  # type: ignore[arg-type]
    assert head.is_worth(0.0)


async def test_a_head_of_another_target_is_refused(model_folder: Path) -> None:
    models = Path(__file__).parents[3] / "models"
    with pytest.raises(EngineError, match=r"reads states of size 384; those of .* have 48; .* choose another head"):
        async with connected_target(model_folder, head=str(models / "demo_heads" / "eagle3")):
            pass


def test_a_head_without_scoring_ahead_is_refused() -> None:
    settings = TargetSettings(model="m", head="h", score_ahead=False)
    assert any("leave out --head or --no-score-ahead" in problem for problem in settings.problems())
    assert not list(TargetSettings(model="m", head="h").problems())
