"""Makes hostile inputs out of valid ones: bytes, messages of protobuf, JSON, and conversations of several frames.

Messages are changed as they stand on the wire, field by field: so a field may have another type than the schema's, come
10,000 times, be nested deeper than any parser likes, or be text that is no UTF-8, which no encoder would write.
Everything follows from one seed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.decoder import _DecodeVarint  # type: ignore[attr-defined]
from google.protobuf.message import Message

from petalnode.protocols.framing import varint

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)
INTEGERS: Final = (0, 1, 2, 7, 63, 127, 128, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LARGE: Final = (1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - (1 << 31))
FLOATS: Final = (float("nan"), float("inf"), -float("inf"), -0.0, -1.0, 1e308, 5e-324)
TEXTS: Final = (b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", "\u202e\u0661".encode(), b"../../etc", b"-1", b"%s%n{0}")
JSON: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1 << 63, 1 << 2000, 0.5, 1e308, float("nan"), float("inf")),
    *("", "\0", "\ud800", "9" * 5000, "--5", "\u0661", "../x", [], {}, [[]], [{}], {"": ""}, {"a": {"a": []}}),
)
"""Values that a reader of JSON may not expect."""
_LONG: Final = (*(300,) * 150, *(5_000,) * 40, *(70_000,) * 9, 1 << 20)
_LARGEST: Final = 16 << 20
"""Bytes of a changed message: no stream takes more of a header."""
_TIMES: Final = (*(2,) * 150, *(70,) * 40, *(1_100,) * 9, 10_000)


@dataclass
class Field:
    """A field on the wire; `value` is a number, the bytes of a fixed one or of a text, or the fields of a message."""

    number: int
    kind: int
    value: int | bytes | list[Field]


def parse_fields(data: bytes, descriptor: Descriptor) -> list[Field]:
    """The fields of a valid message."""
    fields = []
    place = 0
    while place < len(data):
        tag, place = _DecodeVarint(data, place)
        number, kind = tag >> 3, tag & 7
        known = descriptor.fields_by_number.get(number)
        if kind == VARINT:
            value, place = _DecodeVarint(data, place)
        else:
            size, place = {FIXED64: (8, place), FIXED32: (4, place)}.get(kind) or _DecodeVarint(data, place)
            value, place = data[place : place + size], place + size
            if known is not None and known.message_type is not None:
                value = parse_fields(value, known.message_type)
        fields.append(Field(number, kind, value))
    return fields


def build(fields: Sequence[Field]) -> bytes:
    out = bytearray()
    for field in fields:
        out += varint(field.number << 3 | field.kind)
        if field.kind == VARINT:
            assert isinstance(field.value, int)
            out += varint(field.value)
            continue
        value = build(field.value) if isinstance(field.value, list) else field.value
        assert isinstance(value, bytes)
        out += varint(len(value)) + value if field.kind == BYTES else value
    return bytes(out)


def _size(fields: Sequence[Field]) -> int:
    """About the bytes that `build` makes of fields; one that stands there many times counts as often."""
    return sum(
        _size(field.value)
        if isinstance(field.value, list)
        else len(field.value)
        if isinstance(field.value, bytes)
        else 9
        for field in fields
    )


def _all(fields: list[Field]) -> Iterator[tuple[list[Field], int]]:
    for place, field in enumerate(fields):
        yield fields, place
        if isinstance(field.value, list):
            yield from _all(field.value)


class Mutator:
    """Changes what it is given at random. The same seed gives the same changes."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(repr(seed))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def some(self) -> int:
        """How many changes to make: mostly one."""
        return self.random.choice((1, 1, 1, 1, 2, 2, 3, 6))

    # --- bytes

    def bytes(self, data: bytes) -> bytes:
        for _ in range(self.some()):
            data = self.random.choice(self._BYTES)(self, data)
        return data

    def _place(self, data: bytes) -> int:
        return self.random.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._place(data)]

    def _cut_out(self, data: bytes) -> bytes:
        start = self._place(data)
        return data[:start] + data[start + self.random.choice((1, 2, 4, 8, 50)) :]

    def _repeat(self, data: bytes) -> bytes:
        start = self._place(data)
        part = data[start : start + self.random.choice((1, 4, 16, 100))]
        times = self.random.choice(_TIMES) if len(part) < 20 else 2
        return data[:start] + part * times + data[start:]

    def _overwrite(self, data: bytes) -> bytes:
        start = self._place(data)
        what = self.random.choice(
            (
                varint(self.random.choice(LARGE)),
                b"\xff" * self.random.choice((1, 2, 4, 8, 11)),
                b"\0" * self.random.choice((1, 2, 4, 8)),
                self.random.choice(INTEGERS).to_bytes(8, self.random.choice(("little", "big"))),
                self.random.choice(LARGE).to_bytes(8, self.random.choice(("little", "big"))),
                self.random.choice(INTEGERS).to_bytes(8, "little")[:4],
                self.random.randbytes(self.random.randrange(1, 20)),
                self.random.choice(TEXTS),
            )
        )
        return data[:start] + what + data[start + self.random.choice((0, len(what))) :]

    def _lengthen(self, data: bytes) -> bytes:
        return data + self.random.randbytes(1) * self.random.choice(_LONG)

    _BYTES: tuple[Callable[[Mutator, bytes], bytes], ...] = (
        *(_flip, _flip, _flip, _truncate, _cut_out, _repeat),
        *(_overwrite, _overwrite, _overwrite, _lengthen),
    )

    def text(self, size: int) -> bytes:
        """Instead of a text, an id or a hash of `size` bytes."""
        return self.random.choice(
            (
                self.random.choice(TEXTS),
                self.random.randbytes(size),
                self.random.randbytes(max(size - 1, 0)),
                self.random.randbytes(size + 1),
                b"\0" * size,
                b"a" * self.random.choice(_LONG),
            )
        )

    # --- messages

    def message(self, message: Message) -> bytes:
        """A message on the wire, changed in some of its fields."""
        plain = message.SerializeToString(deterministic=True)
        fields = parse_fields(plain, message.DESCRIPTOR)
        for _ in range(self.some()):
            places = list(_all(fields))
            if not places:
                break
            inside, place = self.random.choice(places)
            self.random.choice(self._FIELDS)(self, inside, place)
            if _size(fields) > _LARGEST:  # a field that stands there ten thousand times has grown
                return self.bytes(plain)
        data = build(fields)
        return self.bytes(data) if self.chance(0.1) else data

    def _value(self, inside: list[Field], place: int) -> None:
        field = inside[place]
        if field.kind == VARINT:
            field.value = self.random.choice((*INTEGERS, *LARGE))
        elif field.kind == FIXED64:
            field.value = struct.pack("<d", self.random.choice(FLOATS))
        elif isinstance(field.value, bytes):
            field.value = (self.bytes if self.chance(0.5) else self._other)(field.value)
        else:
            field.value = self.random.choice((b"", self.random.randbytes(9), self.bytes(build(field.value))))  # type: ignore[arg-type]

    def _other(self, value: bytes) -> bytes:
        return self.text(len(value))

    def _remove(self, inside: list[Field], place: int) -> None:
        del inside[place]

    def _again(self, inside: list[Field], place: int) -> None:
        inside.insert(self.random.randrange(len(inside) + 1), inside[place])

    def _often(self, inside: list[Field], place: int) -> None:
        field = inside[place]
        times = self.random.choice(_TIMES)
        size = len(build([field]))
        inside[place:place] = [field] * min(times, (2 << 20) // size)

    def _swap(self, inside: list[Field], place: int) -> None:
        other = self.random.randrange(len(inside))
        inside[place], inside[other] = inside[other], inside[place]

    def _number(self, inside: list[Field], place: int) -> None:
        field = inside[place]
        number = self.random.choice((self.random.randrange(1, 18), 100, (1 << 29) - 1, 0))
        inside[place] = Field(number, field.kind, field.value)

    def _kind(self, inside: list[Field], place: int) -> None:
        number = inside[place].number
        inside[place] = self.random.choice(
            (
                Field(number, VARINT, self.random.choice((*INTEGERS, *LARGE, 1 << 70))),
                Field(number, FIXED64, b"\xff" * 8),
                Field(number, FIXED32, b"\xff" * 4),
                Field(number, BYTES, self.random.randbytes(5)),
                Field(number, GROUP, b""),
                Field(number, END_GROUP, b""),
                Field(number, 7, b""),
            )
        )

    def _nest(self, inside: list[Field], place: int) -> None:
        """Deep inside itself, or in groups that nobody knows."""
        if self.chance(0.5):
            depth = self.random.choice((3, 90, 120, 5_000))
            inside.insert(
                place, Field(30, GROUP, varint(30 << 3 | GROUP) * depth + varint(30 << 3 | END_GROUP) * depth)
            )
            return
        field = inside[place]
        for _ in range(self.random.choice((2, 20, 120))):
            field = Field(field.number, BYTES, build([field]))
        inside[place] = field

    _FIELDS: tuple[Callable[[Mutator, list[Field], int], None], ...] = (
        *(_value,) * 8,
        *(_remove, _again, _often, _swap, _number, _kind, _nest),
    )

    # --- JSON

    def json(self, value: Any) -> Any:
        """A copy of `value`, which `json.dumps` takes, with some parts exchanged."""
        for _ in range(self.some()):
            value = self._in_json(value)
        return value

    def _in_json(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.chance(0.85):
            key = self.random.choice(list(value))
            if self.chance(0.1):
                return {name: held for name, held in value.items() if name != key}
            if self.chance(0.1):
                return {**value, str(self.random.choice(JSON))[:300]: value[key]}
            return {**value, key: self._in_json(value[key])}
        if isinstance(value, list) and value and self.chance(0.85):
            place = self.random.randrange(len(value))
            if self.chance(0.1):
                return [*value[:place], *value[place + 1 :]]
            if self.chance(0.1):
                times = 30 if isinstance(value[place], dict | list) else 3000
                return [*value, *[value[place]] * self.random.choice((1, 2, times))]
            return [*value[:place], self._in_json(value[place]), *value[place + 1 :]]
        if isinstance(value, str) and value and self.chance(0.5):
            place = self.random.randrange(len(value))
            return value[:place] + str(self.random.choice(JSON))[:100] + value[place + 1 :]
        if isinstance(value, int | float) and self.chance(0.3):
            return -value
        if self.chance(0.05):
            nested: Any = value
            for _ in range(self.random.choice((5, 900))):
                nested = [nested] if self.chance(0.5) else {"a": nested}
            return nested
        return self.random.choice(JSON)

    # --- conversations

    def order(self, parts: Sequence[bytes]) -> list[bytes]:
        """Parts dropped, repeated and exchanged."""
        changed = list(parts)
        for _ in range(self.some()):
            if not changed:
                break
            place, other = self.random.randrange(len(changed)), self.random.randrange(len(changed))
            how = self.random.randrange(4)
            if how == 0:
                del changed[place]
            elif how == 1:
                changed.insert(other, changed[place])
            elif how == 2:
                changed[place], changed[other] = changed[other], changed[place]
            else:
                changed[place:place] = [changed[place]] * self.random.choice((2, 5, 40))
        return changed

    def split(self, data: bytes) -> list[bytes]:
        """The same bytes in other portions, down to single ones."""
        if len(data) < 400 and self.chance(0.1):
            return [data[place : place + 1] for place in range(len(data))]
        if self.chance(0.5):
            return [data]
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.randrange(1, 6)))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


def frame(header: bytes, payload: bytes = b"") -> bytes:
    """A message of ours as it stands on a stream, with the bytes of its tensors."""
    return varint(len(header)) + header + payload
