"""Points of a curve, and their multiples."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from .curve import P256, Curve


@dataclass(frozen=True)
class Point:
    """A point other than that at infinity.

    Raises:
        ValueError: the point is not on the curve.
    """

    x: int
    y: int
    curve: Curve = P256

    def __post_init__(self) -> None:
        p = self.curve.p
        on_curve = 0 <= self.x < p and 0 <= self.y < p and (self.y**2 - _square_of_y(self.x, self.curve)) % p == 0
        if not on_curve:
            raise ValueError(f"coordinates are not on curve <{self.curve.name}>\n\tx={self.x:x}\n\ty={self.y:x}")

    def __neg__(self) -> Point:
        return Point(self.x, -self.y % self.curve.p, self.curve)

    def __mul__(self, scalar: int) -> Point:
        """The point `scalar` times.

        OpenSSL's Diffie-Hellman exchange gives the x of a multiple, and a second one, of the next multiple, tells the
        two points with that x apart: no bit of the scalar decides what Python does.

        Raises:
            ValueError: that is the point at infinity.
        """
        q, p = self.curve.q, self.curve.p
        scalar %= q
        if scalar in (1, q - 1):
            return self if scalar == 1 else -self
        x = self._x_of(scalar)
        y = pow(_square_of_y(x, self.curve), (p + 1) // 4, p)  # p = 3 modulo 4
        found = Point(x, y, self.curve)
        return found if found._x_of_sum(self) == self._x_of(scalar + 1) else -found

    __rmul__ = __mul__

    def _x_of(self, scalar: int) -> int:
        numbers = ec.EllipticCurvePublicNumbers(self.x, self.y, ec.SECP256R1())
        private = ec.derive_private_key(scalar, ec.SECP256R1())
        return int.from_bytes(private.exchange(ec.ECDH(), numbers.public_key()), "big")

    def _x_of_sum(self, other: Point) -> int:
        """The x of the sum of two points that are neither equal nor each other's negative."""
        p = self.curve.p
        slope = (other.y - self.y) * pow(other.x - self.x, -1, p) % p
        return (slope * slope - self.x - other.x) % p


def _square_of_y(x: int, curve: Curve) -> int:
    return (x**3 - 3 * x + curve.b) % curve.p
