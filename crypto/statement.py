"""Statements: what one peer says under its signature, field by field."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from .canonical import canonical, digest
from .identity import Identity, verify


def now_ms() -> int:
    """Milliseconds since 1970 by this machine's clock: the unit of all times in statements."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Statement:
    """Base of frozen dataclasses whose last field is `signature`, bytes, empty until it is signed.

    Attributes:
        DOMAIN: what kind of statement it is; a signature holds for no other.
        SIGNER: the field with the peer id of the signer.
    """

    DOMAIN: ClassVar[str]
    SIGNER: ClassVar[str]

    @property
    def signer(self) -> str:
        """The peer id whose statement it is."""
        return str(getattr(self, self.SIGNER))

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        names = [field.name for field in fields(self) if field.name != "signature"]
        return canonical(self.DOMAIN, *(getattr(self, name) for name in names))

    def signed(self, identity: Identity) -> Self:
        """A copy with the signature.

        Raises:
            ValueError: it is another peer's statement.
        """
        if identity.peer_id != self.signer:
            raise ValueError(f"{identity.peer_id} cannot sign what {self.signer} says")
        return replace(self, signature=identity.sign(self.DOMAIN, self.canonical_bytes()))  # type: ignore[call-arg]

    def hash(self) -> bytes:
        """What other statements refer to it by. Covers the signature."""
        return digest(self.DOMAIN, self.canonical_bytes(), self.signature)  # type: ignore[attr-defined]

    @property
    def is_signed(self) -> bool:
        """Whether the signature is the signer's, for these fields."""
        signature: bytes = self.signature  # type: ignore[attr-defined]
        return verify(self.signer, self.DOMAIN, self.canonical_bytes(), signature)
