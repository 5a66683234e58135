"""The gate of a service: who may call it at all. It is asked before a call's message is parsed, on every method.

Two conditions, each where the settings name it: the caller's certificate has an allowed name, and its token is valid.
"""

from collections.abc import Mapping
from typing import Any

from specdec.errors import PermissionDeniedError, UnauthenticatedError
from specdec.serving.security.bearer import StaticTokens
from specdec.serving.security.caller import set_tenant
from specdec.serving.security.json_web_tokens import JsonWebTokens, looks_like_jwt
from specdec.serving.security.running_calls import Credential
from specdec.serving.settings import ClientFacingSettings, ServiceSettings

MAX_TOKEN_CHARACTERS = 8192
SCHEME = "bearer "
ANY_NAME = "*"


class Gate:
    """Admits calls. Without names and tokens it admits all."""

    def __init__(
        self,
        names: frozenset[str] | None = None,
        static: StaticTokens | None = None,
        signed: JsonWebTokens | None = None,
    ) -> None:
        self._names, self._static, self._signed = names, static, signed

    @property
    def is_open(self) -> bool:
        """Return whether every caller that reaches the port is admitted."""
        return self._names is None and self._static is None and self._signed is None

    async def admit(self, context: Any) -> Credential | None:
        """Note the call's tenant; return what let the call in, None where that stays valid.

        Raises PermissionDeniedError, UnauthenticatedError, UnavailableError.
        """
        if self._names is not None:
            _check_names(self._names, context)
        if self._static is None and self._signed is None:
            return None
        credential = await self._credential(_token(dict(context.invocation_metadata())))
        set_tenant(credential.tenant)
        return credential

    async def _credential(self, token: str) -> Credential:
        if self._signed is not None and (self._static is None or looks_like_jwt(token)):
            return await self._signed.credential(token)
        assert self._static is not None
        return self._static.credential(token)


def gate_of(settings: ServiceSettings) -> Gate:
    """Return the gate that the settings ask for. Raises WatchedError for files that cannot be used."""
    names = None
    if settings.tls_client_ca is not None and settings.client_names != {ANY_NAME}:
        names = settings.client_names
    if not isinstance(settings, ClientFacingSettings):
        return Gate(names)
    static = StaticTokens(settings.tokens_file) if settings.tokens_file else None
    signed = JsonWebTokens(settings.jwt) if settings.jwt else None
    return Gate(names, static, signed)


def _check_names(names: frozenset[str], context: Any) -> None:
    found = {name.decode(errors="replace") for name in context.peer_identities() or ()}
    if not found & names:
        problem = "the caller's certificate has none of the names that this service lets in"
        raise PermissionDeniedError(f"{problem}; add one of its names to --tls-client-names")


def _token(metadata: Mapping[str, str | bytes]) -> str:
    given = metadata.get("authorization")
    if given is None:
        raise UnauthenticatedError("the call carries no token; send the metadata `authorization: Bearer TOKEN`")
    if not isinstance(given, str) or not given.lower().startswith(SCHEME) or len(given) > MAX_TOKEN_CHARACTERS:
        remedy = f"send `Bearer TOKEN`, at most {MAX_TOKEN_CHARACTERS} characters"
        raise UnauthenticatedError(f"the metadata `authorization` is not a bearer token; {remedy}")
    return given[len(SCHEME) :].strip()
