"""Several drafters as one: asked in parallel, their proposals merged into one tree."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from coordinator.joint_names import parts_of
from coordinator.merging import merged, shares
from coordinator.rounds import Drafted, RoundDrafter
from specdec.exact.values import Observations


class JointDrafter:
    """Drafts with several drafters of a session at once."""

    def __init__(self, parts: Sequence[RoundDrafter]) -> None:
        self._parts = parts

    @property
    def available(self) -> bool:
        """Whether all of them are worth asking now."""
        return all(part.available for part in self._parts)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return one tree of at most K tokens; it lacks the tokens of a drafter that fails."""
        asked = [
            part.propose(committed, share, stop_below)
            for part, share in zip(self._parts, shares(num_draft_tokens, len(self._parts)), strict=True)
            if share
        ]
        answers = await asyncio.gather(*asked)
        return Drafted(
            merged([answer.proposal for answer in answers]) if answers else Drafted().proposal,
            max((answer.elapsed_s for answer in answers), default=0.0),
            max((answer.num_fed for answer in answers), default=1),
            all(answer.has_failed for answer in answers),
        )

    def observe(self, observations: Observations) -> None:
        """Do nothing: each of them receives observations by itself."""


def joint_drafters(names: Iterable[str], drafters: Mapping[str, RoundDrafter]) -> dict[str, JointDrafter]:
    """Return the joint drafters among these names, by name."""
    parts = {name: parts_of(name) for name in names}
    return {name: JointDrafter([drafters[part] for part in each]) for name, each in parts.items() if len(each) > 1}
