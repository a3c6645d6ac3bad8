"""How a connection runs: straight to the peer, or through a relay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """The way of one connection.

    `relay` is the peer id of the relay that carries it, None if `direct`; `remote_addr` the multiaddr of the other
    end, without its peer id, as this machine sees it (a relayed peer's: its circuit address), None if unknown;
    `inbound` says that the peer made the connection.
    """

    direct: bool
    relay: str | None
    remote_addr: str | None
    inbound: bool
