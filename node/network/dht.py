"""The Kademlia table: the meeting point, and a second place for every announcement.

KadDHT holds one value per key, cannot list keys, and answers from its own cache. So a server's announcement has
a key of its own; a well-known key lists the models, a few signed announcements merged by whoever puts them;
and provider records on a few shards lead to servers that know the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
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
from libp2p.records.pubkey import PublicKeyValidator
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from ...protocols import wire_pb2 as wire
from ...protocols.announcement import BadAnnouncement, SignedAnnouncement, open_announcement, open_signed
from .host import Host

log = logging.getLogger(__name__)

SHARDS: Final = 8  # of provider records, since a key takes 20 providers and refuses newcomers
_NAMESPACE: Final = "petalnode"
_MODELS_KEY: Final = f"/{_NAMESPACE}/models"
_MAX_MODELS_VALUE: Final = 32 * 1024  # bytes
_MAX_MODELS_RECORDS: Final = 32
_REPLICAS: Final = 8
_INBOUND_STREAMS: Final = 128
_STREAM_LIMIT: Final = 30.0  # seconds that a peer may keep one of them
_PROVIDER_LIFETIME: Final = 900.0  # seconds; servers provide again every third of it
_TIDY_INTERVAL: Final = 60.0


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
        """Makes a peer that serves the table known to it."""
        info = PeerInfo(ID.from_string(peer_id), [Multiaddr(addr) for addr in addrs])
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

    async def provide(self, shard: int, *, timeout: float) -> None:
        """Lists this node as one to ask about servers."""
        with trio.move_on_after(timeout):
            try:
                await self.kad.provider_store.provide(_shard_key(shard))
            except Exception as error:
                log.debug("cannot provide: %s", error)

    async def find_providers(self, shard: int, *, timeout: float) -> list[tuple[str, list[str]]]:
        """Nodes to ask about servers, with their addresses."""
        key = _shard_key(shard)
        store = self.kad.provider_store
        # It answers from what it holds itself, and would never ask anyone again.
        held = store.providers.pop(key, {})
        found: list[PeerInfo] = []
        try:
            with trio.move_on_after(timeout):
                found = await store.find_providers(key)
        except Exception as error:
            log.debug("cannot find providers: %s", error)
        finally:
            store.providers[key] = held | store.providers.get(key, {})
        found += store.get_providers(key)
        return [(str(info.peer_id), [str(addr) for addr in info.addrs]) for info in found]

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
            oldest = time.time() - _PROVIDER_LIFETIME
            for key, providers in list(self.kad.provider_store.providers.items()):
                for peer_id in [peer for peer, entry in providers.items() if entry.timestamp < oldest]:
                    del providers[peer_id]
                if not providers:
                    self.kad.provider_store.providers.pop(key, None)


def _shard_key(shard: int) -> bytes:
    return b"\x12\x20" + hashlib.sha256(f"petalnode/directory/{shard % SHARDS}".encode()).digest()


@contextlib.asynccontextmanager
async def open_dht(host: Host, *, serve: bool) -> AsyncIterator[Dht]:
    """Runs the table's services until the block ends."""
    dht = Dht(host, serve=serve)
    async with background_trio_service(dht.kad), trio.open_nursery() as nursery:
        nursery.start_soon(dht.tidy_forever)
        yield dht
        nursery.cancel_scope.cancel()
