"""The line in which large messages wait to be looked at: running sessions keep most of the event loop.

To parse a message of half a megabyte and to refuse it takes 2 ms, and a crowd may send nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from prometheus_client import Counter as CounterMetric

from specdec.errors import OverloadedError

QUICK_BYTES = 16 << 10  # a message that is not larger need not wait
BYTES_A_SECOND = 50e6  # that are looked at: a fifth of the event loop's time
MAX_WAITING_BYTES = 64 << 20

NUM_REFUSED = CounterMetric("specdec_large_messages_refused", "Calls refused as too many bytes of large ones waited")


class LargeMessages:
    """One after the other, so many bytes a second, the tenants in turn.

    A tenant's messages may wait while they have no more bytes than are left: two tenants get a third of the room each.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._lines = WeakValueDictionary[str, asyncio.Lock]()  # while somebody waits there
        self._waiting = Counter[str]()  # bytes by tenant

    async def wait(self, tenant: str, num_bytes: int) -> None:
        """Return when a message may be looked at. Raises OverloadedError."""
        if num_bytes <= QUICK_BYTES:
            return
        async with self._counted(tenant, num_bytes):
            line = self._lines.setdefault(tenant, asyncio.Lock())
            async with line, self._turn:
                await asyncio.sleep(num_bytes / BYTES_A_SECOND)

    @asynccontextmanager
    async def _counted(self, tenant: str, num_bytes: int) -> AsyncIterator[None]:
        if self._waiting[tenant] + num_bytes > MAX_WAITING_BYTES - self._waiting.total():
            NUM_REFUSED.inc()
            problem = f"{self._waiting.total()} bytes of large requests wait already"
            raise OverloadedError(f"{problem}; try again soon", limit="messages")
        self._waiting[tenant] += num_bytes
        try:
            yield
        finally:
            self._waiting[tenant] -= num_bytes
            if not self._waiting[tenant]:
                del self._waiting[tenant]
