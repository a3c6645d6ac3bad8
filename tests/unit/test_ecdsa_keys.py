"""Keys of P-256 as libp2p's specification has them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from libp2p.crypto.exceptions import CryptographyError
from libp2p.crypto.pb import crypto_pb2
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.id import ID

from petalnode.node.network.transport import noise

BEGINNING = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")


def serialised(data: bytes) -> bytes:
    return crypto_pb2.PublicKey(key_type=crypto_pb2.ECDSA, data=data).SerializeToString()


def test_signatures_are_checked() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    data = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signature = private.sign(b"said", ec.ECDSA(SHA256()))
    key = deserialize_public_key(serialised(data))
    assert isinstance(key, noise.EcdsaKey) and key.serialize() == serialised(data)
    assert key.verify(b"said", signature)
    for wrong in (b"", signature[:-1], bytes(64), b"\xff" * 64, signature[:-1] + bytes([signature[-1] ^ 1])):
        assert not key.verify(b"said", wrong)
    assert not key.verify(b"something else", signature)
    assert ID.from_pubkey(key).to_bytes()[:2] == b"\x12\x20"


@pytest.mark.parametrize("curve", [ec.SECP256K1(), ec.SECP384R1()], ids=lambda curve: curve.name)
def test_keys_of_other_curves_are_refused_in_words(curve: ec.EllipticCurve) -> None:
    public = ec.generate_private_key(curve).public_key()
    with pytest.raises(CryptographyError, match="not of the curve P-256"):
        deserialize_public_key(serialised(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)))


@pytest.mark.parametrize(
    "data", [b"", b"\x04" * 65, BEGINNING + b"\x04" * 65, BEGINNING, bytes(65536), BEGINNING + b"\x02" * 65]
)
def test_what_is_no_key_is_refused(data: bytes) -> None:
    with pytest.raises(CryptographyError, match="an ECDSA key"):
        deserialize_public_key(serialised(data))
