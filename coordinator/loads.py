"""How busy the target workers are, by what they reported last."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from specdec.outside import REAL, Outside
from specdec.v1 import types_pb2

VALID_S = 5.0  # a worker that reports nothing for so long has nothing to do
MAX_REPORTS = 64
MAX_S = 3600.0  # larger values that a worker reports are ignored


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """The mean over the middle half of the latest reports: sessions go to any of the workers, and some may be wrong."""

    prompt_s: float = 0.0  # seconds of reading that are ahead of a new prompt
    prompt_token_s: float = 0.0  # of a prompt token; 0: not known
    num_resident: float = 0.0  # sessions with a place in the KV cache
    num_without_place: float = 0.0  # sessions that wait for one


class ReportedLoads:
    """The latest reports."""

    def __init__(self, outside: Outside = REAL) -> None:
        self._outside = outside
        self._reports: deque[tuple[float, types_pb2.Load]] = deque(maxlen=MAX_REPORTS)
        self._prompt_token_s = deque[float](maxlen=MAX_REPORTS)

    def report(self, load: types_pb2.Load) -> None:
        """Take note of a worker's report; one that cannot be true is ignored."""
        if not 0 <= load.prompt_s <= MAX_S or math.isnan(load.prompt_s):
            return
        self._reports.append((self._outside.now_s(), load))
        if load.num_prompt_tokens and load.prompt_s > 0:
            self._prompt_token_s.append(load.prompt_s / load.num_prompt_tokens)

    @property
    def load(self) -> TargetLoad:
        """What the reports say; nothing where there are none of late."""
        since_s = self._outside.now_s() - VALID_S
        while self._reports and self._reports[0][0] < since_s:
            self._reports.popleft()
        loads = [load for _, load in self._reports]
        return TargetLoad(
            _middle_mean(load.prompt_s for load in loads),
            _middle_mean(self._prompt_token_s),
            _middle_mean(load.num_resident for load in loads),
            _middle_mean(load.num_without_place for load in loads),
        )


def _middle_mean(values: Iterable[float]) -> float:
    """Return the mean without the highest and the lowest quarter; 0 of nothing."""
    ordered = sorted(values)
    num_out = (len(ordered) + 1) // 4
    kept = ordered[num_out : len(ordered) - num_out]
    return sum(kept) / len(kept) if kept else 0.0
