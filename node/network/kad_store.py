"""What this node keeps for others in Kademlia, with bounds that no number of keys fills.

Values are signed announcements and the list of the swarm's models. libp2p's own store keeps 50,000 values of 1 MiB of
anybody, with whatever else a record carries. Once it is full, it looks through all of them for the oldest. Of provider
records it takes any number of keys with any number of addresses. It keeps the first twenty providers of a key, and lets
nobody else in for two days.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import trio
from google.protobuf.message import DecodeError

from ...protocols import wire_pb2 as wire
from ...protocols.announcement import (
    BadAnnouncement,
    SignedAnnouncement,
    counts_until,
    open_announcement,
    open_signed,
)
from .addresses import MAX_ADDRS
from .shares import AddressShares, Origins
from .transport.memory import own_budgets

LIFETIME: Final = 9000.0
"""Seconds that a record is kept: three times as long as servers wait at most before they provide again."""
MAX_RECORDS: Final = 16_384
MAX_OF_KEY: Final = 20
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
        origins: where peers are.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        origins: Origins,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._origins = origins
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
            if len(kept) < MAX_ADDRS and len(addr) + sum(map(len, kept)) <= _MAX_ADDR_BYTES:
                kept.append(addr)
        held = self._providers.setdefault(key, {})
        is_new = peer_id not in held
        held[peer_id] = Provider(peer_id, tuple(kept), self._clock())
        if not is_new:
            return
        self._shares.hold((key, peer_id), self._origins.origin_of(peer_id))
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


_NAMESPACE: Final = "petalnode"
MODELS_KEY: Final = f"/{_NAMESPACE}/models"
MAX_VALUE: Final = 32 * 1024
"""Bytes; an announcement has fewer."""
MAX_MODELS_RECORDS: Final = 32
ENTRY_BYTES: Final = 1024
"""What an entry takes in memory beside its value, or somewhat more."""


def server_key(peer_id: str) -> str:
    """Where a server's announcement is kept. Keys of more than 50 bytes cannot be looked up."""
    return f"/{_NAMESPACE}/s-{hashlib.sha256(peer_id.encode()).hexdigest()[:32]}"


def _records_of(value: bytes) -> list[wire.SignedAnnouncement]:
    if len(value) > MAX_VALUE:
        raise BadAnnouncement("too long")
    try:
        records = wire.DirectoryRecords.FromString(value).records
    except DecodeError as error:
        raise BadAnnouncement("no records") from error
    if not 0 < len(records) <= MAX_MODELS_RECORDS:
        raise BadAnnouncement(f"{len(records)} records")
    return list(records)


def open_models_value(value: bytes, now: float) -> Iterator[SignedAnnouncement]:
    """The announcements in a value of the key that lists models; each takes a while to check.

    Raises:
        BadAnnouncement: if there is none, too many, or any that is not valid.
    """
    for record in _records_of(value):
        yield open_signed(record, now=now)


class ModelBacking(Protocol):
    """Which models are listed where there is no room for all."""

    def backing(self, model_version: bytes) -> int:
        """From how many addresses its servers are known, as `SwarmView.backing` has it."""


class _NoBacking:
    def backing(self, model_version: bytes) -> int:
        return 0


NO_BACKING: Final = _NoBacking()


def models_value(records: Iterable[SignedAnnouncement], models: ModelBacking = NO_BACKING) -> bytes:
    """A value for the key that lists the models: of each model the announcement that lasts longest.

    Where there are too many, those with the most backing: versions cost nothing to make up.
    """
    best: dict[bytes, SignedAnnouncement] = {}
    for record in records:
        held = best.get(record.content.model_version)
        if held is None or record.content.expires > held.content.expires:
            best[record.content.model_version] = record
    page = wire.DirectoryRecords()
    size = 0
    ranks = {version: (models.backing(version), record.content.expires) for version, record in best.items()}
    for version in sorted(best, key=lambda version: ranks[version], reverse=True):
        record = best[version]
        size += len(record.announcement) + len(record.signature) + 16
        if size > MAX_VALUE or len(page.records) == MAX_MODELS_RECORDS:
            break
        page.records.append(record.to_wire())
    return page.SerializeToString()


@dataclass(frozen=True)
class Value:
    """A value that is valid: until when it is (seconds since 1970), and what makes it better than another one."""

    value: bytes
    until: float
    models: frozenset[bytes] = frozenset()
    order: float = 0.0  # an announcement's sequence number, or the first expiry of a list of models

    def rank(self, models: ModelBacking) -> tuple[float, ...]:
        """Of two values of a key the one of higher rank is kept: the newer announcement; the list of models with the
        most backing, or of two with the same the longer one. That is for nodes that know no servers."""
        return sum(map(models.backing, self.models)), len(self.models), self.order


async def open_value(key: str, value: bytes, now: float) -> Value:
    """Checks a value that anyone may have made for a key; `now` in seconds since 1970. Lets others have their turns.

    Raises:
        BadAnnouncement: it is not valid, or the key is none of those of petalnode.
    """
    if key == MODELS_KEY:
        contents = []
        for record in open_models_value(value, now):
            contents.append(record.content)
            await trio.lowlevel.checkpoint()
        models = frozenset(content.model_version for content in contents)
        until = min(map(counts_until, contents))
        return Value(value, until, models, min(content.expires for content in contents))
    content = open_announcement(value, now=now).content
    if key != server_key(content.peer_id):
        raise BadAnnouncement("under the key of another server")
    return Value(value, counts_until(content), order=float(content.sequence))


class ValueStore:
    """Values by key, each with the time at which it came, and nothing else.

    Their room is shared by the addresses that they came from: of who has most there, the newest goes.

    Args:
        clock: seconds since 1970.
        most: bytes of all values together, each with `ENTRY_BYTES` more; `own_budgets().values` if it is not given.
    """

    def __init__(self, clock: Callable[[], float] = time.time, most: int | None = None) -> None:
        self.models: ModelBacking = NO_BACKING
        self._clock = clock
        self._values: dict[str, tuple[Value, float]] = {}
        self._shares = AddressShares[str](own_budgets().values if most is None else most)

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: str, value: Value, origin: str) -> bool:
        """Keeps a value unless a better one is there. Counts it for the address that it came from, unless it was there.
        Whether this value, or the same one, is there now."""
        held = self.get(key)
        if held is not None:
            before, _ = held
            if before.value == value.value or before.rank(self.models) >= value.rank(self.models):
                return before.value == value.value
        self._values[key] = value, self._clock()
        self._shares.hold(key, origin, len(value.value) + ENTRY_BYTES)
        while (surplus := self._shares.surplus()) is not None:
            self._drop(surplus)
        return key in self._values

    def get(self, key: str) -> tuple[Value, float] | None:
        """The value and when it came; None if there is none that is still valid."""
        held = self._values.get(key)
        if held is not None and held[0].until < self._clock():
            self._drop(key)
            return None
        return held

    def _drop(self, key: str) -> None:
        del self._values[key]
        self._shares.remove(key)

    def drop_expired(self) -> Iterator[None]:
        """Goes through all values once, one at each step; who steps lets others have their turns between."""
        for key in list(self._values):
            self.get(key)
            yield
