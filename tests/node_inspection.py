"""What a test may see of the inside of nodes, streams and what is bounded, and what it may do to them.

Without torch; `inspection` has models, sessions and servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from multiaddr import Multiaddr

from petalnode.node.credits.issuer import CreditsService
from petalnode.node.network.dht import Dht
from petalnode.node.network.gossip import Gossip
from petalnode.node.network.host import Host
from petalnode.node.network.nat.circuits import Circuits
from petalnode.node.network.nat.dial_back import DialBackService
from petalnode.node.network.nat.hole_punching import HolePuncher
from petalnode.node.network.nat.relay import RelayService
from petalnode.node.network.transport.connections import Network
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.yamux import Muxer
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.streams import MessageStreams
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.swarm.view import SwarmView
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import MessageStream, RawStream


def raw_of(stream: MessageStream[Any] | DelimitedStream) -> RawStream:
    """The bytes below a stream of messages, to write what is no message."""
    return stream._stream if isinstance(stream, DelimitedStream) else stream._raw


def dial_at(host: Host, addresses: Callable[[str], Sequence[Multiaddr] | None]) -> None:
    """From now on a peer is dialed where `addresses(peer id)` says; None: where it is known to be."""
    network: Any = host._network
    known = network._addresses

    def chosen(peer_id: Any) -> Sequence[Multiaddr]:
        given = addresses(str(peer_id))
        return tuple(known(peer_id) if given is None else given)

    network._addresses = chosen


def muxer_of(host: Host, peer_id: str) -> Muxer:
    """The connection to a peer, to write frames on it that no stream would."""
    muxer: Any = host.connections(peer_id)[0]._muxer
    return muxer  # type: ignore[no-any-return]


def network_of(host: Host) -> Network:
    """The connections of a host, where raw ones can be handed in without a socket."""
    return host._network


def open_ends(host: Host) -> int:
    """Connections whose end the host waits for."""
    return len(host._network._ends)


def refuse_dials(host: Host) -> None:
    """From now on the host can open no raw connection."""

    async def refused(*_: object) -> Any:
        raise OSError("nobody is dialed here")

    host._network._open_raw = refused  # type: ignore[assignment, method-assign]


def held_back(muxer: Muxer) -> int:
    """Bytes of frames that wait for the next one to go with it."""
    return len(muxer._held)


@contextmanager
def frames_taken(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` for each frame that any connection of this process takes."""
    take = Muxer._take_header

    def noted(muxer: Muxer, *header: int) -> None:
        note()
        take(muxer, *header)

    Muxer._take_header = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Muxer._take_header = take  # type: ignore[method-assign]


def limits_of(host: Host) -> NodeLimits:
    """What peers take of a host."""
    return host._network.limits


def use_swarm_key(host: Host, psk: str | None) -> None:
    """New connections of this host are under this key, None for no key."""
    host._network._key = psk


def relay_at(service: RelayService, host: Host, protocol: str) -> None:
    """The relay service also answers requests for `protocol` that reach another host."""
    host.set_stream_handler(protocol, service._serve)


def hold_punching(wait: Callable[[], Awaitable[None]]) -> None:
    """From now on every hole punch in this process waits for `await wait()` first."""
    upgrade = HolePuncher._upgrade

    async def held_upgrade(self: HolePuncher, peer_id: str) -> None:
        await wait()
        await upgrade(self, peer_id)

    HolePuncher._upgrade = held_upgrade  # type: ignore[method-assign]


class _Everybody(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


def expect_circuits(circuits: Circuits) -> None:
    """From now on every peer may bring others, as a relay that was asked for a reservation."""
    circuits._asked = _Everybody()


def in_progress(service: DialBackService | Circuits | HolePuncher | CreditsService) -> int:
    """Requests of others that a service is at work on."""
    match service:
        case DialBackService():
            return service._budget._running.total
        case Circuits():
            return service._pending.total
        case HolePuncher():
            return service._limit.borrowed_tokens + len(service._starting) + len(service._serving)
        case CreditsService():
            return len(service._places) + service._pending


def logged(part: MessageStreams | Directory) -> set[Any]:
    """What this part of a node has logged and will not log again."""
    return part._answers._logged if isinstance(part, Directory) else part._logged


def pubsub_of(gossip: Gossip) -> Any:
    """libp2p's part of the gossip of a node."""
    return gossip._pubsub


def table_of(swarm: Swarm) -> Dht:
    """The DHT of a node."""
    return swarm._directory._dht


def forget_servers(swarm: Swarm) -> None:
    """The node has heard of no server yet."""
    swarm._directory.view = SwarmView()


def known_evidence(gossip: EvidenceGossip, accused: str) -> tuple[int, int]:
    """How many pieces of evidence a node remembers: of all servers, and of this one."""
    return len(gossip._endorsements), len(gossip._accused[accused])


def kept_evidence(gossip: EvidenceGossip, evidence_id: bytes) -> bytes | None:
    """Evidence that a node hands out to others."""
    return gossip._held.get(evidence_id)


def punished_faults(gossip: EvidenceGossip) -> int:
    """How many faults a node has banned servers for, and remembers."""
    return len(gossip._punished)


def held(holder: object) -> int:
    """How many entries the containers of an object have together, to see that they are bounded."""
    return sum(len(kept) for kept in vars(holder).values() if isinstance(kept, dict | list | set | deque))


def handshakes_of(host: Host) -> int:
    """Accepted connections that are not encrypted yet."""
    return host._network.limits.handshakes.total
