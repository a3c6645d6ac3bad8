"""Multiaddrs: read from a person, and found out about this machine."""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Final

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from ...crypto.identity import peer_id_to_bytes
from ...protocols.nat_traversal import readable_addrs
from ..errors import BadInput, MachineError

_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_HOSTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
MAX_TEXT: Final = 512
"""Characters of a multiaddr: the longest that are used, circuits with two peer ids and a name, have 380."""
MAX_ADDRS: Final = 8
"""Of a peer in the table of Kademlia, and in a record that leads to it."""
TRANSPORTS: Final = ((), ("ws",), ("tls", "ws"), ("tls", "sni", "ws"), ("wss",))
"""What follows the port: nothing for plain TCP, else WebSocket, all but the first under TLS."""
_WEBRTC: Final = ("udp", "webrtc-direct", "certhash")
_EXAMPLE: Final = "/ip4/203.0.113.7/tcp/31330/p2p/12D3KooW..."
_EXAMPLES: Final = {"listen": "/ip4/0.0.0.0/tcp/31330", "announce": "/ip4/203.0.113.7/tcp/31330"}
"""Addresses of this node, by the option: they have no peer id."""


@dataclass(frozen=True)
class CircuitAddress:
    """What a circuit address says of its relay: the peer id, and where it is (a multiaddr without /p2p)."""

    relay_id: str
    relay_addr: Multiaddr


def parse_peer(text: str) -> tuple[str, str]:
    """Splits a peer's address, direct or through a relay, into its peer id and the address without it.

    Raises:
        BadInput: with the address, what is wrong with it, and what one looks like.
    """
    addr = _parse(text)
    peer_id = _last_peer(addr)
    if peer_id is None:
        raise BadInput(f"the peer address {text!r} lacks the peer's id: it looks like {_EXAMPLE}")
    bare = without_peer(addr)
    circuit = circuit_of(bare)
    for text_id in (peer_id, circuit.relay_id if circuit else peer_id):
        try:
            peer_id_to_bytes(text_id)
        except ValueError as error:
            raise BadInput(f"the peer address {text!r} has a peer id that cannot be used: {error}") from error
    _check_transport(text, circuit.relay_addr if circuit else bare)
    return peer_id, str(bare)


def parse_own(text: str, what: str) -> Multiaddr:
    """Reads an address of this node; `what` says which option it came from ("listen", "announce").

    Raises:
        BadInput: with the address, what is wrong with it, and what one looks like.
    """
    example = _EXAMPLES[what]
    addr = _parse(text, example)
    values = _values(addr)
    addr = without_peer(addr)
    if not is_webrtc(addr):
        _check_transport(text, addr, example)
    if what == "listen" and (not {"ip4", "ip6"} & set(values) or "sni" in values):
        raise BadInput(f"the listen address {text!r} needs an IP address, and no name, such as {example}")
    if what == "announce" and (_is_unspecified(addr) or "0" in (values.get("tcp"), values.get("udp"))):
        raise BadInput(f"the announced address {text!r} is none that others could reach")
    return addr


def _parse(text: str, example: str = _EXAMPLE) -> Multiaddr:
    try:
        return read_multiaddr(text.strip())
    except ValueError:
        fault = _fault(text.strip())
        raise BadInput(f"{text[:MAX_TEXT]!r} is no multiaddr: {fault}; it looks like {example}") from None


def _fault(text: str) -> str:
    """What is wrong with a multiaddr, in words; the library's own errors repeat the whole of it."""
    first, *parts = text.split("/")
    if len(text) > MAX_TEXT:
        return f"it is too long, with more than {MAX_TEXT} characters"
    if first or not parts:
        return "it does not begin with a slash"
    while parts:
        name = parts.pop(0)
        if name in ("p2p-circuit", "ws", "wss", "tls", "webrtc-direct"):
            continue
        if name not in (*_HOSTS, "tcp", "p2p", "sni", "udp", "certhash"):
            return (
                f"{name!r} is none of its parts, which are {', '.join(_HOSTS)}, tcp, tls, ws, wss, p2p and p2p-circuit"
            )
        if not parts or not parts[0]:
            return f"nothing stands behind {name}"
        value = parts.pop(0)
        try:
            _READERS.get(name, str)(value)
        except ValueError:
            kind = {"ip4": "IPv4 address", "ip6": "IPv6 address", "tcp": "port", "udp": "port"}.get(name, "peer id")
            return f"{value!r} is no {kind}"
    return "it cannot be read"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(text)
    return int(text)


_READERS: Final[dict[str, Callable[[str], object]]] = {
    "ip4": IPv4Address,
    "ip6": IPv6Address,
    "tcp": _port,
    "udp": _port,
    "p2p": peer_id_to_bytes,
}


def read_multiaddr(text: str) -> Multiaddr:
    """A multiaddr all of whose parts can be read.

    Raises:
        ValueError: it is none, or longer than any that is used here.
    """
    if len(text) > MAX_TEXT:  # base58 takes quadratic time
        raise ValueError("too long")
    try:
        addr = Multiaddr(text)
        list(addr.items())  # the library writes some texts as bytes that it cannot read
    except Exception as error:  # of many kinds
        raise ValueError(str(error)) from error
    return addr


def _values(addr: Multiaddr) -> dict[str, str]:
    return {protocol.name: value for protocol, value in addr.items()}


def _check_transport(text: str, addr: Multiaddr, example: str = _EXAMPLE) -> None:
    if transport_of(addr) is None:
        raise BadInput(
            f"the address {text!r} cannot be used: only TCP and WebSocket are spoken here, such as {example} or with "
            "/ws behind the port"
        )


def transport_of(addr: Multiaddr) -> tuple[str, ...] | None:
    """Which of `TRANSPORTS` a direct address without /p2p has; None for all other addresses."""
    names = tuple(protocol.name for protocol in addr.protocols())
    known = names[:1] and names[0] in _HOSTS and names[1:2] == ("tcp",) and names[2:] in TRANSPORTS
    return names[2:] if known else None


def is_webrtc(addr: Multiaddr) -> bool:
    """Whether browsers reach it by WebRTC-direct: an IP address, with or without a certificate's hash and /p2p."""
    names = tuple(protocol.name for protocol in without_peer(addr).protocols())
    return names[:1] in (("ip4",), ("ip6",)) and names[1:] in (_WEBRTC[:2], _WEBRTC)


def is_for_browsers(addr: Multiaddr) -> bool:
    """Whether a page can dial it, as far as its form tells."""
    return not {protocol.name for protocol in addr.protocols()}.isdisjoint(("ws", "wss", "webrtc-direct"))


def _is_unspecified(addr: Multiaddr) -> bool:
    return any(value in ("0.0.0.0", "::") for value in _values(addr).values())


def _last_peer(addr: Multiaddr) -> str | None:
    parts = list(addr.items())
    return parts[-1][1] if parts and parts[-1][0].name == "p2p" else None


def without_peer(addr: Multiaddr) -> Multiaddr:
    """The address without the peer id at its end. A circuit address keeps its relay's."""
    peer_id = _last_peer(addr)
    return addr if peer_id is None else addr.decapsulate(Multiaddr(f"/p2p/{peer_id}"))


def _is_peer_id(text: str) -> bool:
    try:
        peer_id_to_bytes(text)
    except ValueError:
        return False
    return True


def is_circuit(addr: Multiaddr) -> bool:
    """Whether the address leads through a relay."""
    return any(protocol.name == "p2p-circuit" for protocol in addr.protocols())


def circuit_of(addr: Multiaddr) -> CircuitAddress | None:
    """The relay of an address <relay's address>/p2p/<relay>/p2p-circuit[/p2p/<peer>]; None if it is no such address."""
    names = [protocol.name for protocol in addr.protocols()]
    if names[-1:] == ["p2p"]:
        names.pop()
    if len(names) < 4 or names[-2:] != ["p2p", "p2p-circuit"] or "p2p" in names[:-2]:
        return None
    relay_addr, _, rest = str(addr).partition("/p2p/")
    return CircuitAddress(rest.partition("/")[0], Multiaddr(relay_addr))


def circuit_address(relay_addr: Multiaddr, relay_id: str) -> Multiaddr:
    """Under which a peer with a reservation at this relay is reached; its own /p2p is still missing."""
    return Multiaddr(f"{without_peer(relay_addr)}/p2p/{relay_id}/p2p-circuit")


def is_dialable(addr: Multiaddr) -> bool:
    """Whether an address that a peer gave can be dialed at all: TCP to a real host and port, or a relay's."""
    bare = without_peer(addr)
    if is_circuit(bare):
        circuit = circuit_of(bare)
        return circuit is not None and _is_peer_id(circuit.relay_id) and is_dialable(circuit.relay_addr)
    return transport_of(bare) is not None and _values(bare).get("tcp") != "0" and not _is_unspecified(bare)


@functools.lru_cache(maxsize=4096)
def dialable(text: str) -> Multiaddr | None:
    """An address that a peer gave, without the peer id at its end. None if it is of no use."""
    try:
        addr = read_multiaddr(text)
        return without_peer(addr) if is_dialable(addr) else None
    except (MultiaddrError, ValueError):
        return None


def dialable_among(addrs: Iterable[bytes]) -> list[Multiaddr]:
    """Those of a stranger's bytes that are addresses of use, as `dialable` has it."""
    return [addr for text in readable_addrs(addrs) if (addr := dialable(text)) is not None]


def port_of(addr: Multiaddr) -> tuple[socket.AddressFamily, int]:
    """The family and the port of an IP address."""
    values = _values(addr)
    return socket.AF_INET6 if "ip6" in values else socket.AF_INET, int(values.get("udp") or values["tcp"])


def ip_of(addr: Multiaddr) -> IPv4Address | IPv6Address | None:
    """The IP address that is dialed, of the relay if it is a circuit address; None for a name."""
    (protocol, value), *_ = addr.items()
    return ipaddress.ip_address(value) if protocol.name in ("ip4", "ip6") else None


def host_of(addr: Multiaddr) -> str:
    """The IP address or the name at the beginning."""
    (_, value), *_ = addr.items()
    return str(value)


def is_loopback(addr: Multiaddr) -> bool:
    """Whether the address is of this machine only."""
    host = ip_of(addr)
    return host is not None and host.is_loopback


def is_public(addr: Multiaddr) -> bool:
    """Whether the address is one of the internet's, neither private nor of this machine only; names count as such."""
    host = ip_of(addr)
    return host is None or (host.is_global and not host.is_multicast)


def own_networks() -> list[IPv4Network | IPv6Network]:
    """The networks that this machine has an interface in, loopback included."""
    return [
        ipaddress.ip_network(f"{entry.address}/{_prefix_length(entry.netmask)}", strict=False)
        for entry in _interface_entries()
        if entry.netmask
    ]


def _prefix_length(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()


def concrete(listening: Iterable[Multiaddr]) -> list[Multiaddr]:
    """The addresses under which others can reach what listens: never 0.0.0.0, one per interface instead.

    Loopback is among them only if it was asked for, or if there is nothing else.
    """
    found: list[Multiaddr] = []
    for addr in listening:
        values = _values(addr)
        family = "ip6" if "ip6" in values else "ip4"
        if not _is_unspecified(addr):
            found.append(addr)
            continue
        rest = str(addr).split("/", 3)[3]
        for host in interface_addresses(family):
            found.append(Multiaddr(f"/{family}/{host}/{rest}"))
    return list(dict.fromkeys(found))


def interface_addresses(family: str) -> Sequence[str]:
    """The addresses of this machine that others may dial, of "ip4" or "ip6"; those of loopback if there is no other."""
    kind = socket.AF_INET6 if family == "ip6" else socket.AF_INET
    hosts = [ipaddress.ip_address(entry.address) for entry in _interface_entries() if entry.family == kind]
    others = [str(host) for host in hosts if not host.is_loopback and not host.is_link_local]
    # Two machines on one cable have nothing but link-local addresses.
    own = others or [str(host) for host in hosts if host.is_link_local and host.version == 4]
    return own or [str(host) for host in hosts if host.is_loopback]


def _interface_entries() -> Iterator[Any]:
    """psutil's entries of all IP addresses of the interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, entries in psutil.net_if_addrs().items():
        if name in up:
            yield from (entry for entry in entries if entry.family in _FAMILIES and "%" not in entry.address)


IPAddress = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Endpoint:
    """An IP address and a TCP port, as decisions about reachability compare them."""

    ip: IPAddress
    port: int

    @classmethod
    def parse(cls, multiaddr: str) -> Endpoint | None:
        """Reads /ip4/.../tcp/... or /ip6/.../tcp/..., with or without /p2p behind it; None for any other address."""
        parts = multiaddr.strip("/").split("/")
        return cls.of_socket(multiaddr) if len(parts) in (4, 6) and parts[4:5] in ([], ["p2p"]) else None

    @classmethod
    def of_socket(cls, multiaddr: str) -> Endpoint | None:
        """The same, whatever is spoken there: other transports may follow the port."""
        parts = multiaddr.strip("/").split("/")
        if len(parts) < 4 or parts[0] not in ("ip4", "ip6") or parts[2] != "tcp":
            return None
        try:
            return cls(plain_ip(parts[1]), int(parts[3]))
        except ValueError:
            return None

    @property
    def multiaddr(self) -> str:
        """Without /p2p."""
        return f"/ip{self.ip.version}/{self.ip}/tcp/{self.port}"

    @property
    def can_be_dialed(self) -> bool:
        """Whether this is one machine's address and a port at all."""
        return 0 < self.port < 65536 and not (self.ip.is_unspecified or self.ip.is_multicast or self.ip.is_link_local)

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


def plain_ip(text: str) -> IPAddress:
    """Reads an IP address; one of IPv4 written as one of IPv6 becomes what it is.

    Raises:
        ValueError: it is none.
    """
    ip = ipaddress.ip_address(text)
    return (ip.version == 6 and ip.ipv4_mapped) or ip


def check_free(addr: Multiaddr) -> None:
    """libp2p listens with SO_REUSEPORT: a second node on a port would silently get half of the connections.

    Raises:
        MachineError: the port is in use, or the address is none of this machine.
    """
    family, port = port_of(addr)
    with socket.socket(family, socket.SOCK_DGRAM if is_webrtc(addr) else socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host_of(addr), port))
        except OSError as error:
            advice = {
                errno.EADDRINUSE: "stop the node that uses the port, or choose another one (0 takes a free one)",
                errno.EADDRNOTAVAIL: "this machine has no such address; /ip4/0.0.0.0/... takes all it has",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "choose another address")
            raise MachineError(f"cannot listen on {addr}: {error.strerror}; {advice}") from error
