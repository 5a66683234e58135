"""The public keys of a token issuer (JWKS), from a file or a URL; kept, and refreshed while the old ones serve."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jwt

from specdec.errors import UnauthenticatedError, UnavailableError
from specdec.serving.security.discovery import MAX_BYTES, Fetch, discovered, fetched
from specdec.serving.settings import JwtSettings
from specdec.serving.telemetry import get_logger
from specdec.watched import Watched, WatchedError, signature_of

REFRESH_S = 300.0
MIN_REFRESH_S = 10.0  # a token with an unknown key id asks for new keys, and anybody can send such tokens
SIGNING_TYPES = ("RSA", "EC", "OKP")  # with a private key; "oct" is a shared secret

Keys = dict[str | None, jwt.PyJWK]  # by key id


class KeySet(Protocol):
    """An issuer's keys."""

    async def find(self, key_id: str | None) -> jwt.PyJWK:
        """Return a key; without an id the only one. Raises UnauthenticatedError, UnavailableError without any keys."""


def open_key_set(settings: JwtSettings) -> KeySet:
    """Return an issuer's keys: of a file, of a URL, or of where the issuer says that they are.

    Raises WatchedError for a file that cannot be used.
    """
    if settings.keys is None:
        return UrlKeySet(settings.issuer, discovered)
    return UrlKeySet(settings.keys) if "://" in settings.keys else FileKeySet(Path(settings.keys))


class FileKeySet:
    """Keys in a file, which may be replaced."""

    def __init__(self, path: Path) -> None:
        self._keys = Watched(lambda: signature_of([path]), lambda: _read(path), _log_reload)

    async def find(self, key_id: str | None) -> jwt.PyJWK:
        """Return a key, as `KeySet.find`."""
        return _found(self._keys.value, key_id)


class UrlKeySet:
    """Keys at a URL. Calls wait for them only where none are known, or not the one that a token names."""

    def __init__(self, url: str, fetch: Fetch = fetched, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._fetch, self._clock = url, fetch, clock
        self._keys: Keys = {}
        self._fetched_at = self._tried_at = -float("inf")
        self._refreshing: asyncio.Task[None] | None = None

    async def find(self, key_id: str | None) -> jwt.PyJWK:
        """Return a key, as `KeySet.find`."""
        if self._clock() >= self._fetched_at + REFRESH_S:
            refreshing = self._refresh()
            if refreshing and not self._keys:
                await asyncio.shield(refreshing)
        if key_id not in self._keys and (refreshing := self._refresh()):
            await asyncio.shield(refreshing)
        if not self._keys:
            raise UnavailableError("the token cannot be checked: its issuer's keys cannot be fetched; try again soon")
        return _found(self._keys, key_id)

    def _refresh(self) -> "asyncio.Task[None] | None":
        """Return the refresh that runs, or begin one unless the last try was just now."""
        if self._refreshing is None and self._clock() >= self._tried_at + MIN_REFRESH_S:
            self._tried_at = self._clock()
            self._refreshing = asyncio.create_task(self._fetch_keys(), name="fetch token keys")
        return self._refreshing

    async def _fetch_keys(self) -> None:
        try:
            self._keys = parse_keys(await asyncio.to_thread(self._fetch, self._url), self._url)
            self._fetched_at = self._clock()
        except (OSError, WatchedError) as error:
            get_logger().error("token_keys_refused", error=type(error).__name__, num_known=len(self._keys))
        finally:
            self._refreshing = None


def _read(path: Path) -> Keys:
    try:
        return parse_keys(path.read_bytes(), str(path))
    except OSError as error:
        raise WatchedError(f"cannot read {path}: {error.strerror}") from None


def parse_keys(content: bytes, source: str) -> Keys:
    """Return the public keys of a JWKS. Raises WatchedError if there are none that can be used."""
    keys: Keys = {}
    for entry in _entries(content):
        with suppress(jwt.PyJWTError):  # a kind of key that we do not know; its issuer has others
            keys[entry.get("kid")] = jwt.PyJWK(entry)
    if not keys:
        raise WatchedError(f"{source} has no usable public keys; give a JWKS: {{'keys': [...]}} of RSA, EC or OKP keys")
    return keys


def _entries(content: bytes) -> list[dict[str, Any]]:
    """Return the entries that sign; none where the content is no JWKS."""
    try:
        given = json.loads(content)["keys"] if len(content) <= MAX_BYTES else []
    except (ValueError, TypeError, KeyError):
        return []
    entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    return [entry for entry in entries if entry.get("kty") in SIGNING_TYPES and entry.get("use", "sig") == "sig"]


def _found(keys: Keys, key_id: str | None) -> jwt.PyJWK:
    if key_id is None and len(keys) == 1:
        return next(iter(keys.values()))
    if key_id not in keys:
        raise UnauthenticatedError("the token is signed by a key that its issuer does not publish; get a new one")
    return keys[key_id]


def _log_reload(problem: WatchedError | None) -> None:
    if problem is None:
        get_logger().info("token_keys_reloaded")
    else:
        get_logger().error("token_keys_refused", problem=str(problem))
