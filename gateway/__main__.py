"""`python -m gateway`: the only module that puts the gateway's parts together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import specdec.serving.process_start  # noqa: F401  # first: a package that is missing becomes one sentence
from gateway.app import Readiness, application
from gateway.coordinators import Coordinators
from gateway.server import Server, listening, serving_http
from gateway.settings import GatewaySettings
from gateway.token_texts import TokenTexts
from specdec.errors import SpecdecError
from specdec.serving.background import in_background
from specdec.serving.process import CannotServe, run
from specdec.serving.settings import load
from specdec.serving.telemetry import get_logger, serve_metrics
from specdec.serving.tokenizer import load_tokenizer
from specdec.serving.tracing.start import traced
from specdec.watched import WatchedError


def main() -> None:
    """Run the gateway until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(GatewaySettings, "gateway")
    run(settings, "gateway", "gateway", lambda: traced_serving(settings), SpecdecError, WatchedError)


@asynccontextmanager
async def traced_serving(settings: GatewaySettings) -> AsyncIterator[Server]:
    """Serve, and send the spans of requests to a collector if one is named."""
    async with traced("gateway", settings.otlp_endpoint, 0), serving(settings) as server:
        yield server


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[Server]:
    """Give a gateway that has reached a coordinator; drain and close it at the end. Raises CannotServe."""
    for problem in settings.problems():
        raise CannotServe(problem)
    server, readiness, listener = Server(), Readiness(), listening(settings)
    port = listener.getsockname()[1]
    get_logger().info("listening", port=port, metrics_port=serve_metrics(settings))
    coordinators = Coordinators(settings, await _token_texts(settings.tokenizer))
    app = application(coordinators, settings, readiness)
    try:
        async with serving_http(app, listener, settings, server):
            server.port = port
            await coordinators.answered()
            readiness.is_ready = True
            get_logger().info("ready", port=port)
            yield server
            readiness.is_ready = False
            get_logger().info("draining", drain_s=settings.drain_s)
    finally:
        listener.close()
        await coordinators.close()


async def _token_texts(name: str | None) -> TokenTexts | None:
    return await in_background(lambda: TokenTexts(load_tokenizer(name))) if name else None


if __name__ == "__main__":
    main()
