"""The provider records that this node keeps for others, with bounds that no number of keys fills.

py-libp2p's own store takes any number of keys with any number of addresses, keeps the first twenty providers of a key,
and lets nobody else in for two days.
"""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from libp2p.abc import IHost
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.peer.peerinfo import PeerInfo

LIFETIME: Final = 9000.0
"""Seconds that a record is kept: three times as long as servers wait at most before they provide again."""
MAX_RECORDS: Final = 16_384
MAX_OF_KEY: Final = BUCKET_SIZE
_LEFT_FREE: Final = 16  # this part of the store is free after it was full, so that it is seldom gone through
_MAX_ADDRS: Final = 8
_MAX_ADDR: Final = 256  # bytes


class FairProviderStore(ProviderStore):
    """libp2p's, whose room the addresses share at which providers are: of who has most there, the newest goes.

    Args:
        origin_of: the address at which a peer is, for its peer id in base58.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        host: IHost,
        origin_of: Callable[[str], str],
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(host)
        self._origin_of = origin_of
        self._clock = clock
        self._rng = rng or random.Random()
        self._origins: dict[tuple[bytes, str], str] = {}
        self._of_origin: dict[str, OrderedDict[tuple[bytes, str], None]] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keeps a record that the provider itself has sent; replaces the one that it has sent before."""
        peer_id = str(provider.peer_id)
        addrs = [addr for addr in provider.addrs if len(addr.to_bytes()) <= _MAX_ADDR][:_MAX_ADDRS]
        held = self.providers.setdefault(key, {})
        is_new = peer_id not in held
        held[peer_id] = ProviderRecord(PeerInfo(provider.peer_id, addrs), self._clock())
        if not is_new:
            return
        origin = self._origin_of(peer_id)
        self._origins[key, peer_id] = origin
        self._of_origin.setdefault(origin, OrderedDict())[key, peer_id] = None
        if len(held) > MAX_OF_KEY:
            self._drop(key, self._superfluous(key))
        if len(self._origins) > MAX_RECORDS:
            self._make_room()

    def _superfluous(self, key: bytes) -> str:
        """Who of a key's providers goes: the newest one of an address that has most."""
        newest: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for peer_id in self.providers[key]:
            origin = self._origins[key, peer_id]
            counts[origin] += 1
            newest[origin] = peer_id
        most = max(counts.values())
        return newest[self._rng.choice([origin for origin, count in counts.items() if count == most])]

    def _make_room(self) -> None:
        """All addresses keep equally many records (max-min fairness), each its oldest."""
        left = MAX_RECORDS - MAX_RECORDS // _LEFT_FREE
        ascending = sorted(self._of_origin.values(), key=len)
        for number, records in enumerate(ascending):
            share = left // (len(ascending) - number)
            for key, peer_id in list(records)[share:]:
                self._drop(key, peer_id)
            left -= min(len(records), share)

    def _drop(self, key: bytes, peer_id: str) -> None:
        origin = self._origins.pop((key, peer_id))
        records = self._of_origin[origin]
        del records[key, peer_id]
        if not records:
            del self._of_origin[origin]
        del self.providers[key][peer_id]
        if not self.providers[key]:
            del self.providers[key]

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        """Who provides the key, in random order."""
        oldest = self._clock() - LIFETIME
        held = [record for record in self.providers.get(key, {}).values() if record.timestamp >= oldest]
        return [PeerInfo(record.peer_id, record.addresses) for record in self._rng.sample(held, len(held))]

    def cleanup_expired(self) -> None:
        oldest = self._clock() - LIFETIME
        expired = [
            (key, peer_id)
            for key, held in self.providers.items()
            for peer_id, record in held.items()
            if record.timestamp < oldest
        ]
        for key, peer_id in expired:
            self._drop(key, peer_id)
