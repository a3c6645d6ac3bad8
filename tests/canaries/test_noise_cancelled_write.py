"""py-libp2p: a cancelled write has used up a Noise nonce, and the peer fails to decrypt all that follows."""

from __future__ import annotations

import pytest
import trio
from libp2p.security.noise.io import NoiseTransportReadWriter
from noise.connection import NoiseConnection
from noise.exceptions import NoiseInvalidMessage

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"


class Pipe:
    """A raw connection whose bytes can be read back. A write is a checkpoint, as on a socket that is full."""

    def __init__(self) -> None:
        self.data = b""
        self.reads = 0

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.data += data

    async def read(self, n: int | None = None) -> bytes:
        self.reads += 1
        taken, self.data = self.data[:n], self.data[n:]
        return taken


def handshaken() -> tuple[NoiseConnection, NoiseConnection]:
    """The cipher states of both sides of a connection."""
    initiator, responder = (NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2))
    initiator.set_as_initiator()
    responder.set_as_responder()
    for side in (initiator, responder):
        side.start_handshake()
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    assert initiator.handshake_finished and responder.handshake_finished
    return initiator, responder


async def test_a_cancelled_write_breaks_the_connection() -> None:
    pipe = Pipe()
    initiator, responder = handshaken()
    writer, reader = (NoiseTransportReadWriter(pipe, state) for state in (initiator, responder))  # type: ignore[arg-type]
    await writer.write_msg(b"before")
    assert await reader.read_msg() == b"before"
    with trio.CancelScope() as scope:
        scope.cancel()
        await writer.write_msg(b"cancelled")
    await writer.write_msg(b"after")
    try:
        await reader.read_msg()
    except NoiseInvalidMessage:
        return
    pytest.fail(CURED)


async def test_a_message_takes_two_reads() -> None:
    pipe = Pipe()
    initiator, responder = handshaken()
    await NoiseTransportReadWriter(pipe, initiator).write_msg(b"message")  # type: ignore[arg-type]
    assert await NoiseTransportReadWriter(pipe, responder).read_msg() == b"message"  # type: ignore[arg-type]
    assert pipe.reads == 2, CURED
