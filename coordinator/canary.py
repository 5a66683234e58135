"""A new target model beside the old one, for a share of the new sessions."""

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Canary:
    """A model that gets a share of the new sessions, while others serve the rest."""

    name: str
    share: float  # 0 to 1

    def is_for(self, session_id: str) -> bool:
        """Return whether a session is one of the share: the same at every coordinator, at every attempt."""
        number = int.from_bytes(blake2b(session_id.encode(), digest_size=8, person=b"canary").digest())
        return number < self.share * 2**64
