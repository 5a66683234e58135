"""HTTP/1.1 with limits: requests that are no HTTP, too large or too slow get an error in OpenAI's form."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.problems import PROBLEMS, HttpProblem, encoded
from gateway.settings import GatewaySettings

LINGER_S = 2.0  # how long a connection is read on after a refusal: closed at once, its client might not see the answer
REFUSABLE = (h11.IDLE, h11.SEND_RESPONSE)  # states in which no other answer has begun
NO_HTTP = HttpProblem(400, "the request is not valid HTTP/1.1", code="invalid_http")


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn's, with a clock for heads and for bodies that nobody reads."""

    def __init__(self, *given: Any, settings: GatewaySettings, **named: Any) -> None:
        super().__init__(*given, **named)
        self._settings = settings
        self._clock: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._settings.max_connections:
            self._refuse(PROBLEMS[503])

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take data; after a refusal it is read to no end."""
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read; uvicorn calls this while it handles h11's error."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refuse(PROBLEMS.get(status, NO_HTTP))

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Run the clock while a head, or a body that has its answer, is awaited; stop it while a request is served."""
        is_awaited = self.conn.their_state is h11.IDLE and not self.timeout_keep_alive_task
        is_unread = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (is_awaited or is_unread):
            self._stop_clock()
        elif self._clock is None and not self._is_refused:
            self._clock = self.loop.call_later(self._settings.read_timeout_s, self._refuse, PROBLEMS[408])

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _refuse(self, problem: HttpProblem) -> None:
        """Send an error, and close the connection soon; at once if another answer has begun."""
        self._stop_clock()
        self._is_refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True  # nobody gets what the application may say to it
            self.cycle.message_event.set()
        if self.conn.our_state not in REFUSABLE or self.transport.is_closing():
            self.transport.close()
            return
        body = encoded(problem.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        answer = h11.Response(status_code=problem.status, headers=[*(headers | problem.headers).items()])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
