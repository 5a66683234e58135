"""One hostile message from a valid one."""

import random

from google.protobuf.message import Message

from tests.fuzz.fields import mutate_fields
from tests.fuzz.wire import mutated_bytes, noise

VALID, RAW, WIRE = 0.15, 0.1, 0.35  # how often a message stays as it is, is random bytes, is mutated as bytes


def mutated(rng: random.Random, message: Message, valid: float = VALID) -> bytes:
    """Return a serialised message: often with other fields, sometimes with broken bytes, or as it is."""
    fate = rng.random()
    if fate < valid:
        return message.SerializeToString()
    if fate < valid + RAW:
        return noise(rng)
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        mutate_fields(rng, changed)
    data = changed.SerializeToString()
    return mutated_bytes(rng, data) if rng.random() < WIRE else data
