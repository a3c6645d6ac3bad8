"""What a relay gives to others: frozen numbers, set by the operator's options, and the decisions by them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr

from ....protocols import standard_pb2 as pb
from ....protocols.circuit import Status
from ..addresses import ip_of

HOUR: Final = 3600
MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class RelayLimits:
    """The limits of a relay.

    Nobody can take everything: one peer has one reservation and at most `circuits_per_peer` circuits of its own; peers
    of one address (an IPv4 address, or a /56 of IPv6) have so many reservations and circuits together; and where
    circuits have to wait for each other, each peer that dialed some has its turn.
    """

    reservations: int = 256  # peers with a reservation at a time
    reservations_per_address: int = 64
    reservation_seconds: int = HOUR
    circuits: int = 256  # at a time, of all peers together
    circuits_per_peer: int = 16  # at a time, that one peer has dialed
    circuits_to_peer: int = 64  # at a time, that lead to one peer
    circuits_per_address: int = 128
    circuit_seconds: int = 24 * HOUR
    circuit_bytes: int = 1 << 40  # each way
    circuit_bytes_per_second: int | None = 64 * MIB  # both ways together; None: no limit
    bytes_per_second: int | None = 128 * MIB  # of all circuits; None: no limit


@dataclass(frozen=True)
class RelayLoad:
    """What a relay carries when somebody asks: in all, and of the peer and the address that ask or are asked for."""

    reservations: int = 0
    reservations_of_address: int = 0
    circuits: int = 0
    circuits_of_address: int = 0
    circuits_of_peer: int = 0
    circuits_to_peer: int = 0


def admit_reservation(load: RelayLoad, limits: RelayLimits, *, renews: bool) -> Status:
    """Whether a peer gets a reservation; who has one keeps it."""
    full = load.reservations >= limits.reservations
    if not renews and (full or load.reservations_of_address >= limits.reservations_per_address):
        return pb.RESERVATION_REFUSED
    return pb.OK


def admit_circuit(load: RelayLoad, limits: RelayLimits) -> Status:
    """Whether a peer gets one more circuit, to a peer that has a reservation."""
    full = (
        load.circuits >= limits.circuits
        or load.circuits_of_peer >= limits.circuits_per_peer
        or load.circuits_to_peer >= limits.circuits_to_peer
        or load.circuits_of_address >= limits.circuits_per_address
    )
    return pb.RESOURCE_LIMIT_EXCEEDED if full else pb.OK


def origin_of(addr: str) -> str:
    """What counts as one address: the IPv4 address of a multiaddr, or the /56 of an IPv6 one, a household's."""
    host = ip_of(Multiaddr(addr))
    if host is None or host.version == 4:
        return str(host)
    return str(ipaddress.ip_network((host, 56), strict=False))
