"""Private swarms: every connection under one key, and a peer of another swarm recognised at once.

The bytes are those of libp2p's `PskConn`: each side sends 8 random bytes and then Salsa20 under the key with them as
its nonce. Nothing in that says whether the keys are the same, so what comes is checked: both sides of a connection
begin with the same words of multistream-select. The secrecy of what follows is Noise's; the key only keeps strangers
out.
"""

from __future__ import annotations

import os
from typing import Final

from Crypto.Cipher import Salsa20
from libp2p.abc import ConnectionType, IRawConnection
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.utils import encode_delim
from multiaddr import Multiaddr

from .raw_connection import RawConnection

_FIRST_WORDS: Final = encode_delim(MULTISELECT_PROTOCOL_ID.encode())
_NONCE: Final = 8  # bytes


class OtherSwarm(IOException):
    """What is at the other end belongs to another swarm, or to none; the text says which, without its name."""


class PskCipher:
    """The key's cipher, both ways. What is sealed has to be sent, in that order."""

    def __init__(self, psk: str) -> None:
        self._key = bytes.fromhex(psk)
        nonce = os.urandom(_NONCE)
        self._unsent_nonce = nonce
        self._sealing = Salsa20.new(key=self._key, nonce=nonce)
        self._nonce = b""  # the peer's, as far as it has come
        self._opening: Salsa20.Salsa20Cipher | None = None

    def seal(self, data: bytes) -> bytes:
        nonce, self._unsent_nonce = self._unsent_nonce, b""
        return nonce + self._sealing.encrypt(data)

    def open(self, data: bytes) -> bytes:
        """What the peer said, nothing as long as its nonce is not complete.

        Raises:
            OtherSwarm: the peer spoke without a key.
        """
        if self._opening is not None:
            return self._opening.decrypt(data)
        self._nonce += data
        if len(self._nonce) < _NONCE:
            return b""
        nonce, data = self._nonce[:_NONCE], self._nonce[_NONCE:]
        if nonce == _FIRST_WORDS[:_NONCE]:
            raise OtherSwarm("it is not in this private swarm: it has no swarm key")
        self._opening = Salsa20.new(key=self._key, nonce=nonce)
        return self._opening.decrypt(data)


class PskConnection(IRawConnection):
    """A raw connection for libp2p's handshakes, under the swarm's key if there is one; checks the first words."""

    def __init__(self, raw: RawConnection, psk: str | None) -> None:
        self.raw = raw
        self.cipher = None if psk is None else PskCipher(psk)
        self.is_initiator = raw.is_initiator
        self._expected = _FIRST_WORDS

    async def read(self, n: int | None = None) -> bytes:
        while True:
            data = await self.raw.read(n)
            if self.cipher is not None and data:
                data = self.cipher.open(data)
            if data or n == 0:
                break
        if self._expected:
            self._check(data)
        return data

    def _check(self, data: bytes) -> None:
        part = data[: len(self._expected)]
        if not self._expected.startswith(part):
            if self.cipher is not None:
                raise OtherSwarm("it has another swarm key")
            raise OtherSwarm("it is no node, or one of a private swarm, which needs its --swarm-key")
        self._expected = self._expected[len(part) :]

    async def write(self, data: bytes) -> None:
        await self.raw.write(data if self.cipher is None else self.cipher.seal(data))

    async def close(self) -> None:
        await self.raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.raw.get_connection_type()
