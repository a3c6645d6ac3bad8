"""The provider records that this node keeps for others, with bounds that no number of keys fills.

py-libp2p's own store takes any number of keys with any number of addresses, keeps the first twenty providers of a key,
and lets nobody else in for two days.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from .shares import AddressShares

LIFETIME: Final = 9000.0
"""Seconds that a record is kept: three times as long as servers wait at most before they provide again."""
MAX_RECORDS: Final = 16_384
MAX_OF_KEY: Final = 20
_MAX_ADDRS: Final = 8
_MAX_ADDR_BYTES: Final = 1024  # of a record


@dataclass(frozen=True)
class Provider:
    """Who provides a key, and the multiaddrs at which it says that it is, as bytes without /p2p."""

    peer_id: str
    addrs: tuple[bytes, ...]
    received: float  # seconds since 1970


class FairProviderStore:
    """Provider records, whose room the addresses share at which providers are: of who has most there, the newest goes.

    Args:
        origin_of: the address at which a peer is, for its peer id in base58.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        origin_of: Callable[[str], str],
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._origin_of = origin_of
        self._clock = clock
        self._rng = rng or random.Random()
        self._shares = AddressShares[tuple[bytes, str]](MAX_RECORDS)
        self._providers: dict[bytes, dict[str, Provider]] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def add(self, key: bytes, peer_id: str, addrs: Iterable[bytes]) -> None:
        """Keeps a record that the provider itself has sent; replaces the one that it has sent before."""
        kept: list[bytes] = []
        for addr in addrs:
            if len(kept) < _MAX_ADDRS and len(addr) + sum(map(len, kept)) <= _MAX_ADDR_BYTES:
                kept.append(addr)
        held = self._providers.setdefault(key, {})
        is_new = peer_id not in held
        held[peer_id] = Provider(peer_id, tuple(kept), self._clock())
        if not is_new:
            return
        self._shares.hold((key, peer_id), self._origin_of(peer_id))
        if len(held) > MAX_OF_KEY:
            self._drop(key, self._superfluous(key))
        while (surplus := self._shares.surplus()) is not None:
            self._drop(*surplus)

    def _superfluous(self, key: bytes) -> str:
        """Who of a key's providers goes: the newest one of an address that has most."""
        newest: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for peer_id in self._providers[key]:
            origin = self._shares.origin_of((key, peer_id))
            counts[origin] += 1
            newest[origin] = peer_id
        most = max(counts.values())
        return newest[self._rng.choice([origin for origin, count in counts.items() if count == most])]

    def _drop(self, key: bytes, peer_id: str) -> None:
        self._shares.remove((key, peer_id))
        del self._providers[key][peer_id]
        if not self._providers[key]:
            del self._providers[key]

    def providers(self, key: bytes) -> list[Provider]:
        """Who provides the key, in random order."""
        oldest = self._clock() - LIFETIME
        held = [provider for provider in self._providers.get(key, {}).values() if provider.received >= oldest]
        return self._rng.sample(held, len(held))

    def drop_expired(self) -> Iterator[None]:
        """Goes through all records once, one key at each step; who steps lets others have their turns between."""
        for key in list(self._providers):
            oldest = self._clock() - LIFETIME
            for provider in list(self._providers.get(key, {}).values()):
                if provider.received < oldest:
                    self._drop(key, provider.peer_id)
            yield
