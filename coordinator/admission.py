"""Which new sessions are let in: those that will end within their deadline, and without making others miss theirs.

The prediction is processor sharing: with n sessions each gets a token about n times as slowly as alone. Measured is the
time of a token at the present number of sessions; one more makes it longer by (n + 1) / n, at most. What comes before
the first token is what the target workers report: places in the KV cache, and prompts ahead.

A tenant may have a quota (coordinator/quotas.py), which is looked at first.

A refusal costs nothing but the request's check: nothing is written, no worker is asked. Sessions that exist already are
refused only where their tenant follows RETURNING times as many as its quota has.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.loads import TargetLoad
from coordinator.quotas import Quotas, TokenBudgets
from specdec.errors import OverloadedError
from specdec.outside import REAL, Outside
from specdec.serving.event_loop import Priority, set_priority

SMOOTHING = 0.05  # weight of the latest measurement
# chunks of each session that the time of a token is smoothed over: one round of many sessions takes from a fifth to
# five times the mean, and a few quick rounds would let dozens of sessions in
SMOOTHED_ROUNDS = 20
# with fewer chunks and sessions nobody is refused: one of so few chunks may have waited for a worker that was replaced,
# and a crowd must not come in before it is known what it takes
FEW_CHUNKS, FEW_SESSIONS = 20, 4
# times the usual time of a chunk that one of the first of them counts as, at most, and one of the later ones: a process
# that stood still for seconds, a worker that was replaced, or a lease that had to lapse, says little of the rounds to
# come. Places in the cache that sessions have in turn do, and make one chunk in hundreds as long as many. So many
# seconds count as they are
LONGEST_OF_FIRST, LONGEST_OF_LATER, LONGEST_S = 10.0, 100.0, 0.1
# of a deadline that a prediction may take: it is not exact. Where a machine loses half of its speed for seconds, 0.85
# let half of all sessions end late at 5 times the capacity; 0.7 costs nothing: fewer at once are as many a second
MARGIN = 0.7
CROWDED_MARGIN = 0.35  # of a tenant that has more than its share
# the same where sessions are refused all the time: as many end a second with fewer at once, and each sooner. A burst
# may queue, what is always too much may not (Nichols and Jacobson 2012, "Controlling Queue Delay")
STANDING_MARGIN, STANDING_CROWDED_MARGIN = 0.3, 0.2
STANDING_S = 1.0  # refusals over so long a time are no burst
CALM_S = 2.0  # without a refusal for so long, it is over
TENANT_MEMORY_S = 60.0  # a tenant that came within this time has a share, also while it has no session
STALE_S = 10.0  # a measurement so old does not keep an idle service from trying anew
# a client that took nothing for so long, and for most of the time between two chunks, says nothing of the service
SLOW_CLIENT_S = 0.1
UNKNOWN_TOKENS = 256  # of a text, before any has ended
MIN_RETRY_S, MAX_RETRY_S = 0.25, 10.0
RETURNING = 2  # a coordinator that is lost leaves its sessions to another one


@dataclass(slots=True)
class Ticket:
    """One session that is followed here."""

    tenant: str
    deadline_s: float  # on the clock of Outside; infinite without one
    num_tokens: float  # of its text, the maximum
    num_done: int = 0
    began_s: float = 0.0
    last_s: float | None = None  # when its last chunk came
    sent_s: float = 0.0  # when the client had taken it


@dataclass(slots=True)
class Smoothed:
    """A value that follows its measurements; the mean of the first ones."""

    value: float | None = None
    number: int = 0

    def observe(self, measured: float, weight: float = SMOOTHING) -> None:
        """Move towards a measurement."""
        self.number += 1
        before = self.value or 0.0
        self.value = before + max(weight, 1 / self.number) * (measured - before)


class ChunkTime(Smoothed):
    """The time of a chunk, which single ones that took far longer do not change much."""

    def observe(self, measured: float, weight: float = SMOOTHING) -> None:
        """Move towards a measurement; among the first chunks it may be those before that were the exception."""
        if self.value is not None:
            is_first = self.number < FEW_CHUNKS
            factor = LONGEST_OF_FIRST if is_first else LONGEST_OF_LATER
            if is_first:
                self.value = min(self.value, max(LONGEST_S, factor * measured))
            measured = min(measured, max(LONGEST_S, factor * self.value))
        super().observe(measured, weight)


@dataclass(slots=True)
class Asking:
    """When a tenant last asked, and since when it has been refused without a pause, on the clock of Outside."""

    last_s: float = -math.inf
    refused_first_s: float = -math.inf
    refused_last_s: float = -math.inf

    def refused(self, now_s: float) -> None:
        """Take note of a refusal for a deadline's sake."""
        if now_s - self.refused_last_s > CALM_S:
            self.refused_first_s = now_s
        self.refused_last_s = now_s

    def is_always_refused(self, now_s: float) -> bool:
        """Whether it asks for more than can be served, not only in a burst."""
        return now_s - self.refused_last_s <= CALM_S and self.refused_last_s - self.refused_first_s >= STANDING_S


@dataclass(slots=True)
class Admission:
    """The sessions that are followed here, and what their tokens take."""

    load: Callable[[], TargetLoad] = TargetLoad
    outside: Outside = REAL
    quotas: Callable[[], Quotas] = Quotas  # of the moment
    _tickets: dict[int, Ticket] = field(default_factory=dict)  # by identity
    _of_tenant: Counter[str] = field(default_factory=Counter)
    _asking: dict[str, Asking] = field(default_factory=dict)  # by tenant
    _chunk_s: ChunkTime = field(default_factory=ChunkTime)
    _chunk_tokens: Smoothed = field(default_factory=Smoothed)
    _at_number: Smoothed = field(default_factory=Smoothed)  # of sessions, that these were measured with
    _measured_s: float = -math.inf
    _fraction: Smoothed = field(default_factory=Smoothed)  # of the maximum that texts reach
    _session_s: Smoothed = field(default_factory=Smoothed)
    _budgets: TokenBudgets = field(init=False)

    def __post_init__(self) -> None:
        self._budgets = TokenBudgets(self.outside)

    def __len__(self) -> int:
        return len(self._tickets)

    def enter(self, tenant: str, num_tokens: int, left_s: float | None, num_prompt_tokens: int = 0) -> Ticket:
        """Count a session, of at most so many tokens, whose caller waits for `left_s` seconds; see `leave`.

        `num_prompt_tokens` are those of a prompt that is new here. From here on the caller's task goes in its turn, as
        one of many sessions.
        """
        set_priority(Priority.IN_TURN)
        now_s = self.outside.now_s()
        ticket = Ticket(tenant, math.inf if left_s is None else now_s + left_s, num_tokens, began_s=now_s)
        self._tickets[id(ticket)] = ticket
        self._of_tenant[tenant] += 1
        self._budgets.charge(tenant, num_prompt_tokens, self.quotas().of(tenant).tokens_per_minute)
        return ticket

    def leave(self, ticket: Ticket, *, is_complete: bool) -> None:
        """Count a session no more; how long a complete text was tells what to expect of others."""
        del self._tickets[id(ticket)]
        self._of_tenant[ticket.tenant] -= 1
        if not self._of_tenant[ticket.tenant]:
            del self._of_tenant[ticket.tenant]
        if is_complete and ticket.num_tokens:
            self._fraction.observe(min(1.0, ticket.num_done / ticket.num_tokens))
            self._session_s.observe(self.outside.now_s() - ticket.began_s)

    def progress(self, ticket: Ticket, num_tokens: int) -> None:
        """Take note of a chunk."""
        now_s = self.outside.now_s()
        if ticket.last_s is not None and num_tokens and not _took_long(ticket, now_s):
            self._measured_s = now_s
            weight = 1 / (SMOOTHED_ROUNDS * len(self._tickets))
            self._chunk_s.observe(now_s - ticket.last_s, weight)
            self._chunk_tokens.observe(num_tokens, weight)
            self._at_number.observe(len(self._tickets), weight)
        ticket.num_done += num_tokens
        ticket.last_s = now_s
        self._budgets.charge(ticket.tenant, num_tokens, self.quotas().of(ticket.tenant).tokens_per_minute)

    def sent(self, ticket: Ticket) -> None:
        """Take note that the client has taken the last chunk."""
        ticket.sent_s = self.outside.now_s()

    def check_quota(self, tenant: str, *, is_new: bool = True) -> None:
        """Raise OverloadedError for a tenant that has all that its quota allows; what returns has more room."""
        quota, number = self.quotas().of(tenant), self._of_tenant[tenant]
        soon_s = (self._session_s.value or 0.0) / max(1, number)  # until one of them ends
        if quota.sessions is not None and number >= quota.sessions * (1 if is_new else RETURNING):
            problem = f"{number} of them are this tenant's, whose quota is {quota.sessions} sessions"
            raise self._refusal(soon_s, problem, "quota_sessions")
        if not is_new:
            return
        num_waiting = sum(ticket.tenant == tenant and ticket.last_s is None for ticket in self._tickets.values())
        if quota.waiting is not None and num_waiting >= quota.waiting:
            problem = f"{num_waiting} of this tenant's wait for their first token; its quota is {quota.waiting} waiting"
            raise self._refusal(soon_s, problem, "quota_waiting")
        wait_s = self._budgets.wait_s(tenant, quota.tokens_per_minute)
        if wait_s > 0:
            problem = f"this tenant has used up its quota of {quota.tokens_per_minute} tokens a minute"
            raise self._refusal(wait_s, problem, "quota_tokens")

    def check(self, tenant: str, num_prompt_tokens: int, num_tokens: int, left_s: float | None) -> None:
        """Raise OverloadedError for a new session that would miss its deadline, or make others miss theirs.

        Also for one that its tenant's quota does not allow.
        """
        self.check_quota(tenant)
        now_s = self.outside.now_s()
        asking = self._asking.setdefault(tenant, Asking())
        asking.last_s = now_s
        pace_s = self._pace_s()
        if pace_s is None:
            return
        is_known = bool(self._tickets) or now_s - self._measured_s <= STALE_S
        asked = _Asked(self.wait_s(num_prompt_tokens), self._expected(num_tokens) if is_known else 0.0, left_s, now_s)
        margin, number = self._margin(tenant, asked, pace_s), len(self._tickets) + 1
        if (late_s := self._late_s(asked, number * pace_s, margin)) > 0:
            asking.refused(now_s)
            taken_s = asked.wait_s + asked.num_tokens * number * pace_s
            problem = f"this one would take {taken_s:.1f} s, and its caller waits {left_s:.1f} s"
            raise self._refusal(late_s, problem, "own_deadline")
        if (late_s := self._others_late_s(asked, number, pace_s, margin)) > 0:
            asking.refused(now_s)
            raise self._refusal(late_s, "another one would make them miss their deadlines", "others_deadlines")

    def wait_s(self, num_prompt_tokens: int) -> float:
        """Return how long a new session waits for its first token: a place, the prompts ahead, its own."""
        load = self.load()
        place_s = 0.0
        if load.num_without_place and load.num_resident:
            place_s = (self._session_s.value or 0.0) * load.num_without_place / load.num_resident
        return place_s + load.prompt_s + load.prompt_token_s * num_prompt_tokens

    def _pace_s(self) -> float | None:
        """Return the time of a token in each session, divided by their number; None while that is not known."""
        chunk_s, chunk_tokens, number = self._chunk_s.value, self._chunk_tokens.value, self._at_number.value
        is_known = self._chunk_s.number >= FEW_CHUNKS or len(self._tickets) >= FEW_SESSIONS
        if not is_known or chunk_s is None or not chunk_tokens or not number:
            return None
        return chunk_s / chunk_tokens / number

    def _expected(self, num_tokens: float) -> float:
        fraction = self._fraction.value
        return min(num_tokens, UNKNOWN_TOKENS) if fraction is None else fraction * num_tokens

    def _late_s(self, asked: "_Asked", token_s: float, margin: float) -> float:
        """Return by how much a new session would miss its deadline; 0: it would not, or has none."""
        if asked.left_s is None:
            return 0.0
        return max(0.0, asked.wait_s + asked.num_tokens * token_s - margin * asked.left_s)

    def _others_late_s(self, asked: "_Asked", number: int, pace_s: float, margin: float) -> float:
        """Return by how much one of the others, with so many in all, would miss a deadline that it meets now.

        It is judged by what it has left: near its end it needs little.
        """
        late_s, now_pace_s = 0.0, pace_s * len(self._tickets)
        for ticket in self._tickets.values():
            left_s = ticket.deadline_s - asked.now_s
            num_left = max(0.0, self._expected(ticket.num_tokens) - ticket.num_done)
            if num_left * now_pace_s <= left_s:  # else it is lost already
                late_s = max(late_s, num_left * number * pace_s - margin * left_s)
        return late_s

    def _margin(self, tenant: str, asked: "_Asked", pace_s: float) -> float:
        """Return the part of a deadline that a prediction may take: less for a tenant that takes more than its share.

        None does that has no session, or whose sessions are at most its share of those that run, or of those that
        could: if all tenants had as many, each would still meet its deadline. The latter is not for one that is refused
        all the time. It counts for the others: what one asks too much keeps few running, and few are soon exceeded by
        chance.
        """
        self._asking = {name: ask for name, ask in self._asking.items() if asked.now_s - ask.last_s < TENANT_MEMORY_S}
        is_always_refused = self._asking[tenant].is_always_refused(asked.now_s)
        num_tenants = len(self._asking.keys() | self._of_tenant.keys())
        if num_tenants == 1:
            return STANDING_MARGIN if is_always_refused and self._tickets else MARGIN
        num_own, num_running = self._of_tenant[tenant] + 1, len(self._tickets) + 1
        num_if_alike = num_own * num_tenants
        if num_own == 1 or num_if_alike <= num_running:
            return MARGIN
        if is_always_refused:
            return STANDING_CROWDED_MARGIN
        late_s = self._late_s(asked, num_if_alike * pace_s, MARGIN)
        would_fit = late_s == 0 and self._others_late_s(asked, num_if_alike, pace_s, MARGIN) == 0
        return MARGIN if would_fit else CROWDED_MARGIN

    def _refusal(self, missing_s: float, problem: str, limit: str) -> OverloadedError:
        # refused callers must not come back all at once
        retry_s = min(max(MIN_RETRY_S, missing_s), MAX_RETRY_S) * (1 + self.outside.uniform())
        sentence = f"{len(self._tickets)} sessions run here, and {problem}; try again later"
        return OverloadedError(sentence, retry_s, limit=limit)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a new session needs, and when it has to be there."""

    wait_s: float
    num_tokens: float  # that are expected
    left_s: float | None
    now_s: float


def _took_long(ticket: Ticket, now_s: float) -> bool:
    """Whether it was the client that a chunk waited for."""
    assert ticket.last_s is not None
    blocked_s = ticket.sent_s - ticket.last_s
    return blocked_s > SLOW_CLIENT_S and blocked_s > (now_s - ticket.last_s) / 2
