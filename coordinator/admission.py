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


@dataclass(slots=True)
class Smoothed:
    """A value that follows its measurements."""

    value: float | None = None

    def observe(self, measured: float, weight: float = SMOOTHING) -> None:
        """Move towards a measurement."""
        self.value = measured if self.value is None else self.value + weight * (measured - self.value)


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
    _chunk_s: Smoothed = field(default_factory=Smoothed)
    _chunk_tokens: Smoothed = field(default_factory=Smoothed)
    _at_number: Smoothed = field(default_factory=Smoothed)  # of sessions, that these were measured with
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
        if ticket.last_s is not None and num_tokens:
            weight = 1 / (SMOOTHED_ROUNDS * len(self._tickets))
            self._chunk_s.observe(now_s - ticket.last_s, weight)
            self._chunk_tokens.observe(num_tokens, weight)
            self._at_number.observe(len(self._tickets), weight)
        ticket.num_done += num_tokens
        ticket.last_s = now_s
        self._budgets.charge(ticket.tenant, num_tokens, self.quotas().of(ticket.tenant).tokens_per_minute)

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
        token_s = self._token_s_with_one_more()
        if token_s is None:
            return
        wait_s, text_s = self.wait_s(num_prompt_tokens), token_s * self._expected(num_tokens)
        margin = self._margin(tenant, wait_s, text_s, left_s)
        if left_s is not None and wait_s + text_s > margin * left_s:
            asking.refused(now_s)
            problem = f"this one would take {wait_s + text_s:.1f} s, and its caller waits {left_s:.1f} s"
            raise self._refusal(wait_s + text_s - margin * left_s, problem, "own_deadline")
        late_s = max((self._late_s(ticket, token_s, margin, now_s) for ticket in self._tickets.values()), default=0.0)
        if late_s > 0:
            asking.refused(now_s)
            raise self._refusal(late_s, "another one would make them miss their deadlines", "others_deadlines")

    def wait_s(self, num_prompt_tokens: int) -> float:
        """Return how long a new session waits for its first token: a place, the prompts ahead, its own."""
        load = self.load()
        place_s = 0.0
        if load.num_without_place and load.num_resident:
            place_s = (self._session_s.value or 0.0) * load.num_without_place / load.num_resident
        return place_s + load.prompt_s + load.prompt_token_s * num_prompt_tokens

    def _token_s_with_one_more(self) -> float | None:
        """Return the time of a token in each session if there is one more; None before any was measured."""
        chunk_s, chunk_tokens, number = self._chunk_s.value, self._chunk_tokens.value, self._at_number.value
        if chunk_s is None or not chunk_tokens or not number:
            return None
        return chunk_s / chunk_tokens * (len(self._tickets) + 1) / number

    def _expected(self, num_tokens: float) -> float:
        fraction = self._fraction.value
        return min(num_tokens, UNKNOWN_TOKENS) if fraction is None else fraction * num_tokens

    def _late_s(self, ticket: Ticket, token_s: float, margin: float, now_s: float) -> float:
        """Return by how much one more session would make this one miss a deadline that it meets now; 0: it would not.

        It is judged by what it has left: near its end it needs little.
        """
        left_s = ticket.deadline_s - now_s
        num_left = max(0.0, self._expected(ticket.num_tokens) - ticket.num_done)
        number = len(self._tickets)
        if num_left * token_s * number / (number + 1) > left_s:
            return 0.0  # lost already
        return max(0.0, num_left * token_s - margin * left_s)

    def _margin(self, tenant: str, wait_s: float, text_s: float, left_s: float | None) -> float:
        """Return the part of a deadline that a prediction may take: less for a tenant that takes more than its share.

        None does whose sessions are at most its share of those that run, or of those that could: if all tenants had as
        many, each would still meet its deadline. The latter is not for one that is refused all the time. It counts for
        the others: what one asks too much keeps few running, and few are soon exceeded by chance.
        """
        now_s = self.outside.now_s()
        self._asking = {name: ask for name, ask in self._asking.items() if now_s - ask.last_s < TENANT_MEMORY_S}
        is_always_refused = self._asking[tenant].is_always_refused(now_s)
        num_tenants = len(self._asking.keys() | self._of_tenant.keys())
        if num_tenants == 1:
            return STANDING_MARGIN if is_always_refused else MARGIN
        num_if_alike, num_running = (self._of_tenant[tenant] + 1) * num_tenants, len(self._tickets) + 1
        if num_if_alike <= num_running:
            return MARGIN
        if is_always_refused:
            return STANDING_CROWDED_MARGIN
        would_fit = left_s is not None and wait_s + text_s * num_if_alike / num_running <= MARGIN * left_s
        return MARGIN if would_fit else CROWDED_MARGIN

    def _refusal(self, missing_s: float, problem: str, limit: str) -> OverloadedError:
        # refused callers must not come back all at once
        retry_s = min(max(MIN_RETRY_S, missing_s), MAX_RETRY_S) * (1 + self.outside.uniform())
        sentence = f"{len(self._tickets)} sessions run here, and {problem}; try again later"
        return OverloadedError(sentence, retry_s, limit=limit)
