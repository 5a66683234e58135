"""Tokens that an OpenID Connect provider signs (JWT): issuer, audience, expiry and signature are checked by PyJWT."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jwt

from specdec.errors import UnauthenticatedError
from specdec.serving.security.bearer import TENANT
from specdec.serving.security.key_set import KeySet, open_key_set
from specdec.serving.settings import JwtSettings

# signatures by private keys alone: with a shared secret whoever checks tokens could make them
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY_S = 30.0  # of clocks that differ
_JWT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)

REFUSALS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "has expired; get a new one"),
    (jwt.ImmatureSignatureError, "is not valid yet; see to the clocks"),
    (jwt.InvalidAudienceError, "was issued for another audience; ask for one for this service"),
    (jwt.InvalidIssuerError, "comes from another issuer; ask the issuer that this service trusts"),
    (jwt.MissingRequiredClaimError, "lacks a claim that this service needs; ask the operator which"),
)


def looks_like_jwt(token: str) -> bool:
    """Return whether a token has a JWT's three parts."""
    return _JWT.fullmatch(token) is not None


class JsonWebTokens:
    """Checks the tokens of one issuer. Raises WatchedError for a file of keys that cannot be used."""

    def __init__(
        self, settings: JwtSettings, keys: KeySet | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives the time by which running calls expire, in seconds since 1970."""
        self._settings, self._clock = settings, clock
        self._keys = keys or open_key_set(settings)

    async def credential(self, token: str) -> "SignedCredential":
        """Return what a token is. Raises UnauthenticatedError, UnavailableError without any keys."""
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            claims = self._checked(token, await self._keys.find(key_id))
        except jwt.PyJWTError as error:
            reasons = (reason for kind, reason in REFUSALS if isinstance(error, kind))
            raise UnauthenticatedError(f"the token {next(reasons, 'is not valid; get a new one')}") from None
        tenant = claims[self._settings.tenant_claim]
        if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
            raise UnauthenticatedError("the token names no tenant that this service can use; ask the operator")
        return SignedCredential(self, tenant, float(claims["exp"]), key_id)

    async def check(self, credential: "SignedCredential") -> None:
        """Raise UnauthenticatedError if a token has expired, or its key is not published any more."""
        if self._clock() > credential.expires_s + LEEWAY_S:
            raise UnauthenticatedError("the token has expired; get a new one")
        await self._keys.find(credential.key_id)

    def _checked(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        settings = self._settings
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=ALGORITHMS,
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", settings.tenant_claim]},
        )
        return claims


@dataclass(frozen=True, slots=True)
class SignedCredential:
    """A signed token that was checked: see `Credential`."""

    tokens: JsonWebTokens
    tenant: str
    expires_s: float  # since 1970
    key_id: str | None

    async def check(self) -> None:
        """Raise as `JsonWebTokens.check`."""
        await self.tokens.check(self)
