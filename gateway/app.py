"""The routes of the gateway, and how each exchange ends: answered, refused, or left by its client."""

import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import metrics
from gateway.choices import Content
from gateway.coordinators import Coordinators, Offer, set_caller
from gateway.exchange import ClientLeft, Exchange
from gateway.generating import Generating
from gateway.page_files import Page
from gateway.problems import PROBLEMS, SERVER, HttpProblem, encoded, internal_problem, problem_of
from gateway.settings import GatewaySettings
from specdec.errors import SpecdecError
from specdec.serving.process import where
from specdec.serving.telemetry import get_logger
from specdec.serving.tracing import spans
from specdec.trace_context import continue_trace, trace_of

Handler = Callable[[Exchange], Awaitable[None]]
API_PREFIX = "/v1/"
CLIENT_LEFT = 499  # nginx's, in logs and metrics alone


class Readiness:
    """Whether requests should be sent to this gateway."""

    def __init__(self) -> None:
        self.is_ready = False


class Models:
    """/v1/models, and a model by its name. A coordinator is asked each time, so that it checks the key."""

    def __init__(self, coordinators: Coordinators) -> None:
        self._coordinators = coordinators
        self._created = int(time.time())

    async def all(self, exchange: Exchange) -> None:
        """Answer with the list, which has one model."""
        offer = await self._offer(exchange)
        await exchange.answer(200, {"object": "list", "data": [self._described(offer)]})

    async def one(self, exchange: Exchange) -> None:
        """Answer with the model that the path names. Raises HttpProblem."""
        offer, name = await self._offer(exchange), exchange.scope["path_params"]["name"]
        if name != offer.name:
            problem = f"the model {name!r} does not exist here; the model is {offer.name!r}"
            raise HttpProblem(404, problem, param="model", code="model_not_found")
        await exchange.answer(200, self._described(offer))

    async def _offer(self, exchange: Exchange) -> Offer:
        key = exchange.key()
        exchange.take_request_id()
        set_caller(key)
        return await exchange.unless_client_leaves(self._coordinators.offer())

    def _described(self, offer: Offer) -> Content:
        served = offer.served
        details = {
            "context_length": served.context_length,
            "max_draft_tokens": served.max_draft_tokens,
            "drafters": list(served.drafters),
            "fingerprint": served.target.fingerprint,
        }
        return {
            "id": offer.name,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "specdec": details,
        }


class Endpoint:
    """A handler as an ASGI application: every exception becomes an answer in OpenAI's form, and one log line."""

    def __init__(self, name: str, handler: Handler, settings: GatewaySettings) -> None:
        self._name, self._handler, self._settings = name, handler, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange, begin_s = Exchange(scope, receive, send, self._settings), time.monotonic()
        with metrics.NUM_RUNNING.track_inprogress(), self._span(exchange) as span:
            continue_trace(span.metadata() or trace_of(exchange.headers))
            status = await self._status(exchange)
            span.set(status=status)
            if status >= 500:
                span.fail(str(status))
        metrics.NUM_REQUESTS.labels(self._name, str(status)).inc()
        elapsed_s = round(time.monotonic() - begin_s, 4)
        get_logger().info("request", endpoint=self._name, status=status, elapsed_s=elapsed_s)

    def _span(self, exchange: Exchange) -> spans.Span:
        """Return the span of a request that coordinators are asked for."""
        if not self._name.startswith(API_PREFIX):
            return spans.NOTHING
        return spans.http_request(f"{exchange.scope['method']} {self._name}", exchange.headers)

    async def _status(self, exchange: Exchange) -> int:
        """Return the status of the answer, which is the problem's also where events had begun."""
        try:
            await self._handler(exchange)
            return exchange.status or 500
        except ClientLeft:
            metrics.NUM_CLIENTS_LEFT.inc()
            return CLIENT_LEFT
        except HttpProblem as problem:
            return await _refuse(exchange, problem)
        except SpecdecError as error:
            return await _refuse(exchange, problem_of(error, {}))
        except Exception as error:
            # the type alone: a message could quote a prompt
            get_logger().error("request_failed", error=type(error).__name__, where=where(error))
            return await _refuse(exchange, internal_problem())


class HeadLimit:
    """Refuses large heads, of which h11 refuses only those that arrive in several pieces."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._settings.max_header_bytes:
            await _refuse(Exchange(scope, receive, send, self._settings), PROBLEMS[431])
        else:
            await self._app(scope, receive, send)


async def _refuse(exchange: Exchange, problem: HttpProblem) -> int:
    if exchange.status is None:
        await exchange.answer(problem.status, problem.body, problem.headers)
    else:
        await exchange.event(problem.body)
        await exchange.end_events(is_whole=False)
    return problem.status


def application(coordinators: Coordinators, settings: GatewaySettings, readiness: Readiness) -> ASGIApp:
    """Return the ASGI application."""

    async def healthy(exchange: Exchange) -> None:
        await exchange.answer(200, {"status": "ok"})

    async def ready(exchange: Exchange) -> None:
        if not readiness.is_ready:
            problem = "no coordinator has answered yet, or the gateway is shutting down"
            raise HttpProblem(503, problem, kind=SERVER, code="not_ready", retry_after_s=1.0)
        await exchange.answer(200, {"status": "ready"})

    models, page = Models(coordinators), Page()
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/", page.index),
        ("GET", "/page/{name}", page.file),
        ("GET", "/healthz", healthy),
        ("GET", "/readyz", ready),
        ("GET", "/v1/models", models.all),
        ("GET", "/v1/models/{name:path}", models.one),
        ("POST", "/v1/completions", Generating(False, coordinators, settings)),
        ("POST", "/v1/chat/completions", Generating(True, coordinators, settings)),
    ]
    routes = [
        Route(path, Endpoint(path.partition("/{")[0], handler, settings), methods=[method])
        for method, path, handler in handlers
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted})
    app.router.redirect_slashes = False
    return HeadLimit(app, settings)


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answer a path that is not there, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        problem = HttpProblem(405, f"{path} takes {allowed}, not {request.method}", code="method_not_allowed")
    else:
        problem = HttpProblem(404, f"there is no {request.method} {path} here", code="unknown_url")
    headers = {**(error.headers or {}), "content-type": "application/json"}
    return Response(encoded(problem.body), problem.status, headers)
