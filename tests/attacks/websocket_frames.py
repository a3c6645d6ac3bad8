"""Frames of WebSocket, as a stranger writes them."""

from __future__ import annotations

import struct

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


def frame(kind: int, data: bytes = b"", *, fin: bool = True, masked: bool = True, size: int | None = None) -> bytes:
    """With a key of zeros, under which data stay what they are; `size` is what the header says."""
    size, bit = len(data) if size is None else size, 0x80 * masked
    length = bytes([bit | size]) if size < 126 else struct.pack("!BH", bit | 126, size & 0xFFFF)
    length = struct.pack("!BQ", bit | 127, size) if size > 0xFFFF else length
    return bytes([0x80 * fin | kind]) + length + bytes(4 * masked) + data
