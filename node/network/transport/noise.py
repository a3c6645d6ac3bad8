"""A Noise connection that reads ahead and writes at once.

libp2p's own reads every length and every body by a system call and two turns of trio's loop each. It writes under two
locks. Most of the time of a decode step's message went there, not into cryptography. The handshake and the bytes on the
wire are libp2p's. Only the transport of messages after the handshake is here.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import trio
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from libp2p.abc import ConnectionType, IRawConnection, ISecureConn
from libp2p.crypto import serialization
from libp2p.crypto.exceptions import CryptographyError
from libp2p.crypto.keys import KeyType, PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer import envelope
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession
from multiaddr import Multiaddr

from .limits import LIMITS
from .raw_connection import ByteSink, PskConnection

MAX_PLAINTEXT: Final = 65535 - 16
MAX_RSA_KEY: Final = 600
"""Bytes of an RSA key that a stranger shows; a public one of 4,096 bits has 550."""


class ShortRsaKey(RSAPublicKey):
    """libp2p's parses the numbers of a key, of up to 64 KiB, before it looks at their size. One message of a handshake
    may take 7 s of processor time by that."""

    @classmethod
    def from_bytes(cls, key_bytes: bytes) -> RSAPublicKey:
        if len(key_bytes) > MAX_RSA_KEY:
            raise CryptographyError(f"an RSA key of {len(key_bytes)} bytes")
        return super().from_bytes(key_bytes)


class EcdsaKey(PublicKey):
    """A key of P-256, which py-libp2p does not read: a point behind the beginning that all of them have.

    Raises:
        CryptographyError: it begins otherwise, or is no point of the curve.
    """

    _BEGINNING: Final = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")

    def __init__(self, data: bytes) -> None:
        self._data, point = data, data[-65:]
        try:
            if data[:-65] != self._BEGINNING:
                raise ValueError("it is not of the curve P-256")
            self._key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        except ValueError as error:
            raise CryptographyError(f"an ECDSA key that is not understood: {error}") from error

    def to_bytes(self) -> bytes:
        return self._data

    def get_type(self) -> KeyType:
        return KeyType.ECDSA

    def verify(self, data: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, data, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


# All keys are read here: of handshakes, peer ids, identify and messages by gossip; then those of signed peer records.
serialization.key_type_to_public_key_deserializer[KeyType.RSA.value] = ShortRsaKey.from_bytes
serialization.key_type_to_public_key_deserializer[KeyType.ECDSA.value] = EcdsaKey
envelope.RSAPublicKey = ShortRsaKey


class BufferedNoise(Transport):
    """libp2p's Noise transport, whose sessions are `NoiseSession`s."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return NoiseSession(await super().secure_inbound(conn), conn)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return NoiseSession(await super().secure_outbound(conn, peer_id), conn)


class _Cipher:
    """One direction after the handshake: a key, and the number of the next message (Noise, section 5.1). `state` is the
    library's, which takes no views of bytes."""

    def __init__(self, state: Any) -> None:
        self.aead: ChaCha20Poly1305 = state.cipher.cipher
        self._number: int = state.n

    def nonce(self) -> bytes:
        self._number += 1
        return bytes(4) + (self._number - 1).to_bytes(8, "little")


class NoiseSession(BaseSession):
    """One encrypted connection after its handshake. One task may read at a time; any task may write.

    `pump` must run as a task of the owner for writes to make progress when the socket is full.
    """

    def __init__(self, session: ISecureConn, conn: IRawConnection) -> None:
        assert isinstance(session, SecureSession)
        super().__init__(
            local_peer=session.local_peer,
            local_private_key=session.local_private_key,
            remote_peer=session.remote_peer,
            remote_permanent_pubkey=session.remote_permanent_pubkey,
            is_initiator=session.is_initiator,
        )
        assert isinstance(session.conn, NoiseTransportReadWriter)
        states = session.conn.noise_state.noise_protocol
        self._sealing, self._opening = map(_Cipher, (states.cipher_state_encrypt, states.cipher_state_decrypt))
        assert isinstance(conn, PskConnection)
        self._raw = conn.raw
        self._psk = conn.cipher
        self.path = conn.raw.path
        self.local_host = conn.raw.local_host
        self.origin = conn.raw.origin
        self.upload = conn.raw.upload
        self._incoming = bytearray()
        self._plaintext = b""  # decrypted, not yet taken by `read`
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._pump_wakes = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._sent = trio.lowlevel.ParkingLot()
        self._closed = False

    # --- reading

    def unseal(self, data: bytes) -> list[bytes]:
        """The plaintexts of the messages that are complete with these bytes of the raw connection.

        Raises:
            OSError: the connection was tampered with.
        """
        if self._psk is not None:
            data = self._psk.open(data)
        incoming = self._incoming
        incoming += data
        plaintexts = []
        start = 0
        with memoryview(incoming) as view:
            while len(view) - start >= 2:
                end = start + 2 + int.from_bytes(view[start : start + 2], "big")
                if len(view) < end:
                    break
                try:
                    plaintexts.append(self._opening.aead.decrypt(self._opening.nonce(), view[start + 2 : end], None))
                except InvalidTag as error:
                    raise ConnectionAbortedError("a message failed its authentication") from error
                start = end
        del incoming[:start]
        return plaintexts

    async def receive(self) -> list[bytes]:
        """The next plaintexts, one or more. Cancelled, nothing is lost.

        Raises:
            OSError: the connection has ended or was tampered with.
        """
        while True:
            data = await self._raw.receive()
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            if plaintexts := self.unseal(data):
                return plaintexts

    def divert(self, sink: ByteSink) -> None:
        """Hands what comes to `sink` at once where that is possible; the rest still comes by `receive`."""
        self._raw.divert(sink)

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, for libp2p's negotiation of the muxer."""
        try:
            while len(self._plaintext) < (1 if n is None else n):
                self._plaintext += b"".join(await self.receive())
        except OSError as error:
            raise ConnectionClosedError(str(error)) from error
        end = len(self._plaintext) if n is None else n
        data, self._plaintext = self._plaintext[:end], self._plaintext[end:]
        return data

    def take_plaintext(self) -> bytes:
        """What was decrypted and not read yet, for the muxer that goes on with `receive`."""
        data, self._plaintext = self._plaintext, b""
        return data

    # --- writing

    def put(self, data: bytes) -> None:
        """Encrypts and sends without waiting: what the socket does not take now, `pump` sends in order.

        Encrypting and queueing cannot be torn apart by a cancellation: a counter that was used for a message that is
        not sent would make the peer fail all that follow.

        Raises:
            OSError: the connection has ended.
        """
        if self._closed:
            raise ConnectionResetError("the connection is closed")
        if self._outgoing_bytes > LIMITS.most_unsent:
            raise ConnectionAbortedError("the peer asks for more than it reads")
        if self.upload is not None:
            self.upload.spend(len(data))
        parts = []
        with memoryview(data) as view:
            for start in range(0, len(data), MAX_PLAINTEXT):
                sealed = self._sealing.aead.encrypt(self._sealing.nonce(), view[start : start + MAX_PLAINTEXT], None)
                parts += [len(sealed).to_bytes(2, "big"), sealed]
        if parts:
            self._put_raw(b"".join(parts))

    def _put_raw(self, message: bytes) -> None:
        if self._psk is not None:
            message = self._psk.seal(message)
        if not self._outgoing:
            taken = self._raw.send_nowait(message)
            if taken == len(message):
                return
            message = message[taken:]
        self._outgoing.append(message)
        self._outgoing_bytes += len(message)
        self._pump_wakes.unpark_all()

    @property
    def has_room(self) -> bool:
        """Whether little enough is waiting for the socket."""
        return self._outgoing_bytes < LIMITS.unsent

    async def wait_room(self) -> None:
        """Returns at once unless much is waiting for the socket."""
        while not self.has_room and not self._closed:
            await self._room.park()

    @property
    def is_overfull(self) -> bool:
        """Whether so much is waiting for the socket that nothing may be added that can be left out."""
        return self._outgoing_bytes > LIMITS.unsent_before_pings

    @property
    def is_stuffed(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._outgoing)

    async def pump(self) -> None:
        """Sends what `put` could not, until the connection ends.

        Raises:
            OSError: the connection has ended, or the peer's system takes nothing any more.
        """
        while not self._closed:
            if not self._outgoing:
                await self._pump_wakes.park()
                continue
            await self._send_raw(self._outgoing[0])
            self._outgoing_bytes -= len(self._outgoing.popleft())
            if self._outgoing_bytes < LIMITS.unsent:
                self._room.unpark_all()
            if not self._outgoing:
                self._sent.unpark_all()

    async def _send_raw(self, message: bytes) -> None:
        with trio.move_on_after(LIMITS.stall * max(1.0, len(message) / (64 * 1024))):
            await self._raw.send(message)
            return
        raise ConnectionAbortedError(f"the peer took nothing for {LIMITS.stall:g} s")

    async def write(self, data: bytes) -> None:
        """Sends all of it, for libp2p's negotiation of the muxer (no `pump` yet)."""
        try:
            self.put(data)
            while self._outgoing:
                await self._send_raw(self._outgoing[0])
                self._outgoing_bytes -= len(self._outgoing.popleft())
        except OSError as error:
            raise ConnectionClosedError(str(error)) from error

    async def flush(self, limit: float) -> None:
        """Waits up to `limit` seconds for `pump` to send the rest."""
        with trio.move_on_after(limit):
            while self._outgoing and not self._closed:
                await self._sent.park()

    # --- the rest of libp2p's interface

    async def close(self) -> None:
        """Closes the socket at once. Whoever reads or writes gets an error."""
        if not self._closed:
            self._closed = True
            for lot in (self._pump_wakes, self._room, self._sent):
                lot.unpark_all()
            await self._raw.close()

    @property
    def keeps_window(self) -> bool:
        """Whether it is TCP itself that would forget its window in a pause. Under a circuit, others see to that."""
        return self._raw.is_socket

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._raw.get_connection_type()
