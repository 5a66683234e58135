"""A short run with every kind of fault breaks nothing, and each planted mistake is found."""

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from signal import SIGSTOP

import pytest
import pytest_asyncio

from specdec.completion import Chunk, Completion, Finish, Usage
from specdec.errors import DataLossError, OverloadedError, SpecdecError, UnavailableError
from specdec.types import FinishReason, SamplingParams, SpeculationParams, Statistics, TokenOrigin
from tests.chaos import soak
from tests.chaos.faults import Done, drawn_faults, kinds_of
from tests.chaos.ledger import Ledger, Session, Text, View
from tests.chaos.mistakes import OF_CLIENTS, OF_PROCESSES
from tests.chaos.models import save_models
from tests.chaos.processes import Nursery, nursery
from tests.chaos.report import gaps_s, how_to_repeat, report
from tests.chaos.run import Plan, run
from tests.chaos.service import Models, Size, running_service

SMALL = Size(num_coordinators=2)
ACCEPTED, RECOVERED, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks() -> AsyncIterator[Nursery]:
    """One process has imported all, and becomes the services of every run."""
    async with nursery() as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_no_fault_breaks_an_invariant(forks: Nursery) -> None:
    plan = Plan(num_sessions=24, num_faults=10, seed=1, num_at_once=8, size=SMALL, longest_fault_s=1.5)
    result = await run(plan, forks)
    assert not result.violations, report(result)
    assert len(result.faults) == 10
    assert len(result.ledger.sessions) == 24


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mistake", [*filter(None, OF_PROCESSES), OF_CLIENTS[0]])
@pytest.mark.long(but=("a target that scores with other weights",))
async def test_mistakes_are_found(forks: Nursery, mistake: str) -> None:
    """The controls: without them a run that finds nothing would prove nothing."""
    size = Size(num_coordinators=1, num_drafts=0)
    result = await run(Plan(num_sessions=8, num_faults=0, seed=2, size=size, mistake=mistake), forks)
    assert result.ledger.violations, report(result)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.long
async def test_short_soak(forks: Nursery) -> None:
    plan = soak.Plan(num_faults=6, seed=3, fault_s=1.0, longest_fault_s=1.0, calibration_s=1.0, look_s=0.5)
    assert await soak.soak(plan, forks) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_lease_that_had_to_lapse_is_no_reason_to_refuse_others(forks: Nursery, tmp_path: Path) -> None:
    """A new coordinator's first measured chunk took 2 s: one came from the log, the next after a claim."""
    models, refusals = Models(*save_models(tmp_path)), list[SpecdecError]()
    sampling = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
    async with (
        running_service(forks, tmp_path, models, Size(num_coordinators=2, num_targets=1, num_drafts=0)) as service,
        service.client(0, 300.0) as first,
        service.client(1, 300.0, on_retry=lambda retry: refusals.append(retry.failure)) as second,
    ):
        owner, _ = service.parts["coordinator"]
        async with first.generate(prompt_token_ids=(1, 2, 3), sampling=sampling) as stream:
            chunks = [await anext(stream) for _ in range(10)]
            owner.send(SIGSTOP)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        async with (
            second.resume(chunks[0].session_id, offset=num_tokens - 1) as resumed,
            second.generate(prompt_token_ids=(1, 2, 4), sampling=sampling) as other,
        ):
            for _ in range(2):
                await anext(resumed)
            await anext(other)
    assert not any(isinstance(failure, OverloadedError) for failure in refusals)


def test_soak_finds_what_grows() -> None:
    flat = [soak.Look(number, {("MB", "target 1"): 200.0 + number % 5}) for number in range(60)]
    assert soak.grown(flat) == []
    rising = [soak.Look(number, {("MB", "target 1"): 200.0 + number}) for number in range(60)]
    assert soak.grown(rising) == ["target 1: 230 MB in the middle, 250 in the end"]


# ---- the ledger


def text(
    tokens: tuple[int, ...], origins: tuple[TokenOrigin, ...], num_draft_tokens: int | None, temperature: float
) -> Text:
    finish = Finish(FinishReason.LENGTH, Usage(1, len(tokens)), Statistics())
    undisturbed = Completion("s", tokens, "", origins, (), b"", finish)
    sampling = SamplingParams(temperature=temperature, seed=1, max_new_tokens=len(tokens))
    return Text((1,), sampling, SpeculationParams(num_draft_tokens=num_draft_tokens, drafter="model"), undisturbed)


GREEDY = text((1, 2, 3, 4), (ACCEPTED, BONUS, ACCEPTED, BONUS), 1, 0.0)
SEEDED = text((1, 2, 3, 4), (ACCEPTED, BONUS, ACCEPTED, BONUS), 1, 1.0)


def chunk(offset: int, *tokens: int, origins: tuple[TokenOrigin, ...] = (), session_id: str = "s") -> Chunk:
    return Chunk(session_id, offset, tokens, "", origins or (BONUS,) * len(tokens), b"")


def seen(ledger: Ledger, of: Text, *chunks: Chunk) -> View:
    """A client that got these chunks, and then its end."""
    session = Session("session", of)
    ledger.sessions.append(session)
    view = ledger.began(session, 0.0)
    for number, each in enumerate(chunks):
        ledger.observed(view, each, 1.0 + number)
    view.end_s = 10.0
    return view


def test_ledger_accepts_what_is_right() -> None:
    ledger = Ledger()
    view = seen(ledger, GREEDY, chunk(0, 1), chunk(1, 2, 3), chunk(3, 4))
    ledger.finish(view.session, [1, 2, 3, 4])
    assert ledger.violations == []


@pytest.mark.parametrize(
    ("chunks", "log", "kind"),
    [
        ([chunk(0, 1, 2), chunk(0, 1, 2), chunk(2, 3, 4)], [1, 2, 3, 4], "doubled"),
        ([chunk(0, 1), chunk(2, 3, 4)], [1, 2, 3, 4], "lost"),
        ([chunk(0, 1, 2), chunk(2, 3, 5)], [1, 2, 3, 5], "changed"),  # the log has it, the target never said it
        ([chunk(0, 1, 2), chunk(2, 3, 4)], [1, 2, 4, 4], "changed"),  # the log was rewritten
        ([chunk(0, 1, 2), chunk(2, 3, 4)], [1, 2, 3], "lost"),  # shown, and never committed
        ([chunk(0, 1, 2), chunk(2, 3)], [1, 2, 3], "lost"),  # it ended early
        ([chunk(0, 1), chunk(1, 2, 3, 4, session_id="t")], [1, 2, 3, 4], "changed"),
    ],
)
def test_ledger_finds_what_is_wrong(chunks: list[Chunk], log: list[int], kind: str) -> None:
    ledger = Ledger()
    ledger.finish(seen(ledger, GREEDY, *chunks).session, log)
    assert ledger.wrong[kind] > 0, ledger.violations


def test_two_clients_of_a_session_see_one_text() -> None:
    ledger = Ledger()
    view = seen(ledger, replace(SEEDED, undisturbed=None), chunk(0, 1, 2))
    ledger.observed(ledger.began(view.session, 0.0), chunk(0, 1, 3), 1.0)
    assert ledger.wrong == {"changed": 1}


@pytest.mark.parametrize(
    ("chunks", "is_right"),
    [
        ([chunk(0, 1, 2, origins=(ACCEPTED, BONUS)), chunk(2, 7, origins=(BONUS,)), chunk(3, 8)], True),  # no draft
        ([chunk(0, 1, 2, origins=(ACCEPTED, BONUS)), chunk(2, 7, 8, origins=(RECOVERED, RECOVERED))], False),
        ([chunk(0, 7, 2, origins=(ACCEPTED, BONUS)), chunk(2, 3, 4, origins=(BONUS, BONUS))], False),
        ([chunk(0, 1, 7, origins=(ACCEPTED, BONUS)), chunk(2, 3, 4, origins=(ACCEPTED, BONUS))], False),
    ],
)
def test_text_of_a_seed_is_compared_up_to_the_first_lost_draft(chunks: list[Chunk], is_right: bool) -> None:
    ledger = Ledger()
    view = seen(ledger, SEEDED, *chunks)
    ledger.finish(view.session, view.tokens)
    assert (not ledger.violations) == is_right


def test_a_run_without_faults_may_lack_drafts_too() -> None:
    """On a busy machine: the rounds before are compared all the same."""
    lacking = text((1, 2, 3, 4), (ACCEPTED, BONUS, BONUS, BONUS), 1, 1.0)
    for tokens, is_right in (((1, 2, 7, 8), True), ((1, 7, 7, 8), False)):
        ledger = Ledger()
        view = seen(ledger, lacking, chunk(0, *tokens, origins=(ACCEPTED, BONUS, ACCEPTED, BONUS)))
        ledger.finish(view.session, tokens)
        assert (not ledger.violations) == is_right


@pytest.mark.parametrize(("went_back", "num_violations"), [(True, 0), (False, 1)])
def test_only_a_store_that_went_back_may_lose_a_session(went_back: bool, num_violations: int) -> None:
    ledger = Ledger()
    view = seen(ledger, GREEDY, chunk(0, 1, 2))
    if went_back:
        ledger.went_back()
    ledger.failed(view.session, DataLossError("lost"))
    assert len(ledger.violations) == num_violations
    ledger.failed(view.session, UnavailableError("gone"))
    assert len(ledger.violations) == num_violations + 1


def test_text_of_a_lost_session_may_not_differ_either() -> None:
    ledger = Ledger()
    view = seen(ledger, GREEDY, chunk(0, 1, 3))
    ledger.went_back()
    ledger.finish(view.session, None)
    assert ledger.wrong == {"changed": 1}


def test_gap_is_the_longest_wait_beside_a_fault() -> None:
    ledger = Ledger()
    seen(ledger, GREEDY, chunk(0, 1), chunk(1, 2))  # at 1 and 2 s; its end at 10 s
    assert gaps_s(ledger, Done("x", 1.2, 1.3)) == [8.0]  # what begins within a second of a fault counts
    assert gaps_s(ledger, Done("x", -2.0, -1.5)) == []
    assert gaps_s(ledger, Done("x", 0.2, 0.3)) == [1.0]
    assert gaps_s(ledger, Done("x", 11.0, 12.0)) == []


@pytest.mark.parametrize("is_durable", [False, True])
def test_every_kind_of_fault_is_drawn_before_any_comes_again(is_durable: bool) -> None:
    kinds = kinds_of(is_durable=is_durable)
    faults = drawn_faults(random.Random(1), 200, 4.0, kinds)
    assert sorted(fault.kind for fault in faults[: len(kinds)]) == sorted(kinds)
    assert faults == drawn_faults(random.Random(1), 200, 4.0, kinds)
    assert faults != drawn_faults(random.Random(2), 200, 4.0, kinds)


def test_only_some_kinds_are_drawn() -> None:
    assert kinds_of(is_durable=True, only=["store fails over", "store killed"]) == ["store fails over"]
    assert kinds_of(is_durable=False, only=["store fails over"]) == []


def test_report_says_how_to_repeat_a_run() -> None:
    assert how_to_repeat(Plan(8, 3, 1)) == "make chaos SESSIONS=8 FAULTS=3 SEED=1"
    durable = Plan(8, 3, 1, size=Size(is_durable=True), only=("store fails over",))
    assert how_to_repeat(durable).endswith(""" SEED=1 CHAOS_ARGS="--sentinels --only 'store fails over'\"""")
