"""A stranger's key is read before anything is known of the stranger: an RSA key of 60 KiB took 7 s of the loop."""

from __future__ import annotations

from typing import Any

import pytest
from Crypto.PublicKey import RSA
from Crypto.Util.asn1 import DerSequence
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.exceptions import CryptographyError
from libp2p.crypto.keys import KeyType, PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.envelope import seal_record, unmarshal_envelope
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord

from petalnode.node.network.host import Host
from tests.attacks.hosts import LOOPBACK, host, knowing
from tests.node_inspection import network_of

LONG = bytes(DerSequence([0, 15, 3, 3, (1 << 240_000) | 1, (1 << 240_000) - 1, 1, 1, 1]).encode())
"""An RSA key with its primes, which is read where a public one is meant."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the RSA keys whose numbers are read, which are not read here."""
    lengths: list[int] = []

    def import_key(data: bytes) -> None:
        lengths.append(len(data))
        raise ValueError(len(data))

    monkeypatch.setattr(RSA, "import_key", import_key)
    return lengths


class Shown(PublicKey):
    """A key that is only shown."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def to_bytes(self) -> bytes:
        return self.data

    def get_type(self) -> KeyType:
        return KeyType.RSA

    def verify(self, data: bytes, signature: bytes) -> bool:
        raise NotImplementedError


class Liar:
    """Shows another key than it signs with."""

    def __init__(self, own: Any, shown: Shown) -> None:
        self._own = own
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_public_key(self) -> Shown:
        return self._shown


async def test_handshake_with_long_key_ends_at_once(read: list[int]) -> None:
    async def connect(attacker: Host, victim: Host) -> None:
        for security in network_of(attacker).upgrader.security_multistream.transports.values():
            own: Any = security
            own.libp2p_privkey = Liar(own.libp2p_privkey, Shown(LONG))
        with pytest.raises(ConnectionError):
            await attacker.connect(victim.peer_id)
        assert not read

    async with host(LOOPBACK) as victim, knowing(victim) as attacker:
        await connect(attacker, victim)


def test_a_long_key_is_read_nowhere(read: list[int]) -> None:
    key = Shown(LONG)
    with pytest.raises(CryptographyError, match="an RSA key of"):
        deserialize_public_key(key.serialize())
    record = seal_record(PeerRecord(ID(b"\x00\x01a"), []), create_new_key_pair(bytes(32)).private_key)
    record.public_key = key
    with pytest.raises(CryptographyError, match="an RSA key of"):
        unmarshal_envelope(record.marshal_envelope())
    assert not read


def test_the_longest_key_that_libp2p_knows_is_read() -> None:
    public = RSAPublicKey(RSA.construct(((1 << 4095) + 1, 65537)))
    assert deserialize_public_key(public.serialize()).to_bytes() == public.to_bytes()
