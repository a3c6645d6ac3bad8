"""A running node: builds its parts (host, DHT, directory, announcer, NAT manager, discovery, gossip) and joins."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from ...crypto.identity import Identity
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import Announcement
from ...protocols.directory import DIRECTORY, MANIFEST, NodeInfo, answer_manifests, ask_manifest
from ...protocols.evidence import EVIDENCE
from ...protocols.framing import MessageStream, PeerError
from ..errors import ModelError
from ..models import Manifest
from ..network.dht import Dht, open_dht
from ..network.host import Host, keep_up, open_host
from ..network.nat.manager import NatConfig, NatManager
from ..network.nat.reachability import Reachability
from ..network.transport.memory import own_heap
from ..network.transport.raw_connection import Path
from ..trust.bundle import Bundle
from ..trust.evidence_gossip import TOPIC, EvidenceGossip, fetch_bundle
from ..trust.evidence_message import EVIDENCE_LIMITS
from ..trust.store import TrustStore
from .announcer import Announcer
from .config import SwarmConfig, checked
from .directory import Directory
from .discovery import Discovery, JoinResult
from .provider_records import ProviderRecords
from .streams import MessageStreams
from .versions import manifests_to_ask, versions_named
from .view import SwarmView

if TYPE_CHECKING:
    from ..network.gossip import Gossip

log = logging.getLogger(__name__)

_RETRACT_DEADLINE: Final = 3.0  # seconds: several round trips across an ocean, or on a busy machine
_MANIFEST_IDLE: Final = 60.0

F = TypeVar("F", bound=Message)


class Swarm(MessageStreams):
    """A running node. Made by `open_swarm`; everything on it belongs to trio's thread."""

    def __init__(
        self,
        config: SwarmConfig,
        host: Host,
        dht: Dht,
        nursery: trio.Nursery,
        evidence: EvidenceGossip,
        gossip: Gossip | None,
    ) -> None:
        super().__init__(host)
        self._config = config
        self._nursery = nursery
        self._manifests: dict[bytes, wire.Manifest] = {}
        self._direct: dict[str, trio.Event] = {}
        host.on_connected(self._on_connected)
        self.finder = self._directory = Directory(config, dht, self)
        self._records = ProviderRecords(streams=self, dht=dht, directory=self._directory, ttl=config.announcement_ttl)
        host.share_dials(self._directory)
        dht.weigh_models(self._directory)
        self._announcer = Announcer(config, host, dht, self._directory)
        nat = NatConfig(bool(config.listen), config.announce, config.peers, config.relay, config.relay_limits)
        self.nat = NatManager(host, self._directory, nursery, nat, addrs_changed=self._announcer.addrs_changed)
        self._directory.about = self.nat.about
        self._discovery = Discovery(host, self._directory, self._records, nursery, config)
        self.named = self._discovery.named  # the peers that this node was told to join by
        self.evidence, self.gossip = evidence, gossip  # no gossip if this node takes no part in it
        self.set_handler(EVIDENCE, evidence.serve)
        self.set_handler(DIRECTORY, self._directory.serve)
        self.set_handler(MANIFEST, self._serve_manifests)

    @property
    def peer_id(self) -> str:
        return self.host.peer_id

    @property
    def trust(self) -> TrustStore:
        """What this node thinks of others."""
        return self._config.trust

    @property
    def identity(self) -> Identity:
        return self._config.identity

    @property
    def psk(self) -> str | None:
        """The private swarm's key; None in the public swarm."""
        return self._config.psk

    @property
    def addrs(self) -> list[str]:
        """Concrete multiaddrs under which this node may be reached, with /p2p; none for a pure client."""
        return self.host.addrs()

    def connected(self) -> list[str]:
        """The ids of the peers that there is a connection to."""
        return self.host.connected()

    def is_connected(self, peer_id: str) -> bool:
        return self.host.is_connected(peer_id)

    def is_direct(self, peer_id: str) -> bool:
        """Whether there is a connection to this peer that needs no relay."""
        return self.host.is_direct(peer_id)

    def watch_direct(self, peer_id: str) -> trio.Event:
        """An event that is set as soon as there is a connection to this peer that needs no relay."""
        event = self._direct.setdefault(peer_id, trio.Event())
        if self.is_direct(peer_id):
            event.set()
            del self._direct[peer_id]
        return event

    def _on_connected(self, peer_id: str, path: Path) -> None:
        event = self._direct.pop(peer_id, None) if path.direct else None
        if event is not None:
            event.set()

    # --- evidence

    async def publish_evidence(self, bundle: Bundle, *, recomputed: bool, one_bit: bool = False) -> None:
        """Bans the server whose fault this node has checked itself, and publishes the evidence.

        `recomputed`: this node has recomputed the answer, and signs that it has. `one_bit`: no more of it was wrong.
        """
        data = self.evidence.record_proven(bundle, recomputed=recomputed, one_bit=one_bit, addrs=self.addrs)
        if self.gossip is not None:
            await self.gossip.publish(data)

    async def fetch_evidence(
        self, peer_id: str, evidence_id: bytes, *, addrs: Sequence[str] = (), timeout: float
    ) -> Bundle:
        """The bundle of this id from a peer that has published it, and may be dialed at `addrs`.

        Raises:
            PeerError, Refusal, BadBundle: it has not, or sends nonsense.
        """
        self.host.learn(peer_id, addrs)
        async with self.open_stream(peer_id, EVIDENCE, timeout=timeout) as stream:
            return await fetch_bundle(stream, evidence_id)

    # --- reachability

    @property
    def reachability(self) -> Reachability:
        """How others reach this node, as far as is known by now."""
        return self.nat.reachability

    async def wait_reachability_changed(self) -> None:
        await self.nat.wait_changed()

    def about(self) -> NodeInfo:
        """What this node says of itself to a peer that asks: its role, its reachability, what it relays."""
        return self.nat.about()

    async def ask_node(self, peer_id: str, *, timeout: float) -> NodeInfo:
        """What a peer says of itself. Nobody vouches for that.

        Raises:
            PeerError: it cannot be reached, did not answer within `timeout` seconds, or does not know the question.
        """
        return await self._directory.ask_node(peer_id, timeout=timeout)

    # --- announcements

    def announce(self, announcement: Announcement) -> None:
        """Publishes what this server says of itself, from now on and until it changes or is retracted.

        Sequence number, expiry and, where it has none, the addresses are filled in. It is sent out at once, and
        again at every third of its lifetime. In a large swarm, load, free cache and round trips are not sent out: who
        measures the round trip to this server gets them.

        Raises:
            ValueError: the announcement is another node's, or one that no reader would accept.
        """
        self._announcer.announce(announcement)

    async def retract(self) -> None:
        """Sends a retraction to all who may know this server, within 3 s, and announces no more."""
        with trio.CancelScope(deadline=trio.current_time() + _RETRACT_DEADLINE, shield=True):
            await self._announcer.retract()

    @property
    def view(self) -> SwarmView:
        """What is known now. Its methods take the time, `time.time()`."""
        return self._directory.view

    async def wait_changed(self) -> None:
        """Returns when `view` has changed. Expiry alone does not count as a change."""
        await self._directory.wait_changed()

    async def refresh(
        self, *, model_version: bytes | None = None, sample: bool = False, everything: bool = False, timeout: float
    ) -> SwarmView:
        """Asks several peers for all they know, side by side; returns when the quick ones have answered.

        With `sample`, for some servers of each block only, as a client needs them, and then in the background. In a
        large swarm a node that listens gets a sample too, unless it wants `everything`. The slow ones go on in the
        background for as long as `timeout` seconds allow. Where they know too little, Kademlia is asked for servers.

        Raises:
            SwarmError: there are peers to ask, and none has answered within `timeout` seconds, nor any of a DHT.
        """
        await self._discovery.refresh(
            model_version=model_version or b"", sample=sample, everything=everything, timeout=timeout
        )
        return self._directory.view

    async def exchange(self, peers: Collection[str], *, model_version: bytes, timeout: float) -> frozenset[str]:
        """Sends these peers, and some others, the own announcement, and asks them for all they know of a model.

        Returns those that have answered within `timeout` seconds: they know the announcement.
        """
        return await self._announcer.exchange(peers, model_version=model_version, timeout=timeout)

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        """Seconds of a round trip to this peer. A server whose announcement is old is asked what it announces now.

        Raises:
            PeerError: the peer cannot be reached or did not answer within `timeout` seconds.
        """
        return await self._directory.measure_rtt(peer_id, timeout=timeout)

    # --- manifests

    def serve_manifest(self, model_version: bytes, manifest: bytes) -> None:
        """Hands this manifest (a serialised `wire.Manifest`) to every peer that asks for the version.

        Raises:
            ValueError: it is none.
        """
        try:
            self._manifests[model_version] = wire.Manifest.FromString(manifest)
        except DecodeError as error:
            raise ValueError("this is no serialised manifest") from error

    async def fetch_manifest(self, peer_id: str, model_version: bytes, *, timeout: float) -> bytes | None:
        """The serialised `wire.Manifest` that a peer has of this version, not yet checked; None if it has none.

        Raises:
            PeerError: no answer within `timeout` seconds, or none that fits.
        """
        async with self.open_stream(peer_id, MANIFEST, timeout=timeout) as stream:
            manifest = await ask_manifest(stream, model_version, timeout=timeout)
            return None if manifest is None else manifest.SerializeToString()

    async def manifests(
        self, name: str, num_blocks: int, *, pinned: str = "", timeout: float
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Each (model version, serialised manifest, not yet checked) that servers of a model of this name give, of
        versions that begin with the digits `pinned`.

        All are asked side by side, for `timeout` seconds; versions of which no server answers are left out. Nothing
        comes before all have had their time: of several versions none is to gain by answering first.

        Raises:
            ModelError: more versions than can be asked for.
        """
        await self._records.find_model(name, num_blocks, pinned, timeout=timeout)
        known = self.view.servers(now=time.time())
        proven = self.trust.proven_of(server.peer_id for server in known)
        named = versions_named(known, name, num_blocks, pinned, proven=proven)
        asked = manifests_to_ask(named, connected=set(self.connected()), proven=proven)
        found: dict[bytes, bytes] = {}
        async with trio.open_nursery() as nursery:
            for servers in asked:
                nursery.start_soon(self._ask_servers, servers, timeout, found)
        for servers in asked:
            version = servers[0].model_version
            if version in found:
                yield version, found[version]

    async def _ask_servers(self, servers: Sequence[Announcement], timeout: float, found: dict[bytes, bytes]) -> None:
        """Puts the manifest that the first of these servers of one version gives into `found`."""
        async with trio.open_nursery() as nursery:
            for server in servers:
                nursery.start_soon(self._ask_server, server, timeout, found, nursery.cancel_scope)

    async def _ask_server(
        self, server: Announcement, timeout: float, found: dict[bytes, bytes], others: trio.CancelScope
    ) -> None:
        try:
            manifest = await self.fetch_manifest(server.peer_id, server.model_version, timeout=timeout)
        except PeerError as error:
            log.debug("no manifest: %s", error)
            return
        if manifest is None:
            return
        try:
            Manifest.from_wire(manifest, server.model_version)
        except ModelError as error:
            log.debug("%s: %s", server.peer_id, error)  # others are waited for
            return
        found.setdefault(server.model_version, manifest)
        others.cancel()

    async def _serve_manifests(self, stream: MessageStream[wire.ManifestFrame]) -> None:
        await answer_manifests(stream, self._manifests, timeout=_MANIFEST_IDLE)

    # --- life

    async def join(self) -> None:
        """Meets the peers to join by, or looks for a swarm. Called by `open_swarm`."""
        self.nat.start()
        await self._discovery.join()

    @property
    def joined(self) -> JoinResult | None:
        """How this node came into its swarm; None as long as it has met nobody."""
        return self._discovery.joined

    def start(self) -> None:
        """Starts what runs beside. Called by `open_swarm`."""
        self._nursery.start_soon(self._discovery.run)
        self._nursery.start_soon(self._announcer.run)
        if (heap := own_heap()) is not None:
            self._nursery.start_soon(keep_up, heap.give_back)


@contextlib.asynccontextmanager
async def _evidence(config: SwarmConfig, host: Host) -> AsyncIterator[tuple[EvidenceGossip, Gossip | None]]:
    evidence = EvidenceGossip(config.identity, config.trust)
    if not config.gossip:
        yield evidence, None
        return
    from ..network.gossip import open_gossip

    most = EVIDENCE_LIMITS.max_message
    async with open_gossip(host, TOPIC, max_bytes=most, accept=evidence.accept, forwards=evidence.forwards) as gossip:
        yield evidence, gossip


@contextlib.asynccontextmanager
async def open_swarm(config: SwarmConfig) -> AsyncIterator[Swarm]:
    """Joins the swarm for the length of the block; leaves it in order, also when cancelled.

    Raises:
        BadInput: an address or the swarm key is malformed.
        MachineError: a port is in use.
        SwarmError: none of `config.peers` answered.
    """
    options = checked(config)
    swarm: Swarm | None = None
    failure: BaseException | None = None

    serve_dht = config.serve_dht and bool(config.listen)
    async with (
        open_host(config.identity, **options) as host,
        _evidence(config, host) as (evidence, gossip),
        open_dht(host, serve=serve_dht) as dht,
        trio.open_nursery() as nursery,
    ):
        swarm = Swarm(config, host, dht, nursery, evidence, gossip)
        try:
            await swarm.join()
            swarm.start()
            yield swarm
        except (trio.Cancelled, GeneratorExit):
            raise
        except BaseException as error:
            failure = error
        finally:
            await swarm.retract()
            nursery.cancel_scope.cancel()
    # Raised only here, since the nurseries that it would pass wrap it in a group each.
    if failure is not None:
        raise failure
