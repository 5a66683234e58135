"""Which new sessions are let in, on a clock that the tests move."""

import asyncio
import random
from contextlib import aclosing, suppress
from contextvars import copy_context

import pytest

from coordinator.admission import (
    CALM_S,
    CROWDED_MARGIN,
    FEW_CHUNKS,
    MARGIN,
    STALE_S,
    STANDING_CROWDED_MARGIN,
    STANDING_MARGIN,
    STANDING_S,
    TENANT_MEMORY_S,
    Admission,
    Ticket,
)
from coordinator.loads import ReportedLoads, TargetLoad
from coordinator.servicer import GenerationServicer
from coordinator.session_ids import SECRET_BYTES, SessionIds, SessionName
from coordinator.sessions import open_store
from specdec.errors import NotFoundError, OverloadedError
from specdec.outside import Outside
from specdec.serving.event_loop import Priority, set_priority
from specdec.v1 import generation_pb2, types_pb2
from tests.support.toy_coordinator import PROMPT, ToyCoordinator

TOKEN_S = 0.01  # of a session alone
LENGTH = 100


class World:
    """Sessions that share a target: with n of them each token takes n times as long."""

    def __init__(self) -> None:
        self.now_s, self.load = 0.0, TargetLoad()
        self.outside = Outside(lambda: self.now_s, lambda: 0.5)
        self.admission = Admission(lambda: self.load, self.outside)
        self.tickets: list[Ticket] = []

    def enter(self, tenant: str = "", num_tokens: int = LENGTH, left_s: float | None = 8.0) -> Ticket:
        self.admission.check(tenant, 10, num_tokens, left_s)
        self.tickets.append(self.admission.enter(tenant, num_tokens, left_s))
        return self.tickets[-1]

    def run(self, num_tokens: int = 1) -> None:
        """Let every session write so many tokens."""
        for _ in range(num_tokens):
            self.now_s += TOKEN_S * len(self.tickets)
            for ticket in list(self.tickets):
                self.admission.progress(ticket, 1)
                if ticket.num_done >= ticket.num_tokens:
                    self.end(ticket)

    def end(self, ticket: Ticket, *, is_complete: bool = True) -> None:
        self.tickets.remove(ticket)
        self.admission.leave(ticket, is_complete=is_complete)

    def empty(self) -> None:
        """Let all sessions' clients leave."""
        for ticket in list(self.tickets):
            self.end(ticket, is_complete=False)

    def fill(self, tenant: str = "", left_s: float | None = 8.0) -> int:
        """Let sessions in until one is refused; return how many."""
        for count in range(1000):
            try:
                self.enter(tenant, left_s=left_s)
            except OverloadedError:
                return count
        raise AssertionError("nothing was refused")


@pytest.fixture
def world() -> World:
    """Knows the time of a token and the length of texts."""
    world = World()
    world.enter()
    world.run(LENGTH)
    assert not world.tickets
    world.now_s += 2 * TENANT_MEMORY_S
    return world


def test_everybody_is_let_in_before_anything_is_measured() -> None:
    world = World()
    for _ in range(50):
        world.enter()


def test_sessions_are_let_in_while_they_meet_their_deadlines(world: World) -> None:
    # n sessions take n * 1 s
    assert world.fill() == int(8.0 * MARGIN)
    begin_s = world.now_s
    world.run(LENGTH)
    assert world.now_s <= begin_s + 8.0
    assert world.fill() == int(8.0 * MARGIN), "as many again, once these have ended"


def test_fewer_are_let_in_at_once_while_there_are_always_too_many(world: World) -> None:
    num_burst = world.fill()
    world.now_s += STANDING_S
    world.fill()
    world.empty()
    assert num_burst == int(8.0 * MARGIN)
    assert world.fill() == int(8.0 * STANDING_MARGIN)


def test_a_tenant_below_its_share_is_not_cut_by_what_another_asks_too_much(world: World) -> None:
    """The other one is, as soon as it is refused all the time."""
    world.enter("modest")
    world.fill("greedy")
    world.now_s += STANDING_S
    world.fill("greedy")
    world.empty()
    assert world.fill("greedy") == int(8.0 * STANDING_CROWDED_MARGIN)
    world.enter("modest", left_s=1.01 * (len(world.tickets) + 1) / MARGIN)


def test_a_burst_may_queue_again_after_a_pause(world: World) -> None:
    world.fill()
    world.now_s += STANDING_S
    world.fill()
    world.empty()
    world.now_s += 1.1 * CALM_S
    assert world.fill() == int(8.0 * MARGIN)


@pytest.mark.parametrize("num_sessions", [1, 2, 3])
@pytest.mark.parametrize("num_before", [0, 1, 2, 5, 20, 100])
def test_a_coordinator_that_stood_still_for_seconds_refuses_nobody_for_it(num_sessions: int, num_before: int) -> None:
    """However few chunks it had measured: a client that is refused stays away for longer than this lasts."""
    world = World()
    for _ in range(num_sessions):
        world.enter(num_tokens=400, left_s=300.0)
    world.run(1 + num_before)
    world.now_s += 8.0
    left_s = 100.0 if num_before * num_sessions < FEW_CHUNKS else 300.0
    for _ in range(2 * FEW_CHUNKS):
        world.run()
        world.admission.check("", 10, 400, left_s)


def test_long_chunks_that_come_again_and_again_count_as_they_are() -> None:
    """As where sessions have places in the cache in turn: one chunk in 20 takes 0.5 s, the others 0.01 s."""
    world = World()
    world.enter(num_tokens=10_000, left_s=10_000.0)
    for number in range(2000):
        world.now_s += 0.49 if number % 20 == 0 else 0.0
        world.run()
    world.admission.check("", 10, LENGTH, 14.0)  # 100 tokens at 0.02 to 0.045 s, and twice that with two sessions
    with pytest.raises(OverloadedError):
        world.admission.check("", 10, LENGTH, 5.0)


def test_a_service_that_has_become_slower_is_known_as_such_after_some_rounds(world: World) -> None:
    for _ in range(3):
        world.enter(num_tokens=1000, left_s=1000.0)
    world.run(100)
    for _ in range(30):
        world.now_s += 29 * TOKEN_S * len(world.tickets)
        world.run()
    with pytest.raises(OverloadedError):
        world.enter(left_s=0.8 * 30 * TOKEN_S * LENGTH * 4)


def test_a_few_quick_rounds_let_nobody_in(world: World) -> None:
    """Rounds of many sessions take from a fifth to five times the mean, which is what they take in the end."""
    for _ in range(5):
        world.enter(num_tokens=1000, left_s=None)
    world.run(40)
    for round_s in 20 * (0.2, 0.2, 0.2, 0.2, 4.2):  # times the mean
        world.now_s += (round_s - 1) * TOKEN_S * len(world.tickets)
        world.run()
        num_before = len(world.tickets)
        assert num_before + world.fill() in range(5, int(8.0 * MARGIN) + 2)
        for ticket in world.tickets[num_before:]:
            world.end(ticket, is_complete=False)


def test_the_first_quick_chunks_of_a_service_do_not_count_for_long() -> None:
    world = World()
    for _ in range(20):
        world.enter(num_tokens=1000, left_s=None)
    world.run()
    world.now_s -= 0.99 * TOKEN_S * len(world.tickets)  # the next chunks come after a hundredth of their time
    world.run(6)
    with pytest.raises(OverloadedError):
        world.enter()


def test_a_client_that_takes_nothing_says_nothing_of_the_service(world: World) -> None:
    slow = world.enter(left_s=None)
    world.run(10)
    world.now_s += 58.0
    world.admission.sent(slow)
    world.run(60)  # chunks that had gathered
    world.end(slow, is_complete=False)
    assert world.fill() == int(8.0 * MARGIN)


@pytest.mark.parametrize("idle_s", [0.0, 1.1 * STALE_S])
def test_what_was_slow_is_tried_anew_after_a_while(world: World, idle_s: float) -> None:
    world.enter(left_s=None)
    while world.tickets:
        world.now_s += 10.0
        world.run()
    world.now_s += idle_s
    if idle_s:
        world.enter()
    else:
        with pytest.raises(OverloadedError):
            world.enter()


def test_an_idle_service_takes_what_it_can_serve_from_one_who_was_refused_all_the_time(world: World) -> None:
    world.enter(left_s=None)
    world.run(LENGTH)
    for _ in range(2):
        world.fill()
        world.now_s += STANDING_S
    world.empty()
    world.enter(left_s=1.0 / (0.9 * MARGIN))


def test_a_service_that_writes_slowly_is_measured_all_the_same(world: World) -> None:
    session = world.enter(left_s=None)
    while world.tickets:
        world.now_s += 3 * TOKEN_S
        world.admission.sent(session)  # its loop is busy: it took most of the time
        world.run()
    assert world.fill() == int(8.0 * MARGIN / 4)


async def test_the_servicer_tells_when_a_chunk_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_s, progress = list[float](), Admission.progress

    def note(admission: Admission, ticket: Ticket, num_tokens: int) -> None:
        if ticket.last_s is not None:
            taken_s.append(ticket.sent_s - ticket.last_s)
        progress(admission, ticket, num_tokens)

    monkeypatch.setattr(Admission, "progress", note)

    class Context:
        """Of a client that takes a while."""

        def time_remaining(self) -> float:
            return 8.0

        async def send_initial_metadata(self, metadata: object) -> None:
            pass

        async def write(self, message: object) -> None:
            await asyncio.sleep(0.02)

    store = open_store("memory", 1000.0)
    servicer = GenerationServicer(ToyCoordinator(store), SessionIds(bytes(SECRET_BYTES)))
    await servicer.Generate(generation_pb2.GenerateRequest(tokens=generation_pb2.TokenSequence(ids=PROMPT)), Context())
    await store.close()
    assert taken_s
    assert min(taken_s) >= 0.015


def test_many_tenants_with_one_session_each_are_let_in(world: World) -> None:
    num_in = 0
    for number in range(30):
        with suppress(OverloadedError):
            world.enter(f"tenant {number}")
            num_in += 1
    assert num_in == int(8.0 * MARGIN)


def test_a_long_deadline_gives_a_tenant_no_larger_share(world: World) -> None:
    for tenant in ("one", "two"):
        world.enter(tenant)
    counts = list[int]()
    for left_s in (8.0, 3600.0, None):
        num_before = len(world.tickets)
        counts.append(world.fill("greedy", left_s))
        for ticket in world.tickets[num_before:]:
            world.end(ticket, is_complete=False)
    assert counts == [1, 1, 1]


def test_no_deadline_is_no_reason_to_refuse(world: World) -> None:
    for _ in range(100):
        world.enter(left_s=None)


def test_others_deadlines_count(world: World) -> None:
    for _ in range(3):
        world.enter(left_s=5.0)
    with pytest.raises(OverloadedError, match="miss their deadlines"):
        world.enter(left_s=1000.0)


def test_lost_deadlines_do_not_keep_others_out(world: World) -> None:
    ticket = world.enter(left_s=1.5)
    world.now_s += 1.0  # half a second left, for a text that takes one
    assert ticket.num_done == 0
    world.enter(left_s=8.0)


def test_sessions_near_their_end_count_little(world: World) -> None:
    world.enter(left_s=1.5)
    world.run(90)
    world.enter(left_s=8.0)


def test_texts_that_end_early_make_room_for_more(world: World) -> None:
    for _ in range(100):
        ticket = world.enter(num_tokens=1000, left_s=None)
        world.run(LENGTH)
        world.end(ticket)
    world.enter(num_tokens=1000, left_s=2.0)  # of which a tenth is expected


def test_prompts_ahead_count(world: World) -> None:
    world.load = TargetLoad(prompt_s=6.5)
    with pytest.raises(OverloadedError, match=r"would take 6\.5 s"):
        world.enter()


def test_long_prompts_count(world: World) -> None:
    world.load = TargetLoad(prompt_token_s=0.01)
    world.admission.check("", 100, LENGTH, 8.0)
    with pytest.raises(OverloadedError):
        world.admission.check("", 700, LENGTH, 8.0)


def test_waiting_for_a_place_counts(world: World) -> None:
    world.load = TargetLoad(num_resident=10.0, num_without_place=40.0)  # four sessions long, of a second each
    world.admission.check("", 10, LENGTH, 8.0)
    world.load = TargetLoad(num_resident=10.0, num_without_place=60.0)
    with pytest.raises(OverloadedError):
        world.admission.check("", 10, LENGTH, 8.0)


def test_refusals_say_when_to_come_back(world: World) -> None:
    world.fill()
    with pytest.raises(OverloadedError) as refused:
        world.enter()
    assert refused.value.retry_after_s == pytest.approx(0.6, abs=0.1)
    world.load = TargetLoad(prompt_s=1000.0)
    with pytest.raises(OverloadedError) as refused:
        world.enter()
    assert refused.value.retry_after_s == 15.0, "the maximum, and half of it again"


def test_one_tenant_cannot_take_everything(world: World) -> None:
    world.enter("small")
    greedy = world.fill("greedy")
    assert greedy == int(8.0 * MARGIN) // 2, "its share of those that could run"
    for _ in range(greedy - 1):
        world.enter("small")


def test_a_tenant_that_is_always_refused_has_its_share_of_those_that_run(world: World) -> None:
    for _ in range(2):
        world.fill("modest")
        world.now_s += STANDING_S
    world.empty()
    for _ in range(3):
        world.enter("greedy", left_s=None)
    for _ in range(2):
        world.enter("modest")


def test_a_share_is_of_sessions_that_would_meet_ones_own_deadline(world: World) -> None:
    world.end(world.enter("other"), is_complete=False)
    for _ in range(int(8.0 * CROWDED_MARGIN)):
        world.enter("greedy", left_s=None)
    with pytest.raises(OverloadedError, match="its caller waits"):
        world.enter("greedy")


def test_a_burst_of_one_tenant_is_cut_sooner_where_there_are_others(world: World) -> None:
    for tenant in ("one", "two", "three"):
        world.end(world.enter(tenant), is_complete=False)
    assert world.fill("greedy") == int(8.0 * CROWDED_MARGIN)


def test_a_tenant_may_exceed_its_share_of_few_but_one_that_is_always_refused_may_not(world: World) -> None:
    """What is kept short by the greedy one's excess leaves few, and a share of few is soon exceeded by chance."""
    for _ in range(2):
        world.fill("greedy")
        world.now_s += STANDING_S
    world.empty()
    for _ in range(int(8.0 * MARGIN) // 2):
        world.enter("modest")
    with pytest.raises(OverloadedError):
        world.enter("modest")
    world.empty()
    assert world.fill("greedy") == int(8.0 * STANDING_CROWDED_MARGIN)


def test_a_tenant_keeps_its_share_while_it_is_away(world: World) -> None:
    world.end(world.enter("small"))
    world.fill("greedy")
    world.enter("small")


def test_reports_of_loads_are_averaged_and_age() -> None:
    now_s = 0.0
    loads = ReportedLoads(Outside(lambda: now_s))
    loads.report(types_pb2.Load(prompt_s=1.0, num_prompt_tokens=100, num_resident=2))
    loads.report(types_pb2.Load(prompt_s=3.0, num_prompt_tokens=300, num_without_place=4))
    assert loads.load.prompt_s == 2.0
    assert loads.load.prompt_token_s == pytest.approx(0.01)
    assert (loads.load.num_resident, loads.load.num_without_place) == (1.0, 2.0)
    now_s = 6.0
    assert loads.load == TargetLoad(prompt_token_s=loads.load.prompt_token_s)


def test_some_reports_that_are_far_off_change_little() -> None:
    """A worker that is wrong about its load must not keep everybody out."""
    loads = ReportedLoads()
    for number in range(40):
        is_wrong = number % 5 == 0
        loads.report(types_pb2.Load(prompt_s=3600.0 if is_wrong else 1.0, num_prompt_tokens=1 if is_wrong else 100))
    assert loads.load.prompt_s == 1.0
    assert loads.load.prompt_token_s == pytest.approx(0.01)


@pytest.mark.parametrize("prompt_s", [float("nan"), float("inf"), -1.0, 1e9])
def test_impossible_reports_are_ignored(prompt_s: float) -> None:
    loads = ReportedLoads()
    loads.report(types_pb2.Load(prompt_s=prompt_s, num_prompt_tokens=1))
    assert loads.load == TargetLoad()


async def test_refused_requests_write_nothing() -> None:
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store)
    request = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenSequence(ids=PROMPT))
    running = SessionName.of("", "running")
    ticket = await coordinator.begin(request, running, left_s=8.0)
    for _ in range(1 + FEW_CHUNKS):
        coordinator.admission.progress(ticket, 1)
        await asyncio.sleep(0.001)
    with pytest.raises(OverloadedError) as refused:
        await coordinator.begin(request, SessionName.of("", "refused"), left_s=0.001)
    assert refused.value.retry_after_s
    with pytest.raises(NotFoundError):
        await store.read("refused")
    assert len(coordinator.admission) == 1
    async with aclosing(coordinator.follow("running", 0, b"")) as chunks:
        await anext(chunks)
        repeated = await coordinator.begin(request, running, left_s=0.001)  # it runs here already
    coordinator.admission.leave(repeated, is_complete=False)
    await store.close()


class OpenLoop:
    """Requests that come at a rate, whatever becomes of them, at a machine that slows down for seconds."""

    DEADLINE_S, NUM_TOKENS, TOKENS_A_SECOND = 8.0, 64, 350.0
    FORWARD_S, PROMPT_S, REFUSAL_S = 0.008, 0.03, 0.003
    SLOW, PERIOD_S = 0.5, 2.0  # of its speed that is left, every other period

    def __init__(self, rate: float) -> None:
        self._rate, self._random = rate, random.Random(1)
        self.now_s, self._due_s = 0.0, 0.0
        self._admission = Admission(TargetLoad, Outside(lambda: self.now_s, lambda: 0.5))
        self._running: list[Ticket] = []
        self.num_in_time = self.num_late = 0

    def goodput(self, duration_s: float = 60.0) -> float:
        """Return the texts a second that end in time."""
        while self.now_s < duration_s:
            now_s = self.now_s
            while self._due_s <= now_s:
                self._ask()
            if self._running:
                self._forward()
            else:
                self.now_s = max(self.now_s, self._due_s)
        return self.num_in_time / duration_s

    def _ask(self) -> None:
        left_s = self.DEADLINE_S - (self.now_s - self._due_s)
        self._due_s += self._random.expovariate(self._rate)
        self.now_s += self.REFUSAL_S
        with suppress(OverloadedError):
            self._admission.check("", 50, self.NUM_TOKENS, left_s)
            self._running.append(self._admission.enter("", self.NUM_TOKENS, left_s))
            self.now_s += self.PROMPT_S

    def _forward(self) -> None:
        speed = self.SLOW if int(self.now_s / self.PERIOD_S) % 2 else 1.0
        self.now_s += (self.FORWARD_S + len(self._running) / self.TOKENS_A_SECOND) / speed
        for ticket in list(self._running):
            self._admission.progress(ticket, 1)
            is_complete = ticket.num_done >= self.NUM_TOKENS
            if is_complete or self.now_s > ticket.deadline_s:
                self._running.remove(ticket)
                self._admission.leave(ticket, is_complete=is_complete)
                in_time = is_complete and self.now_s <= ticket.deadline_s
                self.num_in_time += in_time
                self.num_late += not in_time


def test_many_requests_leave_the_goodput_what_it_was() -> None:
    """At 2 and 5 times the capacity; at 10 times the refusals take a share too."""
    capacity = OpenLoop.TOKENS_A_SECOND / OpenLoop.NUM_TOKENS
    loads = {factor: OpenLoop(factor * capacity) for factor in (0.8, 1, 2, 5, 10)}
    goodput = {factor: load.goodput() for factor, load in loads.items()}
    peak = max(goodput.values())
    assert min(goodput[2], goodput[5]) >= 0.9 * peak
    assert goodput[10] + 10 * capacity * goodput[10] * OpenLoop.REFUSAL_S >= 0.9 * peak
    assert all(load.num_late <= 0.02 * load.num_in_time for load in loads.values())


def test_a_session_that_is_admitted_goes_in_its_turn() -> None:
    world = World()

    def enter() -> None:
        set_priority(Priority.FIRST)
        world.enter()

    context = copy_context()
    context.run(enter)
    assert [value for variable, value in context.items() if variable.name == "priority"] == [Priority.IN_TURN]
