"""Public keys as bytes (SEC 1, section 2.3)."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..curve import Curve
from ..point import Point


class InvalidSEC1PublicKey(Exception):
    pass


class SEC1Encoder:
    @staticmethod
    def encode_public_key(point: Point, compressed: bool = True) -> bytes:
        public = ec.EllipticCurvePublicNumbers(point.x, point.y, ec.SECP256R1()).public_key()
        form = serialization.PublicFormat
        return public.public_bytes(
            serialization.Encoding.X962, form.CompressedPoint if compressed else form.UncompressedPoint
        )

    @staticmethod
    def decode_public_key(key: bytes, curve: Curve) -> Point:
        """
        Raises:
            InvalidSEC1PublicKey: these bytes are no point of the curve.
        """
        try:
            numbers = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key).public_numbers()
        except ValueError as error:
            raise InvalidSEC1PublicKey(str(error)) from error
        return Point(numbers.x, numbers.y, curve)
