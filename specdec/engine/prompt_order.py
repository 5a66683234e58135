"""Which prompt is read next: of the group that was served least, the one that is soonest read.

Groups are fair by what was read for them (start-time fair queueing, Goyal et al. 1996, a relative of deficit round
robin). A prompt becomes more urgent while it waits: shorter ones that come later delay it by about the time that it
takes itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

PlaceT = TypeVar("PlaceT")

LEAST_S = 1e-9  # of a prompt: those whose cost is not measured yet are ordered too


@dataclass(frozen=True, slots=True)
class Prompt(Generic[PlaceT]):
    """A prompt that is being read, or is to be."""

    place: PlaceT
    group: str
    left_s: float  # to read the rest
    waited_s: float  # since it arrived, while others were read

    @property
    def urgency(self) -> float:
        """The least is read first."""
        return self.left_s - self.waited_s


class PromptOrder:
    """The groups' shares: what was read for each group that has prompts."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}

    def ordered(self, prompts: Iterable[Prompt[PlaceT]]) -> list[PlaceT]:
        """Return the prompts in the order in which they are read, if each is read whole."""
        queues: dict[str, list[Prompt[PlaceT]]] = {}
        for prompt in sorted(prompts, key=lambda prompt: prompt.urgency, reverse=True):
            queues.setdefault(prompt.group, []).append(prompt)
        self._enter(queues)
        served_s, order = dict(self._served_s), list[PlaceT]()
        while queues:
            group = min(queues, key=lambda name: served_s[name])
            prompt = queues[group].pop()
            served_s[group] += max(prompt.left_s, LEAST_S)
            order.append(prompt.place)
            if not queues[group]:
                del queues[group]
        return order

    def charge(self, group: str, read_s: float) -> None:
        """Take note that so much was read for a group."""
        self._served_s[group] = self._served_s.get(group, 0.0) + max(read_s, LEAST_S)

    def _enter(self, groups: Iterable[str]) -> None:
        """Forget groups without prompts; those that come begin level with the least: nobody saves up while away."""
        groups = list(groups)
        least_s = min((self._served_s[group] for group in groups if group in self._served_s), default=0.0)
        self._served_s = {group: self._served_s.get(group, least_s) for group in groups}
