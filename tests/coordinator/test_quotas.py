"""What a tenant may take: its sessions, those that wait, and its tokens a minute; on a clock that the tests move."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.admission import RETURNING, Admission, Ticket
from coordinator.loads import TargetLoad
from coordinator.quotas import NO_QUOTA, Quota, Quotas, TokenBudgets, read_quotas, watched_quotas
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.errors import OverloadedError
from specdec.outside import Outside
from specdec.watched import WatchedError
from tests.support.guarded_coordinator import guarded_coordinator
from tests.support.secure_cluster import write_tokens
from tests.support.toy_coordinator import PROMPT, Gate

BAD_FILES = {
    "not TOML": ("[default", "is not TOML"),
    "another table": ("[acme]\nsessions = 1", r"has a table acme; give \[default\] and \[tenants.NAME\]"),
    "another limit": ("[default]\nsession = 1", "may have sessions, waiting, tokens_per_minute and nothing else"),
    "nothing at all": ("[default]\nsessions = 0", "sessions = 0; give a whole number from 1"),
    "a fraction": ("[default]\nwaiting = 0.5", "waiting = 0.5"),
    "a truth": ("[default]\nwaiting = true", "waiting = True"),
    "a tenant of other letters": ('[tenants."a b"]\nsessions = 1', r"tenants have tables, \[tenants.NAME\]"),
    "a tenant without a table": ("[tenants]\nacme = 3", r"\[tenants.acme\] may have"),
    "tenants without a table": ("tenants = 3", "tenants have tables"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_malformed_quotas_are_explained(name: str, tmp_path: Path) -> None:
    text, words = BAD_FILES[name]
    file = tmp_path / "quotas.toml"
    file.write_text(text)
    with pytest.raises(WatchedError, match=words):
        read_quotas(file)


def test_tenants_without_a_table_have_the_default(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[default]\nsessions = 4\n[tenants.acme]\nwaiting = 2\ntokens_per_minute = 60")
    quotas = watched_quotas(file)()
    assert quotas.of("acme") == Quota(None, 2, 60)
    assert quotas.of("anybody") == Quota(4)
    assert watched_quotas(None)().of("anybody") == NO_QUOTA


class World:
    """Sessions that share a target, which computes so many tokens a second, on a clock of its own."""

    TOKENS_A_SECOND = 100.0

    def __init__(self, quotas: Quotas | None = None) -> None:
        self.now_s = 0.0
        outside = Outside(lambda: self.now_s, lambda: 0.5)
        self.admission = Admission(TargetLoad, outside, lambda: quotas or Quotas())
        self.running: list[Ticket] = []
        self.in_time: Counter[str] = Counter()

    def ask(self, tenant: str, num_tokens: int, left_s: float) -> bool:
        """Ask for a session; return whether it was let in."""
        try:
            self.admission.check(tenant, 10, num_tokens, left_s)
        except OverloadedError:
            return False
        self.running.append(self.admission.enter(tenant, num_tokens, left_s, 10))
        return True

    def step(self) -> None:
        """Let each session have a token."""
        self.now_s += max(1, len(self.running)) / self.TOKENS_A_SECOND
        for ticket in list(self.running):
            self.admission.progress(ticket, 1)
            if ticket.num_done >= ticket.num_tokens:
                self.running.remove(ticket)
                self.admission.leave(ticket, is_complete=True)
                self.in_time[ticket.tenant] += self.now_s <= ticket.deadline_s


def limited(**limits: int) -> World:
    return World(Quotas(NO_QUOTA, {"acme": Quota(**limits)}))


def test_sessions_of_a_tenant_are_limited() -> None:
    world = limited(sessions=3)
    assert [world.ask("acme", 5, 100.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert all(world.ask("other", 5, 100.0) for _ in range(5))
    for _ in range(5):
        world.step()
    assert world.ask("acme", 5, 100.0), "once they have ended"


def test_sessions_that_wait_are_limited() -> None:
    world = limited(waiting=2)
    assert [world.ask("acme", 50, 100.0) for _ in range(3)] == [True, True, False]
    world.step()
    assert world.ask("acme", 50, 100.0), "the others have their first token"


def test_sessions_that_return_have_more_room() -> None:
    """Those of a coordinator that is lost; but not any number of them."""
    world = limited(sessions=2)
    for _ in range(2 * RETURNING):
        world.admission.check_quota("acme", is_new=False)
        world.admission.enter("acme", 0, None)
    for is_new in (False, True):
        with pytest.raises(OverloadedError, match="whose quota is 2 sessions"):
            world.admission.check_quota("acme", is_new=is_new)


def test_tokens_a_minute_are_limited() -> None:
    world = limited(tokens_per_minute=60)
    assert world.ask("acme", 80, 1000.0)
    for _ in range(80):  # in 0.8 s, with the 10 of the prompt half a minute's more than a minute's
        world.step()
    with pytest.raises(OverloadedError, match="60 tokens a minute"):
        world.admission.check_quota("acme")
    world.now_s += 29.0
    assert not world.ask("acme", 1, 100.0)
    world.now_s += 1.0
    assert world.ask("acme", 1, 100.0)


def test_many_small_charges_are_paid_back() -> None:
    now_s = 0.0
    budgets = TokenBudgets(Outside(lambda: now_s))
    for _ in range(6000):  # one token a second, as the budget allows, in steps that pay back a hundredth of one
        now_s += 0.01
        budgets.charge("acme", 1 if round(now_s * 100) % 100 == 0 else 0, 60)
    assert budgets.wait_s("acme", 60) == 0.0
    now_s += 60.0
    assert budgets.wait_s("acme", 60) == 0.0
    assert not budgets._used, "nothing is kept of who is away"


NUM_TENANTS, GREED, MINUTES = 5, 50, 5
LENGTH, PATIENCE_S = 100, 8.0
SHARE_TOKENS_A_SECOND = World.TOKENS_A_SECOND / NUM_TENANTS
FAIR = Quota(sessions=4, waiting=2, tokens_per_minute=int(60 * SHARE_TOKENS_A_SECOND))


def served_in_time(quotas: Quotas, num_greedy: float) -> float:
    """Return the fraction of the others' requests that end in time, beside a tenant that asks for so many shares."""
    world, offered = World(quotas), Counter[str]()
    others = [f"other-{number}" for number in range(NUM_TENANTS - 1)]
    period_s = LENGTH / (0.8 * SHARE_TOKENS_A_SECOND)  # each of the others asks for 0.8 of its share
    due_s = {name: number * period_s / len(others) for number, name in enumerate(others)}
    greedy_due_s = 0.0
    while world.now_s < MINUTES * 60:
        for name in others:
            if world.now_s >= due_s[name]:
                due_s[name] += period_s
                offered[name] += 1
                world.ask(name, LENGTH, PATIENCE_S)
        while num_greedy and world.now_s >= greedy_due_s:
            greedy_due_s += LENGTH / (num_greedy * SHARE_TOKENS_A_SECOND)
            world.ask("greedy", LENGTH, 600.0)
        world.step()
    in_time = sum(world.in_time[name] for name in others)
    return in_time / (offered.total() - len([each for each in world.running if each.tenant != "greedy"]))


def test_one_tenant_at_fifty_times_its_share_leaves_the_others_theirs() -> None:
    alone = served_in_time(Quotas(FAIR), 0.0)
    assert alone > 0.99
    assert served_in_time(Quotas(FAIR), GREED) >= 0.95 * alone
    assert served_in_time(Quotas(), GREED) >= 0.95 * alone, "admission alone sees to it"


async def test_quotas_are_each_tenants_own(tmp_path: Path) -> None:
    """Fifty requests at once, over the network: as many as the quota has are let in, and all of another tenant's."""
    tokens = write_tokens(tmp_path / "tokens.toml", {"acme": ["one"], "example": ["two"]})
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\nsessions = 3\n")
    sampling, plain = SamplingParams(seed=1, max_new_tokens=4), SpeculationParams(num_draft_tokens=0)
    async with AsyncExitStack() as stack:
        coordinator, _, address = await stack.enter_async_context(
            guarded_coordinator(tokens_file=tokens, quotas_file=quotas, max_sessions=100)
        )
        coordinator.toys.before = gate = Gate(0)
        greedy = await stack.enter_async_context(AsyncClient(address, token="one", max_retries=0))
        small = await stack.enter_async_context(AsyncClient(address, token="two", max_retries=0))

        def ask(client: AsyncClient, count: int) -> list[asyncio.Task[object]]:
            return [
                asyncio.create_task(client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=plain))
                for _ in range(count)
            ]

        many, few = ask(greedy, 50), ask(small, 3)
        while sum(task.done() for task in many) < 47:  # noqa: ASYNC110  # the refused ones
            await asyncio.sleep(0.001)
        gate.opened.set()
        ends = await asyncio.gather(*many, return_exceptions=True)
        refusals = [end for end in ends if isinstance(end, OverloadedError)]
        assert len(refusals) == 47
        assert all("whose quota is 3 sessions" in str(end) and end.retry_after_s for end in refusals)
        await asyncio.gather(*few)
