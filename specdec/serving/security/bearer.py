"""Static bearer tokens: a TOML file with the hashes of each tenant's tokens.

    [acme]
    tokens = ["sha256:..."]

    [example]
    tokens = ["sha256:...", { hash = "sha256:...", expires = 2027-01-31T00:00:00Z }]

A tenant may have several, so that a new one can be handed out before the old one is withdrawn. A replaced file counts
within a second. `specdec token` makes a token and its hash. A token is 256 random bits, so one unsalted hash is enough,
and the time that looking it up takes says nothing about any token.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec.errors import UnauthenticatedError
from specdec.serving.telemetry import get_logger
from specdec.watched import CHECK_PERIOD_S, Watched, WatchedError, signature_of

TENANT = re.compile(r"[A-Za-z0-9][\w.@:/-]{0,127}", re.ASCII)
HASH = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KnownToken:
    """Whose token it is, and until when."""

    tenant: str
    expires: datetime | None = None


class StaticTokens:
    """The tokens of a file. Raises WatchedError for a file that cannot be used."""

    def __init__(self, path: Path, period_s: float = CHECK_PERIOD_S) -> None:
        self._known = Watched(lambda: signature_of([path]), lambda: read_tokens(path), _log_reload, period_s)

    def credential(self, token: str) -> "StaticCredential":
        """Return what a token is. Raises UnauthenticatedError."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        return StaticCredential(self, digest, self.tenant_of(digest))

    def tenant_of(self, digest: str) -> str:
        """Return whose token has this hash, now. Raises UnauthenticatedError."""
        known = self._known.value.get(digest)
        if known is None:
            raise UnauthenticatedError("the token is unknown, or was withdrawn; ask the operator for a new one")
        if known.expires is not None and known.expires <= datetime.now(UTC):
            raise UnauthenticatedError("the token has expired; ask the operator for a new one")
        return known.tenant


@dataclass(frozen=True, slots=True)
class StaticCredential:
    """A token of the file: see `Credential`."""

    tokens: StaticTokens
    digest: str
    tenant: str

    async def check(self) -> None:
        """Raise UnauthenticatedError if it was withdrawn, or has expired, or was given to another tenant."""
        if self.tokens.tenant_of(self.digest) != self.tenant:
            raise UnauthenticatedError("the token belongs to another tenant by now; ask the operator for a new one")


def read_tokens(path: Path) -> Mapping[str, KnownToken]:
    """Return the tokens of a file by their hash. Raises WatchedError; it never quotes a value: it may be a token."""
    try:
        tenants = tomllib.loads(path.read_text())
    except OSError as error:
        raise WatchedError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise WatchedError(f"{path} is not TOML; give a table for each tenant with `tokens = [...]`") from None
    known: dict[str, KnownToken] = {}
    for tenant, table in tenants.items():
        for number, entry in enumerate(_entries(path, tenant, table)):
            digest, token = _parsed(f"{path}: token {number + 1} of {tenant}", tenant, entry)
            if digest in known and known[digest].tenant != tenant:
                raise WatchedError(f"{path}: {tenant} and {known[digest].tenant} have the same token; make another")
            known[digest] = token
    return known


def _entries(path: Path, tenant: str, table: Any) -> list[Any]:
    if not TENANT.fullmatch(tenant):
        raise WatchedError(f"{path} has a tenant whose name is not one; use letters, digits and . @ : / _ -")
    if not isinstance(table, dict) or set(table) != {"tokens"} or not isinstance(table["tokens"], list):
        raise WatchedError(f"{path}: the tenant {tenant} needs exactly one entry, `tokens = [...]`")
    return table["tokens"]


def _parsed(where: str, tenant: str, entry: Any) -> tuple[str, KnownToken]:
    given = {"hash": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not set(given) <= {"hash", "expires"}:
        raise WatchedError(f"{where} has to be a hash, or {{ hash = ..., expires = ... }}")
    found = HASH.fullmatch(given.get("hash", "")) if isinstance(given.get("hash", ""), str) else None
    if found is None:
        raise WatchedError(f"{where} is not `sha256:` and 64 hexadecimal digits; `specdec token` prints it")
    expires = given.get("expires")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise WatchedError(f"{where} expires at no time; write 2027-01-31T00:00:00Z, with its zone")
    return found[1], KnownToken(tenant, expires)


def _log_reload(problem: WatchedError | None) -> None:
    if problem is None:
        get_logger().info("tokens_reloaded")
    else:
        get_logger().error("tokens_refused", problem=str(problem))
