"""Turns traces on for the life of a process, if its settings or the standard variables name an endpoint."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from specdec.serving.background import in_background
from specdec.serving.tracing import spans
from specdec.serving.tracing.endpoint import CannotTrace, endpoint_of

FLUSH_S = 3.0  # at the end, for a collector that answers


@asynccontextmanager
async def traced(service: str, given: str | None, every: int) -> AsyncIterator[None]:
    """Trace while the context lasts, one round in `every`; send what is left at its end. Raises CannotTrace."""
    endpoint = endpoint_of(given, os.environ)
    if endpoint is None:
        yield
        return
    try:
        from specdec.serving.tracing.otlp import OtlpTracer, quieten
    except ModuleNotFoundError as error:
        problem = f"traces go to {endpoint}, and the package of the module {error.name} is not installed"
        raise CannotTrace(f"{problem}; run: pip install 'specdec[tracing]', or name no endpoint") from None
    quieten()
    tracer = OtlpTracer(service, given, every)
    spans.turn_on(tracer)
    try:
        yield
    finally:
        spans.turn_on(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await in_background(tracer.close)
