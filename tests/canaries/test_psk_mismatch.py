"""py-libp2p's PSK: with another key one reads noise, without an error; the negotiation then waits for a time-out."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p.security.pnet.psk_conn import PskConn

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"
GREETING = b"\x13/multistream/1.0.0\n"


class Pipe:
    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data

    async def read(self, n: int | None = None) -> bytes:
        taken, self.data = self.data[:n], b"" if n is None else self.data[n:]
        return taken


@pytest.mark.parametrize("other", ["6b" * 32, None])
async def test_peer_with_another_key_is_not_told_apart(other: str | None) -> None:
    try:
        pipe: Any = Pipe()
        await (pipe if other is None else PskConn(pipe, other)).write(GREETING)
        read = await PskConn(pipe, "6a" * 32).read()
    except Exception as error:
        pytest.fail(f"{CURED}: {error!r}")
    assert read and read != GREETING
