"""Which addresses of a peer to try, in which order, and how long one that failed is left alone: pure decisions.

Most addresses come from strangers, who may announce what is none of theirs: a service of this machine, its router, a
cloud's metadata service, or anybody whom the whole swarm is to dial. So addresses that no person gave, and that never
answered, are dialed only where the announcing peer can be. There is a limit a minute. These dials are shared by the
source of the announcement, since keys cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from multiaddr import Multiaddr

from ..addresses import IPAddress, circuit_of, ip_of, is_circuit, is_public
from ..shares import ShareCount, backoff, decayed, origin_of_ip

Networks = Sequence[IPv4Network | IPv6Network]


@dataclass(frozen=True)
class DialPolicy:
    """When which address is tried, for how long, and how many that never answered."""

    directly: float = 5.0  # seconds for one address: TCP and about six round trips of handshakes
    by_circuit: float = 10.0  # a relay has to be reached first, and has to reach the peer
    overtaken: float = 0.25  # seconds that an address had before another one won, to count as one that does not work
    next_after: float = 0.15  # seconds until the next address of a peer is tried beside those before it
    circuits_after: float = 0.3  # seconds of a start that direct addresses have
    first_pause: float = 5.0  # seconds after one failure; each further one doubles it
    longest_pause: float = 300.0
    half_life: float = 600.0  # seconds after which half of the failures are forgotten
    max_direct: int = 16  # addresses kept of one peer
    max_circuits: int = 8
    max_resolved: int = 4  # addresses of one name
    minute: float = 60.0
    least_of_source: int = 48
    """A minute, for all peers of one source, as long as there are any. As many at most at addresses that one peer has
    announced, and at one IP address or name, whoever announced it."""
    dials: int = 600  # a minute, in all


DIALING: Final = DialPolicy()


_PRIVATE: Final = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10"))
)
_NAT64: Final = IPv6Network("64:ff9b::/96")  # RFC 6052: the last four bytes are an address of IPv4


@dataclass(frozen=True)
class FailedAddress:
    """An address that has failed: how often (it fades with time), and when for the last time (seconds)."""

    failures: float
    at: float


@dataclass(frozen=True)
class DialAttempt:
    """An address to try `after` seconds, or sooner, once all before it have failed."""

    addr: Multiaddr
    after: float


def failed(known: FailedAddress | None, now: float) -> FailedAddress:
    """What to remember of an address that has just failed."""
    if known is None:
        return FailedAddress(1.0, now)
    return FailedAddress(decayed(known.failures, now - known.at, DIALING.half_life) + 1.0, now)


def pause_ends(known: FailedAddress) -> float:
    """Until when the address is only tried if there is nothing else."""
    return known.at + backoff(known.failures, DIALING.first_pause, DIALING.longest_pause)


@dataclass(frozen=True)
class DialContext:
    """The `networks` that this node is in, and whether it and all peers that it has met are `on_loopback`: in a swarm
    on one machine."""

    networks: Networks
    on_loopback: bool = False


def private_range(ip: IPAddress) -> IPv4Network | IPv6Network | None:
    """The range of private addresses that this one is of: RFC 1918, RFC 6598 or RFC 4193. None for any other."""
    return next((network for network in _PRIVATE if ip in network), None)


def may_dial(ip: IPAddress, here: DialContext) -> bool:
    """Whether a stranger's address is dialed. No loopback is, unless there is nothing else, and nothing link-local,
    multicast, unspecified or reserved. Private addresses are only of networks that this node is in."""
    if isinstance(ip, IPv6Address):
        in_ipv6 = ip_address(ip.packed[-4:]) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or in_ipv6 or ip
    if ip.is_loopback:
        return here.on_loopback
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved or ip.is_link_local or int(ip) >> 24 == 0:
        return False
    return private_range(ip) is None or any(ip in network for network in here.networks)


def is_permitted(addr: Multiaddr, here: DialContext) -> bool:
    """`may_dial` of an address of a peer. A name is judged when it has been resolved, a relay by its own addresses."""
    ip = ip_of(addr)
    return ip is None or is_circuit(addr) or may_dial(ip, here)


class DialBudget:
    """Counts the dials of the last minute at addresses that never answered."""

    def __init__(self) -> None:
        self._lately = ShareCount(DIALING.dials, DIALING.least_of_source, seconds=DIALING.minute)

    def take(self, peer: str, host: str, now: float, source: str = "") -> bool:
        """Whether `host` (an IP address, or a name) may be dialed at `now` (seconds) because `peer` announced it.

        `source` is the address that the announcement came from; all peers without one count as one source.
        """
        of_peer, to_host, of_source = f"peer {peer}", self._name_of(peer, host), f"source {source}"
        if not all(self._lately.has_room(name, DIALING.least_of_source, now=now) for name in (of_peer, to_host)):
            return False
        return self._lately.add(of_peer, to_host, of_source, now=now)

    def give_back(self, peer: str, host: str) -> None:
        """The peer did answer there."""
        self._lately.remove_all(f"peer {peer}", self._name_of(peer, host))

    def _name_of(self, peer: str, host: str) -> str:
        # Of this machine there is only one, and many nodes on it.
        return f"{host} for {peer}" if _is_loopback(host) else f"host {origin_of_ip(host, 128)}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def kept(addrs: Iterable[Multiaddr]) -> tuple[Multiaddr, ...]:
    """What to remember of a peer's addresses, the first being the best known: neither kind crowds out the other."""
    unique = list(dict.fromkeys(addrs))
    direct = [addr for addr in unique if not is_circuit(addr)][: DIALING.max_direct]
    circuits = [addr for addr in unique if is_circuit(addr)][: DIALING.max_circuits]
    return (*direct, *circuits)


def one_per_relay(addrs: Sequence[Multiaddr], failing: Mapping[Multiaddr, FailedAddress]) -> list[Multiaddr]:
    """Without the circuit addresses that lead through a relay already among them. Whoever dials one of them takes all
    ways to that relay. Of each relay, one that has failed stays only if all have."""
    chosen: dict[str, Multiaddr] = {}
    for addr in addrs:
        circuit = circuit_of(addr)
        name = str(addr) if circuit is None else circuit.relay_id
        if name not in chosen or (chosen[name] in failing and addr not in failing):
            chosen[name] = addr
    return list(chosen.values())


def plan(
    addrs: Sequence[Multiaddr], networks: Networks, failing: Mapping[Multiaddr, FailedAddress], now: float
) -> tuple[list[DialAttempt], list[DialAttempt]]:
    """The attempts to make, and those to make only when all of them have failed.

    Direct addresses come one shortly after the other: those of our own `networks` first, then public ones, then those
    of foreign private networks. The last mostly lead nowhere from here. Plain TCP comes before WebSocket. Circuits
    start soon beside them, however many there are. Addresses that failed lately come last.
    """
    paused = [addr for addr in addrs if addr in failing and pause_ends(failing[addr]) > now]
    fresh = [addr for addr in addrs if addr not in paused]
    paused.sort(key=lambda addr: failing[addr].failures)
    fresh.sort(key=lambda addr: (_nearness(addr, networks), len(addr.protocols())))
    first, last = _attempts(fresh), _attempts(paused)
    return (first, last) if first else (last, [])


def _attempts(addrs: Sequence[Multiaddr]) -> list[DialAttempt]:
    direct = [addr for addr in addrs if not is_circuit(addr)]
    circuits = [addr for addr in addrs if is_circuit(addr)]
    start = DIALING.circuits_after if direct else 0.0
    attempts = [DialAttempt(addr, turn * DIALING.next_after) for turn, addr in enumerate(direct)]
    attempts += [DialAttempt(addr, start + turn * DIALING.next_after) for turn, addr in enumerate(circuits)]
    return sorted(attempts, key=lambda attempt: attempt.after)


def _nearness(addr: Multiaddr, networks: Networks) -> int:
    host = ip_of(addr)
    if host is None or is_public(addr):
        return 1
    return 0 if any(host in network for network in networks) else 2
