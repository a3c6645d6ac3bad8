"""The Kademlia table: the meeting point, and a second place for every announcement.

KadDHT holds one value per key, cannot list keys, and answers from its own cache. So a server's announcement has
a key of its own; a well-known key lists the models, a few signed announcements merged by whoever puts them;
and provider records lead to the servers of a model's blocks, and on a few shards to servers that know the rest. Other
DHTs of libp2p keep provider records, too: to them our values are those of an unknown namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.common import PROTOCOL_ID as KAD
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.stream.net_stream import INetStream
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.records.pubkey import PublicKeyValidator
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from ...protocols import wire_pb2 as wire
from ...protocols.announcement import BadAnnouncement, SignedAnnouncement, open_announcement, open_signed
from ...protocols.ids import DIRECTORY, directory_key
from .addresses import dialable, without_peer
from .host import Host
from .provider_lookup import (
    CLOSEST,
    Answer,
    Contact,
    Lookup,
    add,
    ask,
    claimed_origins,
    look_up,
    nearest_around,
)
from .provider_store import FairProviderStore
from .transport.bandwidth import ByteCount

log = logging.getLogger(__name__)

SHARDS: Final = 8  # of provider records, since a key takes 20 providers and refuses newcomers
_NAMESPACE: Final = "petalnode"
_MODELS_KEY: Final = f"/{_NAMESPACE}/models"
_MAX_MODELS_VALUE: Final = 32 * 1024  # bytes
_MAX_MODELS_RECORDS: Final = 32
_REPLICAS: Final = 8
_INBOUND_STREAMS: Final = 128
_STREAM_LIMIT: Final = 30.0  # seconds that a peer may keep one of them
_TIDY_INTERVAL: Final = 60.0
_ADDRESS_LIFETIME: Final = 9000  # seconds that the table knows where a peer is
_MAX_ADDRS: Final = 8  # of this node in a provider record
_LOOKED_AT: Final = 64  # peers of the table, to name some of them
_START: Final = 20  # peers that a look-up begins with: of the table, and of the connected ones


def server_key(peer_id: str) -> str:
    """Where a server's announcement is kept. Keys of more than 50 bytes cannot be looked up."""
    return f"/{_NAMESPACE}/s-{hashlib.sha256(peer_id.encode()).hexdigest()[:32]}"


def open_models_value(value: bytes, now: float) -> list[SignedAnnouncement]:
    """The announcements in a value of the key that lists the models.

    Raises:
        BadAnnouncement: if there is none, too many, or any that is not valid.
    """
    if len(value) > _MAX_MODELS_VALUE:
        raise BadAnnouncement("too long")
    try:
        records = wire.DirectoryRecords.FromString(value).records
    except DecodeError as error:
        raise BadAnnouncement("no records") from error
    if not 0 < len(records) <= _MAX_MODELS_RECORDS:
        raise BadAnnouncement(f"{len(records)} records")
    return [open_signed(record, now=now) for record in records]


def no_backing(_model_version: bytes) -> int:
    return 0


def models_value(records: Iterable[SignedAnnouncement], backing: Callable[[bytes], int] = no_backing) -> bytes:
    """A value for the key that lists the models: of each model the announcement that lasts longest.

    Where there are too many, those with the most `backing` (`SwarmView.backing`): versions cost nothing to make up.
    """
    best: dict[bytes, SignedAnnouncement] = {}
    for record in records:
        held = best.get(record.content.model_version)
        if held is None or record.content.expires > held.content.expires:
            best[record.content.model_version] = record
    page = wire.DirectoryRecords()
    size = 0
    ranks = {version: (backing(version), record.content.expires) for version, record in best.items()}
    for version in sorted(best, key=lambda version: ranks[version], reverse=True):
        record = best[version]
        size += len(record.announcement) + len(record.signature) + 16
        if size > _MAX_MODELS_VALUE or len(page.records) == _MAX_MODELS_RECORDS:
            break
        page.records.append(record.to_wire())
    return page.SerializeToString()


class _AnnouncementValidator(Validator):
    """Lets only valid values in, and prefers the newer announcement and the list of models with the most backing.

    Of lists with the same backing, as for a node that knows no servers, the longer one.
    """

    def __init__(self) -> None:
        self.backing: Callable[[bytes], int] = no_backing

    def validate(self, key: str, value: bytes) -> None:
        self._rank(key, value, time.time())

    def select(self, key: str, values: Sequence[bytes]) -> int:
        now = time.time()
        ranks: list[tuple[float, ...]] = []
        for value in values:
            try:
                ranks.append(self._rank(key, value, now))
            except BadAnnouncement:
                ranks.append((-1.0,))
        return ranks.index(max(ranks))

    def _rank(self, key: str, value: bytes, now: float) -> tuple[float, ...]:
        if key == _MODELS_KEY:
            records = open_models_value(value, now)
            models = {record.content.model_version for record in records}
            backing = sum(map(self.backing, models))
            return float(backing), float(len(models)), min(record.content.expires for record in records)
        content = open_announcement(value, now=now).content
        if key != server_key(content.peer_id):
            raise BadAnnouncement("under the key of another server")
        return 0.0, float(content.sequence)


class Dht:
    """The node's part in the table. Made by `open_dht`. All methods keep to their deadline, and none raises."""

    def __init__(self, host: Host, *, serve: bool) -> None:
        self._host = host
        self._serves = serve
        self._opened: set[str] = set()
        self.traffic = ByteCount()  # messages of look-ups of provider records, and of records left at others
        self._validator = _AnnouncementValidator()
        self.kad = KadDHT(
            host.libp2p,
            DHTMode.SERVER if serve else DHTMode.CLIENT,
            # Without strictness anyone could store anything under other namespaces.
            validator=NamespacedValidator(
                {"pk": PublicKeyValidator(), _NAMESPACE: self._validator}, strict_validation=True
            ),
            validator_changed=True,
            strict_validation=True,
            # The default refuses a third peer of one network, which a rack or a campus has at once.
            max_peers_per_subnet=0,
        )
        self.kad.provider_store = FairProviderStore(host.libp2p, host.origin_of)
        self._table = self.kad.routing_table.find_local_closest_peers
        self.kad.routing_table.find_local_closest_peers = self._closest
        if serve:
            # 12 peers that open a stream and say nothing would otherwise close the table for good.
            self.kad._inbound_limiter.total_tokens = _INBOUND_STREAMS
            host.libp2p.set_stream_handler(KAD, self._handle)

    def weigh_models(self, backing: Callable[[bytes], int]) -> None:
        """From now on `backing(model version)` says which models are listed where there is no room for all."""
        self._validator.backing = backing

    async def _handle(self, stream: INetStream) -> None:
        with trio.move_on_after(_STREAM_LIMIT) as scope:
            try:
                await self.kad.handle_stream(stream)
            except Exception as error:  # an error here would end the connection's other streams
                log.debug("a stream of the table failed: %s", error)
        if scope.cancelled_caught:
            await stream.reset()

    async def add_peer(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Makes a peer that serves the table known to it, and to those who ask, at these addresses."""
        info = PeerInfo(ID.from_string(peer_id), [addr for addr in map(dialable, addrs) if addr is not None])
        if info.addrs:
            self._host.libp2p.get_peerstore().add_addrs(info.peer_id, info.addrs, _ADDRESS_LIFETIME)
        with trio.move_on_after(1.0):
            await self.kad.routing_table.add_peer(info, skip_server_mode_check=True)

    async def put_announcement(self, record: SignedAnnouncement, *, timeout: float) -> None:
        await self._put(server_key(record.content.peer_id), record.to_bytes(), timeout)

    async def get_announcement(self, peer_id: str, *, timeout: float) -> SignedAnnouncement | None:
        """What the table knows of a server, if it is valid."""
        value = await self._get(server_key(peer_id), timeout)
        with contextlib.suppress(BadAnnouncement):
            if value is not None:
                return open_announcement(value, now=time.time())
        return None

    async def put_models(self, records: Iterable[SignedAnnouncement], *, timeout: float) -> None:
        """Adds these announcements' models to the list of the swarm's models."""
        merged = [*records, *await self.get_models(timeout=timeout)]
        if merged:
            await self._put(_MODELS_KEY, models_value(merged, self._validator.backing), timeout)

    async def get_models(self, *, timeout: float) -> list[SignedAnnouncement]:
        """An announcement or a few of each model of the swarm."""
        value = await self._get(_MODELS_KEY, timeout)
        with contextlib.suppress(BadAnnouncement):
            if value is not None:
                return open_models_value(value, time.time())
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
        addrs = [str(without_peer(addr)) for addr in self._host.libp2p.get_addrs()][:_MAX_ADDRS]
        taken = 0

        async def leave(contact: Contact) -> None:
            nonlocal taken
            took = await add(self._host, contact, key, addrs, self.traffic)
            taken += took

        with trio.move_on_after(timeout):
            if self._serves:
                self.kad.provider_store.add_provider(key, PeerInfo(self.kad.local_peer_id, list(map(Multiaddr, addrs))))
            nearest = (await self.look_up(key, timeout=timeout)).nearest()
            async with trio.open_nursery() as nursery:
                for contact in nearest:
                    nursery.start_soon(leave, contact)
        return taken

    async def look_up(self, key: bytes, *, timeout: float) -> Lookup:
        """Asks the peers nearest to a key who provides it, beginning with some of the table and some that this node is
        connected to. What this node keeps itself is in the answer."""
        start = list(map(str, self._closest(key, _START)))
        if len(start) < CLOSEST:
            start += self._host.connected()[:_START]
        own = self.kad.provider_store.get_providers(key)
        lookup = Lookup(key, map(self._contact, start), self._host.peer_id, self._origin_of, map(_contact_of, own))

        async def question(contact: Contact) -> Answer | None:
            before = self._host.is_connected(contact.peer_id)
            answer = await ask(self._host, contact, key, self.traffic)
            if not before and self._host.is_connected(contact.peer_id):
                self._opened.add(contact.peer_id)
            if answer is not None:
                paths = self._host.paths(contact.peer_id)
                await self.add_peer(
                    contact.peer_id, [path.remote_addr for path in paths if path.remote_addr and not path.inbound]
                )
            return answer

        await look_up(lookup, question, timeout=timeout)
        return lookup

    def _closest(self, key: bytes, count: int = 20) -> list[ID]:
        """Whom this node names to who asks: ids near a key are free, so not too many of one address."""
        near = [str(peer) for peer in self._table(key, max(count, _LOOKED_AT))]
        if len(near) <= count:
            return list(map(ID.from_string, near))
        contacts = ((peer_id, self._origins(peer_id)) for peer_id in near)
        return [ID.from_string(peer_id) for peer_id in nearest_around(key, contacts, count)]

    def _origins(self, peer_id: str) -> set[str]:
        here = self._origin_of(peer_id)
        return claimed_origins(self._contact(peer_id)) if here is None else {here}

    def _contact(self, peer_id: str) -> Contact:
        try:
            return _contact_of(
                PeerInfo(ID.from_string(peer_id), self._host.libp2p.get_peerstore().addrs(ID.from_string(peer_id)))
            )
        except PeerStoreError:
            return Contact(peer_id)

    def _origin_of(self, peer_id: str) -> str | None:
        return self._host.origin_of(peer_id) if self._host.is_connected(peer_id) else None

    async def close_opened(self) -> None:
        """Closes connections that look-ups have opened, to others than nodes of petalnode, and that nobody uses."""
        opened, self._opened = self._opened, set()
        for peer_id in opened:
            used = any(connection.open_streams for connection in self._host.connections(peer_id))
            if not used and not self._is_petalnode(peer_id):
                await self._host.disconnect(peer_id)

    def _is_petalnode(self, peer_id: str) -> bool:
        """Whether it may be a directory, or a relay that keeps a place for this node, as long as it is connected."""
        with contextlib.suppress(PeerStoreError):
            return DIRECTORY in self._host.libp2p.get_peerstore().get_protocols(ID.from_string(peer_id))
        return False

    async def _put(self, key: str, value: bytes, timeout: float) -> None:
        """As KadDHT's `put_value`, but on fewer nodes: what is put again every 20 s need not be on 20."""

        async def store(peer: ID) -> None:
            try:
                await self.kad.value_store._store_at_peer(peer, key.encode(), value)
            except Exception as error:
                log.debug("%s did not store %s: %s", peer, key, error)

        with trio.move_on_after(timeout):
            try:
                self.kad.value_store.put(key.encode(), value)
                closest = await self.kad.peer_routing.find_closest_peers_network(key.encode())
            except Exception as error:
                log.debug("cannot put %s: %s", key, error)
                return
            async with trio.open_nursery() as nursery:
                for peer in [peer for peer in closest if peer != self.kad.local_peer_id][:_REPLICAS]:
                    nursery.start_soon(store, peer)

    async def _get(self, key: str, timeout: float) -> bytes | None:
        store = self.kad.value_store
        # It answers from what it holds itself, for 24 hours, and without asking the validator.
        held = store.get(key.encode())
        store.remove(key.encode())
        found: bytes | None = None
        try:
            with trio.move_on_after(timeout):
                found = await self.kad.get_value(key, quorum=2)
        except Exception as error:
            log.debug("cannot get %s: %s", key, error)
        finally:
            if held is not None and store.get(key.encode()) is None:
                store.put_record(key.encode(), held)
        return found if found is not None or held is None else held.value

    async def tidy_forever(self) -> None:
        """Drops what has expired: KadDHT keeps values for a day and providers for two."""
        while True:
            await trio.sleep(_TIDY_INTERVAL)
            for key in self.kad.value_store.get_keys():
                try:
                    record = self.kad.value_store.get(key)
                    if record is not None and self.kad.validator is not None:
                        self.kad.validator.validate(key.decode(), record.value)
                except Exception:
                    self.kad.value_store.remove(key)
            self.kad.provider_store.cleanup_expired()
            before = time.time() - self.kad._provider_rate_window
            counted = self.kad._provider_rate_limits
            for peer in [peer for peer, (begun, _) in counted.items() if begun < before]:
                del counted[peer]


def _contact_of(info: PeerInfo) -> Contact:
    return Contact(str(info.peer_id), tuple(str(without_peer(addr)) for addr in info.addrs))


@contextlib.asynccontextmanager
async def open_dht(host: Host, *, serve: bool) -> AsyncIterator[Dht]:
    """Runs the table's services until the block ends."""
    dht = Dht(host, serve=serve)
    async with background_trio_service(dht.kad), trio.open_nursery() as nursery:
        nursery.start_soon(dht.tidy_forever)
        yield dht
        nursery.cancel_scope.cancel()
