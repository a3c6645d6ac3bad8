"""Where peers are, and what models have behind them, as a test says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class At:
    """Peers at these addresses; all others at `elsewhere`, or each at its own."""

    addresses: Mapping[str, str] = field(default_factory=dict)
    elsewhere: str | None = None

    def origin_of(self, peer_id: str) -> str:
        return self.addresses.get(peer_id, peer_id if self.elsewhere is None else self.elsewhere)


@dataclass(frozen=True)
class Backed:
    """Models with servers at a number of addresses; all others at `others`."""

    versions: Mapping[bytes, int]
    others: int = 0

    def backing(self, model_version: bytes) -> int:
        return self.versions.get(model_version, self.others)
