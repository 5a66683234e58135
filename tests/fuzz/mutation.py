"""One hostile message from a valid one."""

import random
from collections.abc import Sequence

from google.protobuf.message import Message

from tests.fuzz.fields import mutate_fields
from tests.fuzz.wire import mutated_bytes, noise

VALID, RAW, WIRE = 0.15, 0.1, 0.35  # how often a message stays as it is, is random bytes, is mutated as bytes


def all_mutated(rng: random.Random, messages: Sequence[Message]) -> list[bytes]:
    """Return the serialised messages of a call: every second time all but one of them as they are.

    So what is wrong comes late too, when the other end has state already.
    """
    if rng.random() < 0.5:
        return [mutated(rng, message) for message in messages]
    chosen = rng.randrange(len(messages)) if messages else 0
    return [
        mutated(rng, message, valid=0.0) if number == chosen else message.SerializeToString()
        for number, message in enumerate(messages)
    ]


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
