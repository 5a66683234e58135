"""The HTTP server: uvicorn on a socket of ours, with our limits, our certificates, and our signals."""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway.protocol import LimitedProtocol
from gateway.settings import GatewaySettings
from specdec.serving.process import CannotServe, supervised
from specdec.serving.security.tls import log_reload
from specdec.serving.telemetry import get_logger
from specdec.tls import TlsFiles, watched
from specdec.watched import CHECK_PERIOD_S

BACKLOG = 2048
IDLE_S = 75  # that a connection may wait for its next request: longer than proxies keep theirs


class Server:
    """What serves: see `specdec.serving.process.Serving`."""

    def __init__(self) -> None:
        self.port = 0
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def fail(self, reason: str) -> None:
        """End the process with an error."""
        if not self.failure.done():
            self.failure.set_result(reason)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has some."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def listening(settings: GatewaySettings) -> socket.socket:
    """Return a listening socket. Raises CannotServe if the port is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        problem = f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error})"
        raise CannotServe(f"{problem}; choose another port") from None


@asynccontextmanager
async def serving_http(
    app: ASGIApp, listener: socket.socket, settings: GatewaySettings, server: Server
) -> AsyncIterator[None]:
    """Serve the application while the context lasts; at its end let running requests end within the drain time."""
    logs = logging.getLogger("uvicorn.error")
    logs.setLevel(logging.ERROR)  # it warns of each request that is no HTTP
    logs.addFilter(_is_no_drain)
    http: Any = functools.partial(LimitedProtocol, settings=settings)
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        reset_contextvars=True,  # a request must not begin with another one's caller
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=round(settings.drain_s),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    with _usable_certificates():
        config.load()
    running = _Uvicorn(config)
    async with supervised(server, "certificates", _renewed(config.ssl, settings)):
        task = asyncio.create_task(running.serve([listener]), name="http")
        task.add_done_callback(lambda _: _note_end(running, server))
        try:
            yield
        finally:
            running.should_exit = True
            await asyncio.wait([task])


def _note_end(running: _Uvicorn, server: Server) -> None:
    if not running.should_exit:
        server.fail("its HTTP server has ended; start it again")


def _is_no_drain(record: logging.LogRecord) -> bool:
    """Leave out that requests outlast the drain time: their clients come back elsewhere."""
    return not record.msg.startswith("Cancel %s running task")


@contextlib.contextmanager
def _usable_certificates() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, OSError) as error:
        raise CannotServe(f"--tls-certificate and --tls-key cannot be used: {error}") from None


async def _renewed(context: ssl.SSLContext | None, settings: GatewaySettings) -> None:
    """Load certificates again whenever their files are replaced; new connections get them."""
    if context is None or settings.tls_certificate is None or settings.tls_key is None:
        await asyncio.Event().wait()
        return
    files = watched(TlsFiles(None, settings.tls_certificate, settings.tls_key), log_reload)
    loaded = files.value
    while True:
        await asyncio.sleep(CHECK_PERIOD_S)
        if files.value != loaded:
            with contextlib.suppress(OSError, ssl.SSLError):  # replaced again at this moment: the next look takes it
                context.load_cert_chain(settings.tls_certificate, settings.tls_key)
                loaded = files.value
                get_logger().debug("certificates_loaded")
