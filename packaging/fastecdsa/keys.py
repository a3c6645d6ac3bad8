"""Making and exporting keys. A private key is an integer, a public key a point."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from .curve import P256, Curve
from .point import Point


class PEMEncoder:
    """Private keys as `EC PRIVATE KEY` (RFC 5915)."""

    @staticmethod
    def encode_private_key(private: int, curve: Curve = P256) -> str:
        pem = _private_key(private, curve).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        return pem.decode()


def gen_private_key(curve: Curve = P256) -> int:
    _check(curve)
    return ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value


def get_public_key(private: int, curve: Curve = P256) -> Point:
    numbers = _private_key(private, curve).public_key().public_numbers()
    return Point(numbers.x, numbers.y, curve)


def export_key(
    key: int, curve: Curve = P256, filepath: str | None = None, encoder: type[PEMEncoder] = PEMEncoder
) -> str:
    """The private key, encoded. Unlike fastecdsa's it writes no file and takes no public key: libp2p does neither."""
    if filepath is not None or not isinstance(key, int):
        raise NotImplementedError("only private keys, and not to files; install fastecdsa for more")
    return encoder.encode_private_key(key, curve)


def _private_key(private: int, curve: Curve) -> ec.EllipticCurvePrivateKey:
    _check(curve)
    return ec.derive_private_key(private, ec.SECP256R1())


def _check(curve: Curve) -> None:
    if curve != P256:
        raise NotImplementedError("only P-256; install fastecdsa for other curves")
