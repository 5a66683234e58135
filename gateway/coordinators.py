"""The coordinators behind the gateway: one client for all requests, each with the key of its own caller.

The client repeats and resumes by itself. Before a request's first token the gateway is less patient than it: what is
overloaded is said at once, and a coordinator that is away is waited for as long as --patience-s says.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from gateway import metrics
from gateway.problems import SERVER, HttpProblem
from gateway.settings import GatewaySettings
from gateway.token_texts import TokenTexts
from specdec.client import AsyncClient
from specdec.completion import ServedModel
from specdec.errors import OverloadedError, SpecdecError, UnauthenticatedError
from specdec.retry import Retry

KNOWN_S = 5.0  # how long a model's name counts as known: each request is checked against it
CANCEL_S = 2.0  # that ending a session may take; one that is not ended so is ended by its coordinator, later
ASK_AGAIN_S = 0.5  # whether a coordinator answers
ASK_S = 5.0  # that an answer about the model may take


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request the current task serves: the key that it brought, and when it came."""

    key: str | None
    begin_s: float


NOBODY = Caller(None, float("-inf"))
_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def set_caller(key: str | None, now_s: Callable[[], float] = time.monotonic) -> None:
    """Serve a caller with this key for the rest of this task."""
    _caller.set(Caller(key, now_s()))


@dataclass(frozen=True, slots=True)
class Offer:
    """The model that requests may ask for, by its public name."""

    name: str
    served: ServedModel

    @property
    def system_fingerprint(self) -> str:
        """Return what changes with anything that the text depends on."""
        return f"fp_{self.served.target.fingerprint[:16]}"


class Coordinators:
    """The client, what it knows of the model, and the sessions that are being ended."""

    def __init__(self, settings: GatewaySettings, token_texts: TokenTexts | None) -> None:
        self._settings = settings
        self._token_texts = token_texts
        self._offer: Offer | None = None
        self._offered_s = float("-inf")
        self._ending: set[asyncio.Task[None]] = set()
        tls = settings.coordinator_tls_files
        self.client = AsyncClient(
            settings.coordinator,
            tls=tls,
            spreads_calls=True,
            insecure=tls is None,  # the settings have refused plain text where it was not allowed
            token=lambda: _caller.get().key,
            timeout_s=settings.timeout_s,
            connect_timeout_s=max(settings.patience_s, ASK_AGAIN_S),
            on_retry=self._give_up_early,
        )

    async def close(self) -> None:
        """End what is being ended, and the connection."""
        await asyncio.gather(*self._ending)
        await self.client.close()

    async def answered(self) -> None:
        """Return once a coordinator has answered, if only that it wants a key."""
        while True:
            set_caller(None)
            try:
                await self._ask(ASK_S)
            except UnauthenticatedError:
                return
            except SpecdecError:
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                return

    async def offer(self) -> Offer:
        """Return what is offered, asked with the caller's key. Raises SpecdecError."""
        return await self._ask(self._settings.patience_s + ASK_S)

    async def checked_offer(self, name: str) -> Offer:
        """Return what is offered if it has this name. Raises HttpProblem, SpecdecError."""
        offer = self._offer if time.monotonic() - self._offered_s < KNOWN_S else None
        offer = offer or await self.offer()
        if offer.name != name:
            problem = f"the model {name!r} does not exist here; the model is {offer.name!r}"
            raise HttpProblem(404, problem, param="model", code="model_not_found")
        return offer

    def token_texts(self, offer: Offer) -> TokenTexts:
        """Return the texts of the model's tokens. Raises HttpProblem."""
        if self._token_texts is None:
            problem = "logprobs needs the texts of tokens, and this gateway has no tokenizer; start it with --tokenizer"
            raise HttpProblem(400, problem, param="logprobs", code="unsupported_parameter")
        if self._token_texts.fingerprint != offer.served.target.tokenizer_fingerprint:
            problem = "the gateway's --tokenizer is not the model's; give it the target model's"
            raise HttpProblem(500, problem, kind=SERVER, param="logprobs", code="model_mismatch")
        return self._token_texts

    def end(self, session_id: str) -> None:
        """End a session in the background: its client has left."""
        self._in_background(self._end(session_id, _caller.get().key))

    async def _end(self, session_id: str, key: str | None) -> None:
        set_caller(key)
        try:
            await self.client.cancel(session_id, timeout_s=CANCEL_S)
        except SpecdecError:
            return  # it is detached, and its coordinator ends it after --detached-patience-s

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ask(self, timeout_s: float) -> Offer:
        served = await self.client.get_model(timeout_s=timeout_s)
        self._offer = Offer(self._settings.model_name or served.target.name, served)
        self._offered_s = time.monotonic()
        return self._offer

    def _give_up_early(self, retry: Retry) -> None:
        """Raise the failure of a call that has brought nothing yet, instead of another attempt."""
        if retry.session_id is None:
            waited_s = time.monotonic() - _caller.get().begin_s + retry.pause_s
            if isinstance(retry.failure, OverloadedError) or waited_s > self._settings.patience_s:
                raise retry.failure
        metrics.NUM_RETRIES.inc()
