"""Chooses drafter and number of draft tokens of each round: the plan with the most expected tokens a second.

The choice is made before the round draws anything, so it may depend on all that earlier rounds have committed, accepted
and measured without changing the distribution; only what a matched round has drawn after a rejected token it may not
see, as that foretells later draws. What other drafters would have had accepted is seen in proposals that no round
uses, asked for while the target scores. Plans other than the best one are tried now and then; the time that trials lose
stays below a share of all time. A session in which nothing pays rests. What the coordinator has looked up itself is
drafted in whichever round it pays, also in a rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.choosing.acceptance_history import SessionAcceptance
from coordinator.choosing.comparisons import Comparisons, Unused
from coordinator.choosing.costs import RESTING as RESTING_ROUNDS
from coordinator.choosing.costs import Counts
from coordinator.choosing.estimates import JOINT_LENGTH, Estimates
from coordinator.choosing.lookups import LOOKUP, Lookups
from coordinator.choosing.offers import OFFER, Offers
from coordinator.choosing.plans import NOTHING, PLAIN, RESTING, DraftPlan, Estimate, Found, RoundOutcome, Trial
from coordinator.choosing.rest import AWAKE_ROUNDS, Rest
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.joint_names import AND, parts_of, without_joint
from specdec.exact.lookup import NO_MATCH, SHORTEST, NextRound
from specdec.exact.values import Proposal
from specdec.types import MAX_DRAFT_TOKENS

LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, *range(32, MAX_DRAFT_TOKENS + 1, 8)])
PROBE_LENGTH = 4  # draft tokens asked of a drafter whose cost is unknown
MIN_GAIN = 1.03  # speculation must promise this speed-up, so that it does not alternate with plain decoding
# of a draft that a busy target scores ahead: what it does for that between two forwards, all its sessions wait for
MIN_BUSY_GAIN = 1.1
# where it promises less than this, a session rests long, and looks at nothing, as looking costs a few per cent: greedy
# texts often begin to repeat themselves, and then a draft pays that did not before; drawn ones hardly do
CLEAR_LOSS, CLEAR_GREEDY_LOSS = 0.95, 0.85
MAX_STOP_BELOW = 0.5  # costs are uncertain: a token that is more likely than not is always drafted
COMPARED_LENGTHS = (16, 8, 4)  # draft tokens of a proposal that no round uses: as many as are hidden by the scoring
REPEATED_ROUNDS = 32  # of a rest, in which the target is told the same of the next round: costs change slowly
COMPARED_COST = 0.8  # it may take this fraction of the time in which the target scores


@dataclass(slots=True)
class Said:
    """What the target was told of the next round."""

    next_round: NextRound | None = None
    load: int = 0
    least_left: int = 1 << 31  # rounds of a rest, down to which it is said again

    def is_said_again(self, load: int, num_left: int) -> bool:
        """Return whether it holds for another round at a load, after which so many rounds of the rest are left."""
        return num_left >= self.least_left and abs(load - self.load) <= 1


class PlanChooser:
    """Chooses the plans of one session: among drafters, at any K, or at the K that the client set."""

    def __init__(
        self,
        shared: SharedStatistics,
        drafters: Sequence[str],
        maximum: int,
        num_draft_tokens: int | None = None,
        is_greedy: bool = False,
        looks_up: bool = False,
        takes_offers: bool = False,
    ) -> None:
        if shared.is_repeated:  # whether joint ones were measured depends on what the same draws have accepted before
            drafters = without_joint(drafters)
        self._costs, self._exploration = shared.costs, shared.exploration
        self._acceptance = {name: SessionAcceptance(shared.acceptance(name, is_greedy)) for name in drafters}
        self._maximum = maximum if num_draft_tokens is None else num_draft_tokens
        self._is_fixed = num_draft_tokens is not None
        self._estimates = Estimates(self._costs, self._acceptance, self._is_fixed)
        self._trial: Trial | None = None  # the last round, if it was one
        self._comparisons = Comparisons()
        self._next_compared = list(drafters)  # drafters whose unused proposals can be compared, in turn
        self._rest = Rest()
        self._clear_loss = CLEAR_GREEDY_LOSS if is_greedy else CLEAR_LOSS
        self._scouting = shared.scouting[is_greedy]
        self._is_scout = not self._is_fixed and self._scouting.begin()
        self._has_looked = False  # at drafters: some were available
        self._lookups = Lookups(shared, self._maximum, is_greedy) if looks_up and self._maximum else None
        self._all_lengths = self._lengths(self._maximum)
        self._offers = Offers(shared, self._all_lengths, is_greedy) if takes_offers and self._maximum else None
        self._num_offered = 0  # draft tokens that the target may offer for this round
        self._match = NO_MATCH  # what this round has looked up
        self._draft_lengths: tuple[int, ...] = ()  # of lookups, as promised to the target in the last round
        self._said = Said()  # to the target, of the next round
        self._best: Estimate | None = None  # when plans were weighed last; None: plain decoding
        self._has_observed = False  # the target, for the drafters of this session: its prompt, or what came later
        self._has_begun = False  # a round was chosen

    @property
    def is_fixed(self) -> bool:
        """Whether the client has fixed the number of draft tokens."""
        return self._is_fixed

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        """Return the plan of a round that may commit at most `remaining_tokens` tokens, one of which closes it.

        `available` are the drafters whose workers answer; None: all.
        """
        self._match, num_offered = found.match, found.num_offered
        if found.is_foreseen or found.is_redrawn:
            return self._undrawn(remaining_tokens, found)
        has_begun, self._has_begun = self._has_begun, True
        if has_begun and (looked_up := self._plan_lookup(min(remaining_tokens - 1, self._maximum))):
            self._trial = None
            return looked_up
        self._note_offer(num_offered)
        if 0 < num_offered < remaining_tokens:
            self._trial = None
            self._rest.goes_on(self._costs.num_sessions)
            return DraftPlan(OFFER, self._num_offered, observes=False)
        if self._rest.goes_on(self._costs.num_sessions):
            return RESTING
        names = set(self._acceptance if available is None else available)
        drafters = [name for name in self._acceptance if name in names]
        maximum = min(max(remaining_tokens - 1, 0), self._maximum)
        if self._trial and self._trial.had_prefill and not self._trial.is_repeated:
            self._trial = replace(self._trial, is_repeated=True)
            if self._trial.plan.drafter in drafters and self._trial.plan.num_draft_tokens <= maximum:
                return self._priced(self._trial.plan, self._trial.best)
        self._trial = None
        self._comparisons.note_round()
        if not drafters or not maximum:
            return PLAIN
        if self._is_fixed and len(drafters) == 1:
            return DraftPlan(drafters[0], maximum)
        self._has_looked = True
        unknown = self._unknown(drafters)
        if unknown or not self._costs.knows_scoring:
            return self._probe((unknown or drafters)[0], maximum)
        return self._best_or_trial(drafters, maximum)

    def _undrawn(self, remaining_tokens: int, found: Found) -> DraftPlan:
        """Return the plan of a round whose draft may not be drawn: what the target was told of, or plain decoding.

        The load by which a rest might end was measured after later draws, which no draft that is drawn may depend on.
        """
        self._trial = None
        maximum = min(remaining_tokens - 1, self._maximum)
        if any(self._draft_lengths) and (looked_up := self._plan_lookup(maximum)):
            return replace(looked_up, observes=False) if found.is_foreseen else looked_up
        self._note_offer(found.num_offered)
        if found.is_foreseen:
            self._rest.count()
        if 0 < found.num_offered < remaining_tokens:
            return DraftPlan(OFFER, self._num_offered, observes=False)
        return RESTING if found.is_foreseen and self._acceptance else PLAIN

    def _note_offer(self, num_offered: int) -> None:
        """Take note of how many draft tokens the target has offered for a round that begins."""
        if self._offers:
            self._offers.begin_round()
            if self._num_offered and not num_offered:
                self._offers.observe(self._num_offered, 0, ())

    def _plan_lookup(self, maximum: int) -> DraftPlan | None:
        """Return the plan that drafts what was looked up, if that is better than any other."""
        lengths = self._draft_lengths or self._lookup_lengths()
        if not lengths or not self._match.num_tokens:
            return None
        length = min(lengths[self._match.num_tokens - SHORTEST], maximum)
        observes = self._has_observed and not self._rest.follows
        return DraftPlan(LOOKUP, length, observes=observes) if length > 0 else None

    def _lookup_lengths(self) -> tuple[int, ...]:
        """Return how many tokens are drafted by the length of a match, as far as is known now."""
        if self._lookups is None or not self._costs.knows_scoring:
            return ()
        best_speed = max(self._rest_promise().speed, self._best.speed if self._best else 0.0)
        return self._lookups.draft_lengths(self._all_lengths, self._min_gain * best_speed)

    def _rest_promise(self) -> Estimate:
        """Return what a round promises for which no draft worker is asked: plain, or with what the target offers."""
        plain = Estimate(PLAIN, 1.0, self._costs.plain_s())
        offered = self._offers.best if self._offers else plain
        return offered if offered.speed > self._min_gain * plain.speed else plain

    def next_round(self, plan: DraftPlan, max_length: int) -> NextRound | None:
        """Return what the round after a chosen one will draft, so that the target may score it ahead; None: who knows.

        What it says of lookups, and of what the target offers, is kept to. While a session rests that is weighed now
        and then only: a plain round takes few milliseconds, and weighing some hundred microseconds.
        """
        is_trial = self._offers is not None and self._offers.is_trial
        rests = plan == RESTING and self._rest.follows and not is_trial
        if rests and self._said.is_said_again(self._costs.load, self._rest.num_left):
            return self._said.next_round
        self._said = Said(self._next_round(plan, max_length), self._costs.load)
        if rests:
            self._said.least_left = self._rest.num_left - REPEATED_ROUNDS + 1
        return self._said.next_round

    def _next_round(self, plan: DraftPlan, max_length: int) -> NextRound | None:
        self._draft_lengths = self._lookup_lengths()
        is_plain = self.expects_plain_after(plan)
        offered, learns = self._next_offer(is_plain)
        self._num_offered = offered.num_draft_tokens
        next_round = NextRound(self._draft_lengths, is_plain, max_length, self._num_offered, learns, offered.stop_below)
        return next_round if is_plain or learns or any(self._draft_lengths) else None

    def num_foreseen(self, plan: DraftPlan) -> int:
        """Return how many rounds, this one of a chosen plan included, ask no draft worker, and observe nothing.

        The target knows their drafts as well, by what it was told of the next round.
        """
        said = self._said.next_round
        is_trial = self._offers is not None and self._offers.is_trial
        rests = not plan.observes and said is not None and said.plain and not is_trial
        return 1 + self._rest.num_left if rests else 1

    def _next_offer(self, is_plain: bool) -> tuple[DraftPlan, bool]:
        """Return what the target shall offer for the next round, and whether it shall learn from this one.

        It offers nothing where that does not pay, or the next round may not be plain otherwise, and learns nothing
        where it clearly loses; at a busy target, where all wait while one session learns, wherever it does not pay.
        """
        if self._offers is None or not self._costs.knows_scoring:
            return PLAIN, False
        self._offers.ask_nothing()
        best, plain = self._offers.best, Estimate(PLAIN, 1.0, self._costs.plain_s())
        least_speed = (self._min_gain if self._costs.is_busy else self._clear_loss) * plain.speed
        if best.speed < least_speed and not self._is_scout:
            return PLAIN, False
        asked = self._offers.next(plain, self._min_gain) if is_plain else None
        if asked is None:
            return PLAIN, True
        slope_s = self._costs.slope_s(OFFER, self._offers.num_drafted(asked.plan.num_draft_tokens))
        return replace(asked.plan, stop_below=min(best.speed * slope_s, MAX_STOP_BELOW)), True

    def expects_plain_after(self, plan: DraftPlan) -> bool:
        """Return whether the round after a chosen one will be plain, unless it looks something up.

        A rest that goes on makes that sure. In a busy target's forward one more row costs little, should it be in vain.
        """
        is_plain = plan.drafter is None or (plan.drafter in (LOOKUP, OFFER) and self._best is None)
        is_awake_next = not self._rest.follows and (not self._costs.is_busy or self._trial or plan.drafter == OFFER)
        return is_plain and not is_awake_next

    @property
    def _min_gain(self) -> float:
        """The speed-up that a draft must promise which the target scores ahead."""
        return MIN_BUSY_GAIN if self._costs.is_busy else MIN_GAIN

    def choose_compared(self, chosen: DraftPlan, available: Iterable[str]) -> DraftPlan | None:
        """Return a plan that another drafter may be asked for while the target scores, and that no round uses."""
        has_no_room = self._is_fixed and chosen.drafter is None
        if has_no_room or not chosen.observes:
            return None
        name, length = self._next_comparison(chosen, available)
        if not length:
            return None
        self._comparisons.begin()
        self._next_compared.remove(name)
        self._next_compared.append(name)
        return replace(chosen, drafter=name, num_draft_tokens=min(length, self._maximum), fallback=None)

    def _next_comparison(self, chosen: DraftPlan, available: Iterable[str]) -> tuple[str, int]:
        """Return whom a round may ask for a proposal that it does not use, and for how many tokens; 0: nobody."""
        if not self._comparisons.is_due(self._costs.num_sessions):
            return "", 0
        others = set(available) - {chosen.drafter, chosen.fallback and chosen.fallback.drafter}
        lengths = ((name, self._hidden_length(name)) for name in self._next_compared if name in others)
        return next(((name, length) for name, length in lengths if length), ("", 0))

    def _hidden_length(self, drafter: str) -> int:
        """Return how many draft tokens a drafter is known to propose well before the target answers; 0: none."""
        if not self._costs.has_measured(drafter):
            return 0
        limit_s = COMPARED_COST * self._costs.score_s(0)
        return next((n for n in COMPARED_LENGTHS if self._costs.draft_s(drafter, n) < limit_s), 0)

    def observe_unused(self, plan: DraftPlan, proposal: Proposal, base_length: int) -> None:
        """Add a proposal that no round used, drafted after `base_length` tokens; drawn ones cannot be compared."""
        if proposal.is_chosen:
            self._comparisons.add(Unused(plan, proposal, base_length))
        elif plan.drafter in self._next_compared:
            self._next_compared.remove(plan.drafter)

    def settle(self, committed: Sequence[int]) -> None:
        """Learn from unused proposals what of them is now committed."""
        for plan, num_drafted, path, weight in self._comparisons.settled(committed):
            if plan.drafter is not None:
                self._observe_acceptance(plan.drafter, plan.num_draft_tokens, num_drafted, path, weight)
        if self._lookups:
            self._lookups.settle(committed)

    def compare_lookup(self, base_length: int) -> None:
        """Note that a round after `base_length` tokens does not draft what was looked up for it."""
        if self._lookups:
            self._lookups.compare(self._match, base_length)

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round. What was missed in it is no part of that, but an unused proposal."""
        if self._is_scout and self._has_looked:
            self._scouting.note_round()
        plan, missed = outcome.plan, outcome.missed
        elapsed_s = outcome.draft_s + outcome.score_s + outcome.other_s + (missed.elapsed_s if missed else 0.0)
        if self._lookups and plan.drafter == LOOKUP:
            self._lookups.observe(self._match, outcome.num_drafted, len(outcome.path))
        elif self._offers and plan.drafter == OFFER:
            self._offers.observe(plan.num_draft_tokens, outcome.num_drafted, outcome.path)
        elif plan.drafter is not None:
            self._observe_acceptance(plan.drafter, plan.num_draft_tokens, outcome.num_drafted, outcome.path)
        if self._offers:
            num_tokens = len(outcome.path) + 1
            self._offers.observe_time(0.0 if outcome.has_prefill else elapsed_s, num_tokens)
        self._has_observed |= plan.observes
        if not outcome.has_prefill and self._is_observed(outcome):
            self._observe_costs(outcome)
        if self._trial:
            loss_s = elapsed_s - (len(outcome.path) + 1) / self._trial.best.speed
            self._exploration.observe(elapsed_s, loss_s - self._trial.expected_loss_s)
            self._trial = replace(self._trial, expected_loss_s=0.0, had_prefill=outcome.has_prefill)
        elif not outcome.has_prefill:
            self._exploration.observe(elapsed_s)

    def _is_observed(self, outcome: RoundOutcome) -> bool:
        """Return whether costs are learned from a round: of a rest some are enough, where its load is known."""
        is_known = self._costs.note_sessions(outcome.num_sessions)
        return not is_known or outcome.plan != RESTING or self._rest.is_observed

    def _observe_costs(self, outcome: RoundOutcome) -> None:
        plan, missed = outcome.plan, outcome.missed
        asked = [(plan, outcome.draft_s), *([(missed.plan, missed.elapsed_s)] if missed else [])]
        for each, elapsed_s in asked:
            if each.drafter in self._acceptance:
                self._costs.observe_draft(each.drafter, each.num_draft_tokens, elapsed_s)
        if plan.observes:
            self._costs.age_unused(set(self._acceptance) - {each.drafter for each, _ in asked})
        scored = plan.drafter if plan.observes or plan.drafter else RESTING_ROUNDS
        num_sessions, forward = outcome.num_sessions, outcome.forward
        self._costs.observe_score(outcome.num_drafted, outcome.score_s, num_sessions, scored, forward)
        self._costs.observe_other(not plan.observes, outcome.other_s)

    def _observe_acceptance(
        self, drafter: str, num_asked: int, num_drafted: int, path: Sequence[int], weight: float = 1.0
    ) -> None:
        self._acceptance[drafter].observe(num_asked, num_drafted, path, weight)
        self._estimates.forget(drafter)

    def _best_or_trial(self, drafters: Sequence[str], maximum: int) -> DraftPlan:
        plain, lengths = replace(self._rest_promise(), plan=PLAIN), self._lengths(maximum)
        forgotten = [name for name in drafters if not self._costs.knows_drafting(name)]
        known = self._estimates.of([name for name in drafters if name not in forgotten], lengths)
        known += self._estimates.with_fallbacks(known, lengths)
        best = max(known, key=lambda estimate: estimate.speed, default=plain)
        is_clear = not self._is_fixed and best.speed < self._clear_loss * plain.speed
        if not self._is_fixed and best.speed <= MIN_GAIN * plain.speed:
            best = plain
        self._best = None if best is plain else best
        if is_clear and not self._is_scout:
            self._rest.begin_long()
            return RESTING
        if best is plain and self._relies_on_offers:
            self._rest.begin_with_offers()
            return RESTING
        asked = {best.plan.drafter, best.plan.fallback and best.plan.fallback.drafter}
        if joint := self._unknown([name for name in forgotten if asked.intersection(parts_of(name))]):
            return self._probe(joint[0], maximum)
        tried = None
        if self._exploration.is_due:
            others = (*known, *([] if self._is_fixed else [plain]), *self._estimates.longer(best, lengths))
            losses = {
                estimate.plan: estimate.seconds - estimate.num_tokens / best.speed
                for estimate in others
                if estimate.plan != best.plan
            }
            tried = self._tried(best, losses | {self._probe(name, maximum): plain.seconds for name in forgotten})
        if tried is None and self._rests(best is plain, drafters):
            return RESTING
        return self._priced(tried or best.plan, best)

    @property
    def _relies_on_offers(self) -> bool:
        """Whether a session drafts what the target offers and looks at nothing else: the prompt was not observed.

        To observe a long prompt takes as long as some rounds. A long text looks at other drafters after two rests.
        """
        promises = self._rest_promise().plan.drafter == OFFER
        return promises and self._rest.is_young and not (self._has_observed or self._is_scout)

    def _unknown(self, drafters: Sequence[str]) -> list[str]:
        """Return the drafters whose costs were never measured and are measured at once.

        Joint ones are none of them while there are others: they are worth it where one of their parts is the best.
        """
        return [name for name in without_joint(drafters) if not self._costs.has_measured(name)]

    def _rests(self, is_plain: bool, drafters: Sequence[str]) -> bool:
        """Note whether plain decoding is best; return whether the session rests from this very round on.

        At a busy target it does, unless another drafter can be compared in this round.
        """
        self._rest.observe(is_plain, 1 if self._costs.is_busy else AWAKE_ROUNDS)
        rests = is_plain and self._costs.is_busy and self._has_observed
        return rests and not any(self._next_comparison(PLAIN, drafters))

    def _priced(self, plan: DraftPlan, best: Estimate) -> DraftPlan:
        """Return a plan with what another draft token costs, in tokens that the best plan yields in that time."""
        if plan.drafter is None or self._is_fixed:
            return plan
        num_drafted = float(self._acceptance[plan.drafter].expected_drafted()[plan.num_draft_tokens])
        stop_below = min(best.speed * self._costs.slope_s(plan.drafter, num_drafted), MAX_STOP_BELOW)
        return replace(plan, stop_below=stop_below, fallback=plan.fallback and self._priced(plan.fallback, best))

    def _tried(self, best: Estimate, losses: Mapping[DraftPlan, float]) -> DraftPlan | None:
        """Return a plan to try, if one is affordable; `losses` are the seconds that each is expected to lose."""
        affordable = [plan for plan, loss_s in losses.items() if self._exploration.affords(loss_s)]
        plan = self._exploration.least_recent(affordable)
        if plan:
            self._exploration.begin(plan, losses[plan])
            self._trial = Trial(plan, best, losses[plan])
        return plan

    def _probe(self, drafter: str, maximum: int) -> DraftPlan:
        """Return a plan that measures what a drafter costs."""
        length = JOINT_LENGTH if AND in drafter else PROBE_LENGTH
        return DraftPlan(drafter, maximum if self._is_fixed else min(length, maximum))

    def _lengths(self, maximum: int) -> Counts:
        """Return the numbers of draft tokens to choose among, rising."""
        return np.array([maximum]) if self._is_fixed else np.append(LENGTHS[maximum > LENGTHS], maximum)
