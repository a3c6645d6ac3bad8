"""Multiaddrs: read from a person, and found out about this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from ...crypto.identity import peer_id_to_bytes
from ..errors import BadInput

_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_EXAMPLE = "/ip4/203.0.113.7/tcp/31330/p2p/12D3KooW..."


def parse_peer(text: str) -> tuple[str, str]:
    """Splits the address of a peer into its peer id and the address without it.

    Raises:
        BadInput: with the address, what is wrong with it, and what one looks like.
    """
    addr = _parse(text)
    values = _values(addr)
    peer_id = values.get("p2p")
    if peer_id is None:
        raise BadInput(f"the peer address {text!r} lacks the peer's id: it looks like {_EXAMPLE}")
    try:
        peer_id_to_bytes(peer_id)
    except ValueError as error:
        raise BadInput(f"the peer address {text!r} has a peer id that cannot be used: {error}") from error
    bare = without_peer(addr)
    _check_tcp(text, bare)
    return peer_id, str(bare)


def parse_own(text: str, what: str) -> Multiaddr:
    """Reads an address of this node; `what` says which option it came from ("listen", "announce").

    Raises:
        BadInput: with the address, what is wrong with it, and what one looks like.
    """
    addr = _parse(text)
    values = _values(addr)
    addr = without_peer(addr)
    _check_tcp(text, addr)
    if what == "listen" and not {"ip4", "ip6"} & set(values):
        raise BadInput(f"the listen address {text!r} needs an IP address, such as /ip4/0.0.0.0/tcp/31330")
    if what == "announce" and (_is_unspecified(addr) or values.get("tcp") == "0"):
        raise BadInput(f"the announced address {text!r} is none that others could reach")
    return addr


def _parse(text: str) -> Multiaddr:
    try:
        return Multiaddr(text.strip())
    except (MultiaddrError, ValueError) as error:
        raise BadInput(f"{text!r} is no multiaddr ({error}): it looks like {_EXAMPLE}") from error


def _values(addr: Multiaddr) -> dict[str, str]:
    return {protocol.name: value for protocol, value in addr.items()}


def _check_tcp(text: str, addr: Multiaddr) -> None:
    names = [protocol.name for protocol in addr.protocols()]
    if len(names) != 2 or names[0] not in _HOSTS or names[1] != "tcp":
        raise BadInput(f"the address {text!r} cannot be used: only TCP is spoken here, such as {_EXAMPLE}")


def _is_unspecified(addr: Multiaddr) -> bool:
    return any(value in ("0.0.0.0", "::") for value in _values(addr).values())


def without_peer(addr: Multiaddr) -> Multiaddr:
    """The address without its /p2p part."""
    peer_id = _values(addr).get("p2p")
    return addr if peer_id is None else addr.decapsulate(Multiaddr(f"/p2p/{peer_id}"))


def is_dialable(addr: Multiaddr) -> bool:
    """Whether an address that a peer gave can be dialed at all: plain TCP to a real host and port."""
    values = _values(addr)
    names = [protocol.name for protocol in addr.protocols() if protocol.name != "p2p"]
    return (
        len(names) == 2
        and names[0] in _HOSTS
        and names[1] == "tcp"
        and values.get("tcp") != "0"
        and not _is_unspecified(addr)
    )


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
        for host in _interface_addresses(family):
            found.append(Multiaddr(f"/{family}/{host}/tcp/{values['tcp']}"))
    return list(dict.fromkeys(found))


def _interface_addresses(family: str) -> Sequence[str]:
    kind = socket.AF_INET6 if family == "ip6" else socket.AF_INET
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    hosts = [
        ipaddress.ip_address(entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family == kind and "%" not in entry.address
    ]
    others = [str(host) for host in hosts if not host.is_loopback and not host.is_link_local]
    return others or [str(host) for host in hosts if host.is_loopback]
