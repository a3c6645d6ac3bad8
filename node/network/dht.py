"""The Kademlia table: the meeting point, and a second place for every announcement.

A table holds one value per key and cannot list keys. So a server's announcement has a key of its own. A well-known key
lists the models, a few signed announcements merged by whoever puts them. Provider records lead to servers of a model's
blocks, and on a few shards to servers that know the rest. Other DHTs of libp2p keep provider records, too: to them our
values are those of an unknown namespace.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ...protocols.announcement import BadAnnouncement, SignedAnnouncement, open_announcement
from ...protocols.directory import DIRECTORY
from ...protocols.ids import directory_key
from .addresses import MAX_ADDRS, dialable, dialable_among, without_peer
from .host import Host
from .kad_messages import record_of
from .kad_service import KadService
from .kad_store import (
    MODELS_KEY,
    FairProviderStore,
    ModelBacking,
    Provider,
    Value,
    ValueStore,
    models_value,
    open_models_value,
    open_value,
    server_key,
)
from .provider_lookup import LOOKUP, Contact, Lookup, LookupAnswer, add, ask, look_up
from .routing_table import RoutingTable
from .standard_protocols import speaks
from .transport.bandwidth import ByteCount

log = logging.getLogger(__name__)

SHARDS: Final = 8  # of provider records, since a key takes 20 providers


@dataclass(frozen=True)
class TablePolicy:
    """How the table is asked, and kept."""

    replicas: int = 8
    values: int = 3
    """Valid values of a key after which no more peers are asked."""
    tidy_interval: float = 60.0
    tidy_slice: int = 256  # keys, after which others have their turns
    refresh_interval: float = 600.0  # seconds, as the specification has it
    refresh_timeout: float = 60.0
    start: int = 20  # connected peers that a look-up begins with, where the table has few


TABLE: Final = TablePolicy()


class Dht:
    """The node's part in the table. Made by `open_dht`. All methods keep to their deadline, and none raises."""

    def __init__(self, host: Host, *, serve: bool) -> None:
        self._host = host
        self._serves = serve
        self._opened: set[str] = set()
        self.traffic = ByteCount()  # messages of look-ups of provider records, and of records left at others
        self._value_traffic = ByteCount()
        self._values = ValueStore()
        self._providers = FairProviderStore(host)
        self._table = RoutingTable(host)
        if serve:
            KadService(host, self._table, self._providers, self._values).start()

    def weigh_models(self, models: ModelBacking) -> None:
        """From now on `models` says which of them are listed where there is no room for all."""
        self._values.models = models

    def kept(self) -> dict[str, int]:
        """How many peers, providers and values this node keeps."""
        return {"peers": len(self._table), "providers": len(self._providers), "values": len(self._values)}

    async def add_peer(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Makes a peer that serves the table known to it, and to those who ask, at these addresses."""
        self._add_peer(peer_id, addrs)

    def _add_peer(self, peer_id: str, addrs: Sequence[str]) -> None:
        self._table.learn(peer_id, [addr for addr in map(dialable, addrs) if addr is not None])

    async def put_announcement(self, record: SignedAnnouncement, *, timeout: float) -> None:
        await self._put(server_key(record.content.peer_id), record.to_bytes(), timeout)

    async def get_announcement(self, peer_id: str, *, timeout: float) -> SignedAnnouncement | None:
        """What the table knows of a server, if it is valid."""
        value = await self._get(server_key(peer_id), timeout)
        with contextlib.suppress(BadAnnouncement):
            if value is not None:
                return open_announcement(value.value, now=time.time())
        return None

    async def put_models(self, records: Iterable[SignedAnnouncement], *, timeout: float) -> None:
        """Adds these announcements' models to the list of the swarm's models."""
        merged = [*records, *await self.get_models(timeout=timeout)]
        if merged:
            await self._put(MODELS_KEY, models_value(merged, self._values.models), timeout)

    async def get_models(self, *, timeout: float) -> list[SignedAnnouncement]:
        """An announcement or a few of each model of the swarm."""
        value = await self._get(MODELS_KEY, timeout)
        with contextlib.suppress(BadAnnouncement):
            if value is not None:
                return list(open_models_value(value.value, time.time()))
        return []

    # --- provider records

    async def provide(self, shard: int, *, timeout: float) -> None:
        """Lists this node as one to ask about servers."""
        await self.provide_key(directory_key(shard % SHARDS), timeout=timeout)

    async def find_providers(self, shard: int, *, timeout: float) -> list[tuple[str, list[str]]]:
        """Nodes to ask about servers, with their addresses, peer ids included."""
        found = await self.look_up(directory_key(shard % SHARDS), timeout=timeout)
        contacts = found.providers(random.Random())
        return [(contact.peer_id, [f"{addr}/p2p/{contact.peer_id}" for addr in contact.addrs]) for contact in contacts]

    async def provide_key(self, key: bytes, *, timeout: float) -> int:
        """Leaves a record of this node at the peers nearest to a key; returns how many have taken it."""
        addrs = [str(without_peer(addr)) for addr in self._host.libp2p.get_addrs()][:MAX_ADDRS]
        taken = 0

        async def leave(contact: Contact) -> None:
            nonlocal taken
            took = await add(self._host, contact, key, addrs, self.traffic)
            taken += took

        with trio.move_on_after(timeout):
            if self._serves:
                self._providers.add(key, self._host.peer_id, [Multiaddr(addr).to_bytes() for addr in addrs])
            nearest = (await self.look_up(key, timeout=timeout)).nearest()
            async with trio.open_nursery() as nursery:
                for contact in nearest:
                    nursery.start_soon(leave, contact)
        return taken

    async def look_up(self, key: bytes, *, timeout: float) -> Lookup:
        """Asks the peers nearest to a key who provides it. Begins with some of the table and some that this node is
        connected to. What this node keeps itself is in the answer."""
        question = Message(type=Message.GET_PROVIDERS, key=key)
        lookup = self._lookup(key, self._providers.providers(key))
        await look_up(lookup, lambda contact: self._ask(contact, question, self.traffic), timeout=timeout)
        return lookup

    def _lookup(self, key: bytes, providers: Iterable[Provider] = ()) -> Lookup:
        start = [peer.contact for peer in self._table.nearest(key)]
        if len(start) < LOOKUP.closest:
            start += map(self._table.contact, self._host.connected()[: TABLE.start])
        own = [Contact(known.peer_id, tuple(map(str, dialable_among(known.addrs)))) for known in providers]
        return Lookup(key, start, self._host.peer_id, self._origin_of, own)

    async def _ask(self, contact: Contact, question: Message, traffic: ByteCount) -> LookupAnswer | None:
        """Asks a peer of a look-up, which is one of the table from then on if it answers."""
        before = self._host.is_connected(contact.peer_id)
        answer = await ask(self._host, contact, question, traffic)
        if not before and self._host.is_connected(contact.peer_id):
            self._opened.add(contact.peer_id)
        if answer is not None:
            paths = self._host.paths(contact.peer_id)
            dialed = [path.remote_addr for path in paths if path.remote_addr and not path.inbound]
            self._add_peer(contact.peer_id, dialed)
        elif not self._host.is_connected(contact.peer_id):
            self._table.remove(contact.peer_id)
        return answer

    def _origin_of(self, peer_id: str) -> str | None:
        return self._host.origin_of(peer_id) if self._host.is_connected(peer_id) else None

    async def close_opened(self) -> None:
        """Closes connections that look-ups have opened, to others than nodes of petalnode, and that nobody uses."""
        opened, self._opened = self._opened, set()
        for peer_id in opened:
            used = any(connection.open_streams for connection in self._host.connections(peer_id))
            # One of ours may be a directory, or a relay that keeps a place for this node, as long as it is connected.
            if not used and not speaks(self._host.libp2p.get_peerstore(), peer_id, DIRECTORY.id):
                await self._host.disconnect(peer_id)

    # --- values

    async def _put(self, key: str, value: bytes, timeout: float) -> None:
        """Leaves a value at some of the peers nearest to its key. What is put again every 20 s need not be on 20."""
        find = Message(type=Message.FIND_NODE, key=key.encode())
        put = Message(type=Message.PUT_VALUE, key=find.key, record=record_of(find.key, value))
        with trio.move_on_after(timeout):
            try:
                self._values.put(key, await open_value(key, value, time.time()), self._host.peer_id)
            except BadAnnouncement as error:
                log.debug("cannot put %s: %s", key, error)
                return
            lookup = self._lookup(find.key)
            await look_up(lookup, lambda contact: self._ask(contact, find, self._value_traffic), timeout=timeout)
            async with trio.open_nursery() as nursery:
                for contact in lookup.nearest()[: TABLE.replicas]:
                    nursery.start_soon(self._ask, contact, put, self._value_traffic)

    async def _get(self, key: str, timeout: float) -> Value | None:
        """The best of the values that this node and the first few others have that know any."""
        question = Message(type=Message.GET_VALUE, key=key.encode())
        held = self._values.get(key)
        found = [] if held is None else [held[0]]
        with trio.CancelScope() as enough:

            async def ask_value(contact: Contact) -> LookupAnswer | None:
                answer = await self._ask(contact, question, self._value_traffic)
                if answer is not None and answer.value is not None:
                    with contextlib.suppress(BadAnnouncement):
                        found.append(await open_value(key, answer.value, time.time()))
                        if len(found) - (held is not None) >= TABLE.values:
                            enough.cancel()
                return answer

            await look_up(self._lookup(question.key), ask_value, timeout=timeout)
        return max(found, key=lambda value: value.rank(self._values.models), default=None)

    # --- what goes on all the time

    async def tidy_forever(self) -> None:
        """Drops what has expired."""
        while True:
            await trio.sleep(TABLE.tidy_interval)
            for store in (self._values, self._providers):
                for number, _ in enumerate(store.drop_expired(), 1):
                    if number % TABLE.tidy_slice == 0:
                        await trio.lowlevel.checkpoint()

    async def refresh_forever(self) -> None:
        """Looks up this node itself and any other key now and then. So the table has peers who are there."""
        while True:
            await trio.sleep(TABLE.refresh_interval * random.uniform(0.9, 1.0))
            for key in (ID.from_string(self._host.peer_id).to_bytes(), os.urandom(32)):
                find = Message(type=Message.FIND_NODE, key=key)
                await look_up(
                    self._lookup(key),
                    functools.partial(self._ask, question=find, traffic=self._value_traffic),
                    timeout=TABLE.refresh_timeout,
                )


@contextlib.asynccontextmanager
async def open_dht(host: Host, *, serve: bool) -> AsyncIterator[Dht]:
    """Runs the table's services until the block ends."""
    dht = Dht(host, serve=serve)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dht.tidy_forever)
        nursery.start_soon(dht.refresh_forever)
        yield dht
        nursery.cancel_scope.cancel()
