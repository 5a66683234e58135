"""An OpenID Connect provider on loopback: a discovery document, keys, and tokens that it signs."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from specdec.serving.security.discovery import WELL_KNOWN

AUDIENCE = "specdec"
KEYS = "/keys"


class FakeIssuer:
    """Publishes keys while it is up, and signs."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()  # by path
        self._published: list[dict[str, Any]] = []
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.rotate()

    @property
    def url(self) -> str:
        """Its name, as `iss` and --jwt-issuer have it."""
        return f"http://127.0.0.1:{self._port}"

    def rotate(self) -> None:
        """Publish a new key beside the last one, and sign with it."""
        self._id, self._key = f"key-{time.monotonic_ns()}", ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key())) | {"kid": self._id}
        self._published = [public, *self._published[:1]]

    def forget(self) -> None:
        """Publish the last key alone: the one before was stolen."""
        del self._published[1:]

    @property
    def public_key(self) -> str:
        """The key of the moment, as everybody may read it."""
        return str(self._published[0]["x"])

    def sign(self, algorithm: str = "ES256", key: Any = None, **claims: Any) -> str:
        """Return a token for the tenant acme; claims that are None are left out."""
        now = time.time()
        given = {"iss": self.url, "aud": AUDIENCE, "exp": now + 600, "sub": "acme"} | claims
        kept = {name: value for name, value in given.items() if value is not None}
        signer: Any = None if algorithm == "none" else key or self._key
        return jwt.encode(kept, signer, algorithm=algorithm, headers={"kid": self._id})

    def answer(self, path: str) -> bytes | None:
        """Return what a path has; None for nothing."""
        self.asked[path] += 1
        if path == WELL_KNOWN:
            return json.dumps({"issuer": self.url, "jwks_uri": self.url + KEYS}).encode()
        return json.dumps({"keys": self._published}).encode() if path == KEYS else None

    def start(self) -> None:
        """Answer, on the port of the last time."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = issuer.answer(self.path)
                self.send_response(404 if content is None else 200)
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def fake_issuer() -> Iterator[FakeIssuer]:
    """Run an issuer."""
    issuer = FakeIssuer()
    issuer.start()
    try:
        yield issuer
    finally:
        issuer.stop()
