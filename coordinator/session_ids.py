"""Names of sessions, and proofs of what was shown of them: what needs the secret of the service.

A session has a name for clients, and one by which the store, the workers and this coordinator call it.

A request_id becomes a session's id by a keyed hash of the tenant and the request_id, so that guessing a request_id
finds nothing. The store's name of a session contains its tenant, so another tenant's session is not there at all: the
same lookup, the same answer and the same time as for an unknown one.
"""

import hashlib
import hmac
from dataclasses import dataclass

from specdec.outside import REAL, Outside
from specdec.serving.security.caller import NO_TENANT

SECRET_BYTES = 32
PROOF_BYTES = 16
MAX_INCARNATION_BYTES = 64


@dataclass(frozen=True, slots=True)
class SessionName:
    """One session's two names."""

    public: str  # what its client is told, and sends
    stored: str  # what the store, the workers and the logs have

    @classmethod
    def of(cls, tenant: str, public: str) -> "SessionName":
        """Return the names of the session that a tenant calls `public`."""
        if tenant == NO_TENANT:
            return cls(public, public)
        return cls(public, f"{hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()}.{public}")


class SessionIds:
    """Gives sessions their names. All coordinators of one store have the same secret."""

    def __init__(self, secret: bytes, outside: Outside = REAL) -> None:
        self._secret, self._outside = secret, outside

    def of_request(self, tenant: str, request_id: str) -> SessionName:
        """Return the names of the session that belongs to an idempotency key; random ones without a key."""
        if not request_id:
            return SessionName.of(tenant, f"{self._outside.random_bits(128):032x}")
        # tenants have no zero byte, so no two pairs make the same message
        digest = hmac.digest(self._secret, tenant.encode() + b"\0" + request_id.encode(), "sha256")
        return SessionName.of(tenant, digest[:16].hex())

    def proof(self, session: SessionName, incarnation: str, offset: int, digest: bytes) -> bytes:
        """Return what proves that a client was shown a session's text up to `offset`, which has this digest.

        `incarnation` says which session of that name; the proof ends with it.
        """
        named = incarnation.encode()
        message = b"\0".join((b"shown", session.stored.encode(), named, str(offset).encode(), digest))
        return hmac.digest(self._secret, message, "sha256")[:PROOF_BYTES] + named

    def proved(self, session: SessionName, offset: int, digest: bytes, proof: bytes) -> str | None:
        """Return the incarnation that this is a proof of, for that text; None: it proves nothing."""
        named = proof[PROOF_BYTES:]
        if len(named) > MAX_INCARNATION_BYTES or not named.isascii():
            return None
        incarnation = named.decode()
        is_ours = hmac.compare_digest(proof, self.proof(session, incarnation, offset, digest))
        return incarnation if is_ours else None
