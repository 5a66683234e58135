"""How often a session may be fenced without any text in between: what fences it every time is at fault, and says so."""

import asyncio

from coordinator.followed import OwnerLeft
from specdec.errors import FencedError, UnavailableError
from specdec.outside import Outside
from specdec.retry import RetryPolicy

MAX_FENCES = 8
NUM_AT_ONCE = 2  # after which no time passes: usually the next owner is known at once
PAUSES = RetryPolicy(first_s=0.05, maximum_s=1.0)


class Fences:
    """Those of one follower, since its text last went on."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._offset, self._num = -1, 0

    def count(self, refusal: FencedError | OwnerLeft, offset: int) -> None:
        """Count one at a place in the text. Raises UnavailableError if there were too many."""
        self._num = self._num + 1 if offset == self._offset else 1
        self._offset = offset
        if self._num > MAX_FENCES:
            why = f" (last: {refusal})" if isinstance(refusal, FencedError) else ""
            raise UnavailableError(
                f"this session found no owner after {MAX_FENCES} attempts; resume it{why}"
            ) from refusal

    async def pause(self) -> None:
        """Wait before the next attempt, longer each time."""
        if self._num > NUM_AT_ONCE:
            pause_s = PAUSES.pause_s(self._num - NUM_AT_ONCE, 0.0, self._outside.uniform())
            await asyncio.sleep(pause_s or 0.0)
