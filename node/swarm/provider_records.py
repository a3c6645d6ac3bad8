"""Servers found by the provider records that they leave in Kademlia, and the records of this node.

Who knows one peer of any DHT of libp2p that holds our records, and no directory, finds servers by them. They are found
by the range of blocks of a model version, by the name of a model, or as directories of anything. A record is nobody's
word: what counts is the announcement that the server found gives of itself. Kademlia adds a way in and never removes
one.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ...crypto.identity import peer_id_to_bytes
from ...protocols.announcement import ANNOUNCEMENT, Announcement, ServerState
from ...protocols.directory import DIRECTORY, ask_own
from ...protocols.framing import PeerError
from ...protocols.ids import MAX_RANGES, VERSION_DIGITS, Span, blocks_key, directory_key, model_key, ranges_of
from ..network.dht import SHARDS, Dht
from ..network.provider_lookup import Contact
from ..network.shares import backoff
from .directory import Directory
from .streams import MessageStreams
from .view import coverage_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchPolicy:
    """How many providers a search asks, and how long it takes."""

    tried: int = 16  # Providers of one key that are asked for their announcements, at most
    tried_in_all: int = 64  # In one search, for all of its keys
    enough: int = 4  # Servers found under one key, after which no more of its providers are asked
    keys_at_once: int = 2
    tried_at_once: int = 4  # of one key
    look_up: float = 8.0  # seconds of one key
    meeting: float = 4.0  # seconds that a provider has to give its announcement
    seconds: float = 15.0  # seconds of a search
    again: float = 20.0  # seconds between two searches for the same, and
    again_quietly: float = 300.0  # in the background


SEARCH: Final = SearchPolicy()
_DIRECTORY: Final = replace(DIRECTORY, max_header=ANNOUNCEMENT.max_bytes + 1024)  # one announcement


@dataclass(frozen=True)
class RecordPolicy:
    """How often a server leaves its records, so that their messages cost little."""

    least_pause: float = 1200.0
    """Seconds between two rounds of a server's records, once it has been there for a while; and at most"""
    longest_pause: float = 3000.0  # js-libp2p keeps a provider's addresses for an hour
    first_pause: float = 60.0
    """After the first round, when others have hardly heard of the node; then four times as long."""
    rate: float = 16.0  # bytes a second of messages, both ways, up to the longest pause
    notice: float = 1 / 9  # of an announcement's lifetime, after which other blocks are noticed
    provide: float = 15.0  # seconds for one key


RECORDS: Final = RecordPolicy()


def keys_of(own: Announcement | None) -> list[bytes]:
    """Where a server that says this of itself lists itself: nowhere if it takes no sessions any more."""
    if own is None or own.state not in (ServerState.JOINING, ServerState.ONLINE):
        return []
    version = own.model_version.hex()
    ranges = ranges_of(own.span, own.num_blocks)
    return [model_key(own.model_name, own.num_blocks), *(blocks_key(version, number) for number in ranges)]


def pause_after(rounds: int, cost: int, taken: int) -> float:
    """Seconds until the next round, after `rounds` rounds. The last took `cost` bytes of messages and left `taken`
    records."""
    if not taken:
        return RECORDS.first_pause
    settled = min(max(RECORDS.least_pause, cost / RECORDS.rate), RECORDS.longest_pause)
    return backoff(rounds, RECORDS.first_pause, settled, 4.0)


@dataclass(frozen=True)
class Sought:
    """A key, and which announcements of its providers are looked for there. Those of a model's name, or of a version
    (its first hexadecimal digits) and a range of its blocks. Those of any servers if neither is given."""

    key: bytes
    name: str | None = None
    version: str = ""
    num_blocks: int | None = None
    block_range: int | None = None

    def fits(self, found: Announcement) -> bool:
        named = self.name in (None, found.model_name) and self.num_blocks in (None, found.num_blocks)
        ours = named and found.model_version.hex().startswith(self.version)
        return ours and (self.block_range is None or self.block_range in ranges_of(found.span, found.num_blocks))


def blocks_sought(version: str, num_blocks: int | None = None) -> list[Sought]:
    """All ranges of a model version, of which `version` are the first hexadecimal digits (`VERSION_DIGITS` or more)."""
    count = MAX_RANGES if num_blocks is None else len(ranges_of(Span(0, num_blocks), num_blocks))
    return [
        Sought(blocks_key(version, number), version=version, num_blocks=num_blocks, block_range=number)
        for number in range(count)
    ]


def model_sought(name: str, num_blocks: int) -> list[Sought]:
    """Servers of any version of a model of this name."""
    return [Sought(model_key(name, num_blocks), name, num_blocks=num_blocks)]


def directories_sought() -> list[Sought]:
    """Any servers."""
    return [Sought(directory_key(shard)) for shard in range(SHARDS)]


def missing(servers: Iterable[Announcement]) -> bool:
    """Whether some block of the model has no server among these of one version."""
    servers = [server for server in servers if server.state is ServerState.ONLINE]
    sizes = Counter(server.num_blocks for server in servers)
    return not sizes or 0 in coverage_of(servers, sizes.most_common(1)[0][0])


@dataclass
class _RecordSearch:
    """One search: who was asked for its announcement, and what it said (None: nothing of use, or not yet)."""

    tried: dict[str, Announcement | None] = field(default_factory=dict)
    answered: bool = False  # by any peer of the DHT


@dataclass
class _KeySearch:
    """What became of one key: how many of its providers were asked, and how many are what is looked for."""

    sought: Sought
    tried: int = 0
    found: int = 0

    @property
    def is_over(self) -> bool:
        return self.tried >= SEARCH.tried or self.found >= SEARCH.enough


class ProviderRecords:
    """One node's searches by provider records, and its own records.

    `streams` are the node's, `ttl` the lifetime of its announcement in seconds.
    """

    def __init__(self, *, streams: MessageStreams, dht: Dht, directory: Directory, ttl: float) -> None:
        self._ttl = ttl
        self._streams = streams
        self._host = streams.host
        self._dht = dht
        self._directory = directory
        self._searched: dict[bytes, tuple[float, bool]] = {}  # by the first key: when, and whether the DHT answered

    # --- finding servers

    async def find_model(self, name: str, num_blocks: int, pinned: str, *, timeout: float) -> None:
        """Looks for servers of a model of this name, in a version that begins with `pinned`, if unknown."""
        (named,) = model_sought(name, num_blocks)
        known = self._directory.view.servers(now=time.time())
        if any(named.fits(server) and server.model_version.hex().startswith(pinned) for server in known):
            return
        if len(pinned) >= VERSION_DIGITS:
            await self.find(blocks_sought(pinned, num_blocks), timeout=timeout)
        else:
            await self.find(model_sought(name, num_blocks), timeout=timeout)

    async def find(self, sought: Sequence[Sought], *, timeout: float, again: float = SEARCH.again) -> bool:
        """Looks these keys up, in random order, and takes the announcements of their providers into the view. Returns
        whether any peer answered a look-up. What was searched for `again` seconds ago or less is not searched for."""
        what, now = sought[0].key, trio.current_time()
        when, answered = self._searched.get(what, (-math.inf, False))
        if now - when < again:
            return answered
        self._searched[what] = (now, answered)
        search = _RecordSearch()
        waiting = iter(random.sample(list(sought), len(sought)))
        try:
            with trio.move_on_after(min(timeout, SEARCH.seconds)):
                async with trio.open_nursery() as nursery:
                    for _ in range(SEARCH.keys_at_once):
                        nursery.start_soon(self._find_keys, waiting, search)
        except BaseException:
            self._searched.pop(what, None)  # who gave up has not learned that nobody is there
            raise
        self._searched[what] = (now, search.answered)
        await self._dht.close_opened()
        return search.answered

    async def _find_keys(self, waiting: Iterator[Sought], search: _RecordSearch) -> None:
        for sought in waiting:
            await self._find_key(sought, search)

    async def _find_key(self, sought: Sought, search: _RecordSearch) -> None:
        lookup = await self._dht.look_up(sought.key, timeout=SEARCH.look_up)
        search.answered |= bool(lookup.nearest())
        providers = lookup.providers(random.Random())
        of_key = _KeySearch(sought)
        async with trio.open_nursery() as nursery:
            for _ in range(SEARCH.tried_at_once):
                nursery.start_soon(self._try_providers, providers, of_key, search)

    async def _try_providers(self, providers: Iterator[Contact], of_key: _KeySearch, search: _RecordSearch) -> None:
        for contact in providers:
            if of_key.is_over or len(search.tried) >= SEARCH.tried_in_all:
                return
            of_key.tried += 1
            if contact.peer_id not in search.tried:
                search.tried[contact.peer_id] = None
                search.tried[contact.peer_id] = await self._announcement_of(contact)
            own = search.tried[contact.peer_id]
            of_key.found += own is not None and of_key.sought.fits(own)

    async def _announcement_of(self, contact: Contact) -> Announcement | None:
        """What a provider announces of itself, merged into the view; None if it gives nothing of use."""
        try:
            peer_id_to_bytes(contact.peer_id)
        except ValueError:
            return None  # no server of ours has such a key
        self._host.learn(contact.peer_id, contact.addrs)
        with trio.move_on_after(SEARCH.meeting):
            try:
                stream = await self._streams.new_stream(contact.peer_id, _DIRECTORY, timeout=SEARCH.meeting)
                try:
                    record = await ask_own(stream, now=time.time(), timeout=SEARCH.meeting)
                finally:
                    await stream.reset()
            except PeerError as error:
                log.debug("the provider %s gave no announcement: %s", contact.peer_id, error)
                return None
            if record.content.state is ServerState.OFFLINE:
                return None
            self._directory.merge([record], source=self._host.origin_of(contact.peer_id), met=True)
            return record.content
        return None

    # --- being found

    async def provide_forever(self) -> None:
        """Leaves this server's records, again and again: at once for keys that are new."""
        due: dict[bytes, float] = {}
        rounds = 0
        # The directory is the quick way, and a swarm that starts has enough to do: Kademlia can wait.
        await trio.sleep(self._ttl * random.uniform(0.15, 0.35))
        while True:
            await trio.sleep(self._ttl * RECORDS.notice * random.uniform(0.8, 1.2))
            keys = keys_of(self._directory.own.content if self._directory.own is not None else None)
            late = [key for key in keys if trio.current_time() >= due.get(key, -math.inf)]
            if not late:
                continue
            before = self._messages()
            taken = {key: await self._dht.provide_key(key, timeout=RECORDS.provide) for key in late}
            await self._dht.close_opened()
            rounds += 1
            cost, now = self._messages() - before, trio.current_time()
            pauses = {key: pause_after(rounds, cost, count) * random.uniform(0.9, 1.0) for key, count in taken.items()}
            due = {key: now + pauses[key] if key in pauses else due[key] for key in keys}

    def _messages(self) -> int:
        """Bytes of all look-ups and records so far, both ways."""
        return self._dht.traffic.sent + self._dht.traffic.received
