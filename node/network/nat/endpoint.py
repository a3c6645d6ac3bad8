"""An IP address and a TCP port, as the decisions about reachability compare them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

IPAddress = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Endpoint:
    ip: IPAddress
    port: int

    @classmethod
    def parse(cls, multiaddr: str) -> Endpoint | None:
        """Reads /ip4/.../tcp/... or /ip6/.../tcp/..., with or without /p2p behind it; None for any other address."""
        parts = multiaddr.strip("/").split("/")
        if (
            len(parts) not in (4, 6)
            or parts[0] not in ("ip4", "ip6")
            or parts[2] != "tcp"
            or parts[4:5] not in ([], ["p2p"])
        ):
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
