"""Mutations of a message's fields: well-formed protobuf with contents that no honest sender has."""

import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_REPEATED = 20_000  # elements of a list
HUGE = 0.03  # how often something is as large as that, where it may be
DESCEND = 0.6  # how often a mutation goes into a message instead of replacing it
FLOATS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, -3.4e38, -1.0, 0.5, 1e9)
HUGE_TEXT = "x" * 100_000
TEXTS = ("", "\0", "\U0001f9ff" * 50, "{{ 7 * 7 }}", "../../x", "%s%n", "a\nb", "\u202e\u0301" * 200, "{x}.*")
SPECIAL_FLOATS = b"".join(struct.pack("<f", value) for value in FLOATS)
BYTES = (b"", b"\0", b"\xff" * 3, b"\xff" * 4096, SPECIAL_FLOATS, struct.pack("<4I", 0, 1, 2**31, 2**32 - 1))

_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}
_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
_FLOATING = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


def mutate_fields(rng: random.Random, message: Message) -> None:
    """Change one field of a message, or of a message in it."""
    if not message.DESCRIPTOR.fields:
        return
    field: Any = rng.choice(list(message.DESCRIPTOR.fields))
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutate_list(rng, message, field)
    elif field.message_type is None:
        setattr(message, field.name, scalar(rng, field, getattr(message, field.name)))
    elif rng.random() < DESCEND and message.HasField(field.name):
        mutate_fields(rng, getattr(message, field.name))
    else:  # of a oneof, it takes the place of the one that was set
        getattr(message, field.name).SetInParent()
        mutate_fields(rng, getattr(message, field.name))


def scalar(rng: random.Random, field: FieldDescriptor, value: Any) -> Any:
    """Return an extreme value of a field's type."""
    kind, is_huge = field.cpp_type, rng.random() < HUGE
    if kind in _UNSIGNED:
        return rng.choice(
            (0, 1, value ^ 1, 2**31 - 1, 2**31, 2 ** _UNSIGNED[kind] - 1, rng.getrandbits(_UNSIGNED[kind]))
        )
    if kind in _SIGNED:
        return rng.choice((-1, 0, 1, 2 ** (_SIGNED[kind] - 1) - 1, -(2 ** (_SIGNED[kind] - 1))))
    if kind in _FLOATING:
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return (
                bytes(1 << 16)
                if is_huge
                else rng.choice((*BYTES, value[:-1], value * 2, rng.randbytes(rng.randrange(64))))
            )
        return HUGE_TEXT if is_huge else rng.choice((*TEXTS, value * 2))
    return rng.choice((0, 1, 2, 3, 99)) if kind == FieldDescriptor.CPPTYPE_ENUM else rng.random() < 0.5


def _mutate_list(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if _is_map(field):
        _mutate_map(rng, values)
    elif field.message_type is not None:
        _mutate_messages(rng, values)
    else:
        given = _other_list(rng, field, list(values))
        message.ClearField(field.name)
        getattr(message, field.name).extend(given)


def _other_list(rng: random.Random, field: FieldDescriptor, values: Sequence[Any]) -> list[Any]:
    """Return a list that is longer, shorter, in another order, or has an extreme value."""
    one = scalar(rng, field, values[0] if values else _zero(field))
    if isinstance(one, str | bytes) and len(one) > 1000:
        return [one]
    if rng.random() < HUGE:
        return [one] * rng.choice((257, 1025, MAX_REPEATED))
    position = rng.randrange(len(values) + 1)
    return rng.choice((
        [*values[:position], one, *values[position:]],
        [*values[:position], *values[position + 1 :]],
        [*values, *values],
        list(reversed(values)),
        [one] * rng.choice((1, 31, 33)),
        list(values) * 2,
    ))  # fmt: skip


def _zero(field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"" if field.type == FieldDescriptor.TYPE_BYTES else ""
    return 0


def _mutate_messages(rng: random.Random, values: Any) -> None:
    if not values:
        values.add()
    what = rng.randrange(4)
    if what == 0:
        del values[rng.randrange(len(values))]
    elif what == 1:
        for _ in range(5000 if rng.random() < HUGE else rng.choice((1, 20))):
            values.add().CopyFrom(values[0])
    else:
        mutate_fields(rng, rng.choice(values))


def _mutate_map(rng: random.Random, values: Any) -> None:
    """Of token ids to floats, which is the only kind there is."""
    for _ in range(2000 if rng.random() < HUGE else rng.choice((1, 20))):
        values[rng.getrandbits(rng.choice((8, 32)))] = rng.choice(FLOATS)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
