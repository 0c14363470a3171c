"""Valid protobuf messages made strange, by hypothesis: a field at any depth set to an odd value, emptied, doubled; or the bytes themselves
cut, flipped and stuffed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
MOST_BYTES = 1 << 16

U32 = (0, 1, 2, 3, 5, 17, 100, 319, 320, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
U64 = (*U32, 1 << 63, (1 << 64) - 1)
I32 = (-(1 << 31), -1, 0, 1, (1 << 31) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 2.0, float("nan"), float("inf"), float("-inf"))
STRINGS = ("", "s", "x", "\0", "ä😀", "root ::= root", "{", "(a", "x" * 129, "user", "a" * 3000)
ODD: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_UINT32: U32,
    FieldDescriptor.TYPE_UINT64: U64,
    FieldDescriptor.TYPE_FIXED64: U64,
    FieldDescriptor.TYPE_INT32: I32,
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, 4, 9, -1, (1 << 31) - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_DOUBLE: FLOATS,
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_STRING: STRINGS,
    FieldDescriptor.TYPE_BYTES: (b"", b"\0", b"\xff" * 8, b"\0\0\x80?"),
}


def mutated(draw: Draw, message: Message, most: int = 3) -> bytes:
    """The message with up to so many odd fields, or with odd bytes."""
    strange = type(message)()
    strange.CopyFrom(message)
    for _ in range(draw(st.integers(0, most))):
        _mutate(draw, strange)
    content = strange.SerializeToString()
    return _torn(draw, content) if draw(st.integers(0, 3)) == 0 else content


def _mutate(draw: Draw, message: Message) -> None:
    """Deeper where something is, three times out of four."""
    held = [(field, value) for field, value in message.ListFields() if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field)]
    if held and draw(st.integers(0, 3)):
        field, value = draw(st.sampled_from(held))
        return _mutate(draw, value if not field.is_repeated else value[draw(st.integers(0, len(value) - 1))])
    fields = message.DESCRIPTOR.fields
    if fields:
        _set(draw, message, draw(st.sampled_from(list(fields))))


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _set(draw: Draw, message: Message, field: Any) -> None:
    if draw(st.integers(0, 5)) == 0:
        message.ClearField(field.name)
    elif _is_map(field):
        key, value = (draw(st.sampled_from(ODD[part.type])) for part in field.message_type.fields)
        getattr(message, field.name)[key] = value
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _set_message(draw, getattr(message, field.name), field.is_repeated)
    elif field.is_repeated:
        values = getattr(message, field.name)
        odd = draw(st.lists(st.sampled_from(ODD[field.type]), max_size=4))
        values.extend(odd * draw(st.sampled_from((1, 1, 1, 400))))
    else:
        setattr(message, field.name, draw(st.sampled_from(ODD[field.type])))


def _set_message(draw: Draw, value: Any, repeated: bool) -> None:
    """An empty one more, one twice; or an empty one where none was."""
    if not repeated:
        return value.SetInParent()
    if len(value) and draw(st.booleans()):
        value.add().CopyFrom(value[draw(st.integers(0, len(value) - 1))])
    else:
        value.add()


def _torn(draw: Draw, content: bytes) -> bytes:
    at = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(("cut", "stuffed", "flipped", "doubled", "garbage")))
    if kind == "cut":
        return content[:at]
    if kind == "stuffed":
        return content[:at] + draw(st.binary(max_size=12)) + content[at:]
    if kind == "doubled":
        return (content + content[at:])[:MOST_BYTES]
    if kind == "garbage":
        return bytes(draw(st.binary(max_size=64)))
    flipped = bytearray(content)
    if flipped:
        flipped[at % len(flipped)] ^= 1 << draw(st.integers(0, 7))
    return bytes(flipped)


def conversation(draw: Draw, messages: Sequence[Message]) -> list[bytes]:
    """The messages in order, one or two of them strange; some left out, repeated or exchanged."""
    order = list(range(len(messages)))
    if draw(st.integers(0, 2)) == 0:
        order = draw(st.lists(st.sampled_from(order), min_size=1, max_size=len(order) + 2))
    strange = draw(st.sets(st.integers(0, len(order) - 1), max_size=2))
    return [mutated(draw, messages[i]) if place in strange else messages[i].SerializeToString() for place, i in enumerate(order)]
