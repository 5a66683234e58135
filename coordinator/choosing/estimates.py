"""What each drafter's best plan promises, alone and with another drafter to fall back on.

A drafter that looks text up often finds nothing, and says so at once; a drafter with a model always has a guess, and
takes longer. Asked one after the other they beat each of them (Oliaro et al. 2024, "SuffixDecoding", section 4: hybrid
decoding).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from coordinator.choosing.acceptance_history import SessionAcceptance
from coordinator.choosing.costs import Costs, Counts
from coordinator.choosing.plans import MIN_FOUND, DraftPlan, Estimate
from coordinator.joint_names import AND

JOINT_LENGTH = 8  # draft tokens asked of drafters that draft together; they stop where more would not pay
FOUND_LENGTH = 8  # draft tokens asked at least of a drafter that has another one to fall back on
MIN_MISS_PROB = 0.1  # a drafter that misses less often needs none


class Estimates:
    """The best plans of one session's drafters."""

    def __init__(self, costs: Costs, acceptance: Mapping[str, SessionAcceptance], is_fixed: bool = False) -> None:
        self._costs, self._acceptance, self._is_fixed = costs, acceptance, is_fixed
        self._known: dict[str, Estimate] = {}
        self._next = list(acceptance)  # in turn: the first ones are the oldest
        self._load = 0

    def forget(self, drafter: str) -> None:
        """Estimate a drafter's best plan anew when it is next asked for."""
        self._known.pop(drafter, None)

    def of(self, drafters: Sequence[str], lengths: Counts) -> list[Estimate]:
        """Return each drafter's best plan: estimated anew where it was observed since, and one more in turn."""
        if self._costs.load != self._load:
            self._known.clear()
            self._load = self._costs.load
        oldest = next(name for name in self._next if name in drafters) if drafters else None
        for name in drafters:
            known = self._known.get(name)
            if known is None or name == oldest or known.plan.num_draft_tokens > lengths[-1]:
                self._known[name] = self.best_length(name, lengths)
                self._next.remove(name)
                self._next.append(name)
        return [self._known[name] for name in drafters]

    def best_length(self, drafter: str, lengths: Counts) -> Estimate:
        """Return a drafter's best plan with one of these numbers of draft tokens.

        Of joint drafters there is one, as another K would give their nodes other meanings.
        """
        if AND in drafter and not self._is_fixed:
            lengths = np.minimum(lengths[-1:], JOINT_LENGTH)
        acceptance = self._acceptance[drafter]
        tokens, drafted = acceptance.expected_tokens()[lengths], acceptance.expected_drafted()[lengths]
        draft_s, score_s = self._costs.draft_each_s(drafter, lengths), self._costs.score_each_s(drafted, drafter)
        seconds = draft_s + score_s + self._costs.other_s()
        best = int(np.argmax(tokens / seconds))
        return Estimate(DraftPlan(drafter, int(lengths[best])), float(tokens[best]), float(seconds[best]))

    def longer(self, best: Estimate, lengths: Counts) -> list[Estimate]:
        """Return the best plan with twice as many draft tokens, or as many as there may be."""
        longer = lengths[lengths >= 2 * best.plan.num_draft_tokens][:1]
        return [self.best_length(best.plan.drafter, longer)] if best.plan.drafter is not None and longer.size else []

    def with_fallbacks(self, known: Sequence[Estimate], lengths: Counts) -> list[Estimate]:
        """Return plans in which the best drafter that often finds too little falls back on one that does not."""
        by_name = {estimate.plan.drafter: estimate for estimate in known if estimate.plan.drafter}
        miss_probs = {name: self._miss_prob(name) for name in by_name}
        steady = [name for name, prob in miss_probs.items() if prob <= MIN_MISS_PROB and AND not in name]
        missing = [name for name, prob in miss_probs.items() if prob > MIN_MISS_PROB]
        if not steady or not missing or lengths[-1] < MIN_FOUND:
            return []
        name = max(missing, key=lambda name: by_name[name].speed)
        first = by_name[name]
        if first.plan.num_draft_tokens < FOUND_LENGTH:
            first = self.best_length(name, np.maximum(lengths, min(FOUND_LENGTH, lengths[-1])))
        return [self._falling_back(name, first, each, lengths) for each in steady]

    def _miss_prob(self, drafter: str) -> float:
        """Return how often a drafter finds too little."""
        drafted = self._acceptance[drafter].expected_drafted()
        return float(1 - (drafted[MIN_FOUND] - drafted[MIN_FOUND - 1]))

    def _falling_back(self, name: str, first: Estimate, drafter: str, lengths: Counts) -> Estimate:
        """Return the best plan that asks a drafter where the one with this name finds too little.

        Alone the first one commits a token in such a round. So the same text takes as many rounds of the other one as
        it needs for these tokens, each after a miss.
        """
        acceptance = self._acceptance[drafter]
        tokens, drafted = acceptance.expected_tokens()[lengths], acceptance.expected_drafted()[lengths]
        asking_s = self._costs.draft_s(name, first.plan.num_draft_tokens) + self._costs.other_s()
        missed_s = asking_s + self._costs.score_s(0, name)
        draft_s, score_s = self._costs.draft_each_s(drafter, lengths), self._costs.score_each_s(drafted, drafter)
        fallback_s = asking_s + draft_s + score_s
        seconds = first.seconds + self._miss_prob(name) * (fallback_s / tokens - missed_s)
        best = int(np.argmin(seconds))
        plan = replace(first.plan, fallback=DraftPlan(drafter, int(lengths[best])))
        return Estimate(plan, first.num_tokens, float(seconds[best]))
