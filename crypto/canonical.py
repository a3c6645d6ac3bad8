"""One unambiguous byte string for a tuple of values, so that a hash or a signature means one thing only.

Every value carries a type tag and its length, so no two different tuples give the same bytes: neither
`("ab", "c")` and `("a", "bc")`, nor `b"a"` and `"a"`, nor `[x, y]` and `x, y`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Field: TypeAlias = bytes | bytearray | memoryview | int | str | Sequence["Field"]

# The node's key also signs libp2p's own handshakes and records: no such message starts with these bytes.
_MAGIC = b"petalnode/canonical/1\0"
_INT_BYTES = 16


def canonical(domain: str, *fields: Field) -> bytes:
    """The canonical bytes of `fields` within `domain`, the name of what they are for.

    Integers may have up to 127 bits and a sign. Sequences nest.

    Raises:
        TypeError: for a value of another type; booleans and floats are refused on purpose.
        OverflowError: for an integer that is too large.
    """
    return b"".join(_chunks(domain, fields))


def digest(domain: str, *fields: Field) -> bytes:
    """SHA-256 (32 bytes) of `canonical(domain, *fields)`, without a copy of large byte fields."""
    sha = hashlib.sha256()
    for chunk in _chunks(domain, fields):
        sha.update(chunk)
    return sha.digest()


def _chunks(domain: str, fields: Sequence[Field]) -> Iterator[bytes | bytearray | memoryview]:
    yield _MAGIC
    yield from _encode(domain)
    yield from _encode_items(fields)


def _encode_items(items: Sequence[Field]) -> Iterator[bytes | bytearray | memoryview]:
    yield b"l" + len(items).to_bytes(8, "big")
    for item in items:
        yield from _encode(item)


def _encode(value: Field) -> Iterator[bytes | bytearray | memoryview]:
    if isinstance(value, (bytes, bytearray)):
        yield b"b" + len(value).to_bytes(8, "big")
        yield value
    elif isinstance(value, memoryview):
        yield b"b" + value.nbytes.to_bytes(8, "big")
        yield value if value.c_contiguous else value.tobytes()
    elif isinstance(value, str):
        text = value.encode()
        yield b"s" + len(text).to_bytes(8, "big")
        yield text
    elif isinstance(value, int) and not isinstance(value, bool):
        yield b"i" + value.to_bytes(_INT_BYTES, "big", signed=True)
    elif isinstance(value, (list, tuple)):
        yield from _encode_items(value)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical bytes: use bytes, str, int, list or tuple")
