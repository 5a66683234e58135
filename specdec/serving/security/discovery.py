"""Where an issuer publishes its keys: OpenID Connect Discovery 1.0, section 4."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from specdec.serving.safe_url import is_safe_url
from specdec.watched import WatchedError

WELL_KNOWN = "/.well-known/openid-configuration"
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20

Fetch = Callable[[str], bytes]
"""Returns what a URL has. Raises OSError, WatchedError."""


def fetched(url: str) -> bytes:
    """Return what a URL has, a byte past MAX_BYTES at most. Raises OSError, WatchedError."""
    with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
        if not is_safe_url(answer.geturl()):
            raise WatchedError(f"{url} redirects to plain text; give the address itself")
        content: bytes = answer.read(MAX_BYTES + 1)
    return content


def discovered(issuer: str, fetch: Fetch = fetched) -> bytes:
    """Return an issuer's key set, from where its discovery document says. Raises OSError, WatchedError."""
    source = issuer.rstrip("/") + WELL_KNOWN
    document = _parsed(fetch(source), source)
    if document.get("issuer") != issuer:
        raise WatchedError(f"{source} is of another issuer; give --jwt-issuer as that document has it")
    keys = document.get("jwks_uri")
    if not isinstance(keys, str) or not is_safe_url(keys):
        raise WatchedError(f"{source} names no https address of keys (jwks_uri); give --jwt-keys")
    return fetch(keys)


def _parsed(content: bytes, source: str) -> dict[str, Any]:
    try:
        document = json.loads(content) if len(content) <= MAX_BYTES else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise WatchedError(f"{source} is no discovery document; see to --jwt-issuer, or give --jwt-keys")
    return document
