"""Parameters of P-256 (FIPS 186-5, SP 800-186 section 3.2.1.3): y^2 = x^3 - 3x + b over the integers modulo p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Curve:
    name: str
    p: int
    b: int
    q: int  # the order of the base point


P256: Final = Curve(
    name="P256",
    p=2**256 - 2**224 + 2**192 + 2**96 - 1,
    b=0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B,
    q=0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
)
