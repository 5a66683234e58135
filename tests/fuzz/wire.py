"""Mutations of a serialised message: what no protobuf library would write."""

import random
from collections.abc import Callable

MAX_NOISE_BYTES = 256
NESTED = 200  # deeper than any parser goes
TEN_BYTE_VARINT = b"\xff" * 9 + b"\x01"
BAD_TEXT = (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80")  # no UTF-8: overlong, a surrogate, ...

Mutation = Callable[[random.Random, bytes], bytes]


def noise(rng: random.Random, data: bytes = b"") -> bytes:
    """Return random bytes."""
    return rng.randbytes(rng.randrange(MAX_NOISE_BYTES))


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _repeat(rng: random.Random, data: bytes) -> bytes:
    """Every field twice or more: the last of a scalar counts, messages are merged, lists are joined."""
    return data * rng.choice((2, 3, 64))


def _splice(rng: random.Random, data: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[begin:end] + data[place:]


def _overlong_length(rng: random.Random, data: bytes) -> bytes:
    """A field that says that it is longer than the message, by up to 2^63 bytes."""
    field = bytes([rng.randint(1, 15) << 3 | 2])
    return data + field + rng.choice((b"\xff\xff\xff\xff\x07", b"\xff" * 8 + b"\x7f", b"\x7f", TEN_BYTE_VARINT))


def _unknown_fields(rng: random.Random, data: bytes) -> bytes:
    """Fields that no version has; a parser keeps them."""
    unknown = b"".join(b"\xf8\xff\xff\xff\x0f" + bytes([rng.randrange(128)]) for _ in range(rng.choice((1, 10, 300))))
    return data + unknown


def _groups(rng: random.Random, data: bytes) -> bytes:
    """Groups in groups, some of them without an end."""
    number = rng.randint(1, 15)
    return data + bytes([number << 3 | 3]) * NESTED + bytes([number << 3 | 4]) * rng.choice((0, NESTED))


def _messages_in_messages(rng: random.Random, data: bytes) -> bytes:
    field = bytes([rng.randint(1, 15) << 3 | 2])
    for _ in range(rng.choice((3, 60))):
        data = field + _varint(len(data)) + data
    return data


def _other_wire_type(rng: random.Random, data: bytes) -> bytes:
    return data and bytes([data[0] & ~7 | rng.randrange(8)]) + data[1:]


def _extreme_varint(rng: random.Random, data: bytes) -> bytes:
    return data + bytes([rng.randint(0, 15) << 3]) + rng.choice((TEN_BYTE_VARINT, b"\xff" * 11, b"\x80" * 9 + b"\x02"))


def _bad_text(rng: random.Random, data: bytes) -> bytes:
    text = rng.choice(BAD_TEXT)
    return data + bytes([rng.randint(1, 15) << 3 | 2, len(text)]) + text


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


MUTATIONS: tuple[Mutation, ...] = (
    noise, _cut, _flip, _repeat, _splice, _overlong_length, _unknown_fields, _groups, _messages_in_messages,
    _other_wire_type, _extreme_varint, _bad_text,
)  # fmt: skip


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return what one mutation makes of a serialised message."""
    return rng.choice(MUTATIONS)(rng, data)
