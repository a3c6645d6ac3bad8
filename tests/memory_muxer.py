"""One end of a connection, Yamux over Noise as it is, whose other end says whatever a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession
from noise.connection import NoiseConnection

from petalnode.node.network.transport.bandwidth import Throttle
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.muxed_stream import DATA, HEADER, SYN, WINDOW_UPDATE, MuxedStream
from petalnode.node.network.transport.noise import MAX_PLAINTEXT, NoiseSession
from petalnode.node.network.transport.raw_connection import READ_SIZE, ByteSink, Path, PskConnection, RawConnection
from petalnode.node.network.transport.yamux import Muxer
from petalnode.node.testing import run_autojumping

Frame = tuple[int, int, int, int, bytes]
"""Kind, flags, stream, length, data."""
DIRECT: Final = Path(direct=True, relay=None, remote_addr=None, inbound=True)


class MemoryRaw(RawConnection):
    """Bytes in memory. `room` is how many more the socket takes; `sent` is what it took.

    With `diverting`, what comes is handed on at once, as that of a circuit is. `origin` is the address that it is from.
    """

    def __init__(
        self,
        room: float = float("inf"),
        *,
        is_socket: bool = False,
        diverting: bool = False,
        upload: Throttle | None = None,
        path: Path = DIRECT,
        origin: str = "",
    ) -> None:
        super().__init__(path, upload)
        self.origin = origin
        self.is_socket = is_socket
        self.sink: ByteSink | None = None
        self._diverting = diverting
        self.room = room
        self.sent = bytearray()
        self.closed = False
        self._more_room = trio.lowlevel.ParkingLot()
        self.say, self._heard = trio.open_memory_channel[bytes](float("inf"))

    def send_nowait(self, data: bytes) -> int:
        if self.closed:
            raise ConnectionResetError("the connection is gone")
        taken = int(min(len(data), self.room))
        self.room -= taken
        self.sent += data[:taken]
        return taken

    async def send(self, data: bytes) -> None:
        while data := data[self.send_nowait(data) :]:
            await self._more_room.park()

    def make_room(self, size: float = float("inf")) -> None:
        self.room += size
        self._more_room.unpark_all()

    def divert(self, sink: ByteSink) -> None:
        self.sink = sink if self._diverting else None

    async def receive(self, n: int = READ_SIZE) -> bytes:
        try:
            return await self._heard.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return b""

    async def close(self) -> None:
        self.closed = True
        self._more_room.unpark_all()
        self._heard.close()


class OtherEnd:
    """What is at the other end of `raw`: it has the keys of the connection, and no manners."""

    def __init__(self, raw: MemoryRaw, cipher: NoiseConnection) -> None:
        self.raw = raw
        self._cipher = cipher
        self._plain = bytearray()

    def say_bytes(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_PLAINTEXT):
            sealed = self._cipher.encrypt(data[start : start + MAX_PLAINTEXT])
            said = len(sealed).to_bytes(2, "big") + sealed
            if self.raw.sink is None or not self.raw.sink.take(said):
                self.raw.say.send_nowait(said)

    def say(
        self, kind: int, flags: int = 0, stream: int = 0, length: int = 0, data: bytes = b"", version: int = 0
    ) -> None:
        self.say_bytes(HEADER.pack(version, kind, flags, stream, length) + data)

    def open(self, stream: int) -> None:
        self.say(WINDOW_UPDATE, SYN, stream)

    def send(self, stream: int, data: bytes, flags: int = 0) -> None:
        self.say(DATA, flags, stream, len(data), data)

    def plaintext(self) -> bytes:
        """What was said to it since it listened last."""
        sent, plain = self.raw.sent, b""
        while len(sent) >= 2 and len(sent) >= (end := 2 + int.from_bytes(sent[:2], "big")):
            plain += self._cipher.decrypt(bytes(sent[2:end]))
            del sent[:end]
        return plain

    def frames(self) -> list[Frame]:
        """The frames that are complete since it listened last."""
        self._plain += self.plaintext()
        found = []
        while len(self._plain) >= HEADER.size:
            version, kind, flags, stream, length = HEADER.unpack_from(self._plain)
            assert version == 0
            end = HEADER.size + (length if kind == DATA else 0)
            if len(self._plain) < end:
                break
            found.append((kind, flags, stream, length, bytes(self._plain[HEADER.size : end])))
            del self._plain[:end]
        return found

    def granted(self, stream: int) -> int:
        """Bytes that it was allowed to send on a stream, beyond those of the specification, since it listened last."""
        frames = self.frames()
        return sum(length for kind, _, of, length, _ in frames if kind == WINDOW_UPDATE and of == stream)


def noise_session(raw: MemoryRaw, *, initiator: bool = False, key: int = 2) -> tuple[NoiseSession, OtherEnd]:
    """Our end of a connection after its handshake, and the other one."""
    ours, theirs = (NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2))
    theirs.set_as_initiator()
    ours.set_as_responder()
    for side in (ours, theirs):
        side.start_handshake()
    ours.read_message(theirs.write_message())
    theirs.read_message(ours.write_message())
    keys = [create_new_key_pair(bytes([number]) * 32) for number in (1, key)]
    conn: Any = PskConnection(raw, None)
    session = SecureSession(
        local_peer=ID.from_pubkey(keys[0].public_key),
        local_private_key=keys[0].private_key,
        remote_peer=ID.from_pubkey(keys[1].public_key),
        remote_permanent_pubkey=keys[1].public_key,
        is_initiator=initiator,
        conn=NoiseTransportReadWriter(conn, ours),
    )
    return NoiseSession(session, conn), OtherEnd(raw, theirs)


class Owner:
    """Of connections: their limits, and those that were lost."""

    def __init__(self, limits: NodeLimits | None = None) -> None:
        self.limits = limits or NodeLimits()
        self.lost: list[Muxer] = []

    def muxer_lost(self, muxer: Muxer) -> None:
        self.lost.append(muxer)


@asynccontextmanager
async def muxer(
    raw: MemoryRaw | None = None,
    *,
    initiator: bool = False,
    answer: bytes = b"",
    limits: NodeLimits | None = None,
    key: int = 2,
) -> AsyncIterator[tuple[Muxer, OtherEnd]]:
    """Our end of a connection, which runs, and the other one, of a peer for each `key`.

    What loses the connection is told once, at its end."""
    session, other = noise_session(raw or MemoryRaw(), initiator=initiator, key=key)
    owner = Owner(limits)
    ours = Muxer(session, session.remote_peer, owner, answer=answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        await ours.event_started.wait()
        yield ours, other
        assert owner.lost == [ours] * (ours.lost is not None)
        nursery.cancel_scope.cancel()
    assert owner.lost == [ours] and other.raw.closed


@asynccontextmanager
async def accepted(raw: MemoryRaw | None = None, **options: Any) -> AsyncIterator[tuple[Muxer, OtherEnd, MuxedStream]]:
    """The two, of `muxer` with these options, and stream 1, which the other end opened and ours accepted."""
    async with muxer(raw, **options) as (ours, other):
        other.open(1)
        yield ours, other, await ours.accept_stream()


async def settled() -> None:
    """Returns when everything that was said has been heard."""
    await trio.testing.wait_all_tasks_blocked()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on a clock that jumps."""

    async def bounded() -> None:
        with trio.fail_after(3600):  # of the clock that jumps: what waits for ever fails at once
            await main()

    run_autojumping(bounded)


async def read(stream: MuxedStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    return data
