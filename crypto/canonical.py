"""One unambiguous byte string for a tuple of values, so that a hash or a signature means one thing only.

Every value carries a type tag and its length. So no two different tuples give the same bytes: neither `("ab", "c")` and
`("a", "bc")`, nor `b"a"` and `"a"`, nor `[x, y]` and `x, y`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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


Chunks: TypeAlias = list[bytes | bytearray | memoryview]


def _chunks(domain: str, fields: Sequence[Field]) -> Chunks:
    chunks: Chunks = [_MAGIC]
    _encode(domain, chunks)
    _encode(fields, chunks)
    return chunks


def _encode(value: Field, chunks: Chunks) -> None:
    # Into one list, without generators: a step is encoded three times by the server and by the client.
    if isinstance(value, (bytes, bytearray)):
        chunks += (b"b" + len(value).to_bytes(8, "big"), value)
    elif isinstance(value, str):
        text = value.encode()
        chunks += (b"s" + len(text).to_bytes(8, "big"), text)
    elif isinstance(value, int) and not isinstance(value, bool):
        chunks.append(b"i" + value.to_bytes(_INT_BYTES, "big", signed=True))
    elif isinstance(value, (list, tuple)):
        chunks.append(b"l" + len(value).to_bytes(8, "big"))
        for item in value:
            _encode(item, chunks)
    elif isinstance(value, memoryview):
        chunks += (b"b" + value.nbytes.to_bytes(8, "big"), value if value.c_contiguous else value.tobytes())
    else:
        raise TypeError(f"{type(value).__name__} has no canonical bytes: use bytes, str, int, list or tuple")
