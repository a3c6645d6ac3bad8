"""How a node takes part in a swarm."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from multiaddr import Multiaddr

from ...crypto.identity import Identity
from ...crypto.swarm_key import SwarmKeyError, check_swarm_key
from ..errors import BadInput
from ..network.addresses import is_webrtc, parse_own, parse_peer, transport_of
from ..network.nat.relay import RelayLimits
from ..network.transport.websocket import Certificate
from ..trust.store import TrustStore

DEFAULT_TTL: Final = 45.0  # seconds that an announcement is valid
_BOOTSTRAP_DEADLINE: Final = 10.0  # seconds until somebody must have answered


@dataclass(frozen=True)
class SwarmConfig:
    """How a node takes part.

    `listen` and `announce` are multiaddrs without /p2p. Without `listen` it is a pure client, which nobody can dial and
    which does not serve the table. `peers` are those to join by, with /p2p. `psk` is the 64 hexadecimal digits of a
    private swarm's key. `announcement_ttl` is in seconds. `relay` says where a node that others cannot dial keeps a
    place for them to reach it: "auto" (any public node that offers one), "off", or the multiaddr of the one relay to
    use. `relay_limits` are those of this node where it relays for others. `mdns` finds, and is found by, nodes of the
    same local network; `remembered` is the file with the peers of earlier runs. `max_upload` and `max_download` are
    bytes per second over all connections, None without a limit. `tls` are the files of the certificate and of its key
    for listening at /tls/ws. `trust` is what this node thinks of others; with `gossip` it receives evidence of faults,
    and passes it on.
    """

    identity: Identity
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    psk: str | None = None
    serve_dht: bool = True
    announcement_ttl: float = DEFAULT_TTL
    bootstrap_deadline: float = _BOOTSTRAP_DEADLINE
    relay: str = "auto"
    relay_limits: RelayLimits = field(default_factory=RelayLimits)
    mdns: bool = False
    remembered: pathlib.Path | None = None
    max_upload: int | None = None
    max_download: int | None = None
    tls: tuple[pathlib.Path, pathlib.Path] | None = None
    trust: TrustStore = field(default_factory=TrustStore)
    gossip: bool = False


def _check_webrtc(addr: Multiaddr, config: SwarmConfig) -> None:
    """
    Raises:
        BadInput: this node cannot listen there.
    """
    if config.psk is not None:
        raise BadInput(f"the listen address {addr} is of no use: there is no WebRTC in private swarms")
    if find_spec("aiortc") is None:
        raise BadInput(f"the listen address {addr} needs aiortc: pip install 'petalnode[webrtc]'")
    if "certhash" in str(addr):
        raise BadInput(f"the listen address {addr} ends with /webrtc-direct: the node adds its certificate's hash")


def checked(config: SwarmConfig) -> dict[str, Any]:
    """The part of it that is the host's, parsed.

    Raises:
        BadInput: an address or the swarm key is malformed, or there is no certificate for an address with TLS.
    """
    if config.psk is not None:
        try:
            check_swarm_key(config.psk)
        except SwarmKeyError as error:
            raise BadInput(str(error)) from error
    for peer in config.peers:
        parse_peer(peer)
    if config.relay not in ("auto", "off"):
        parse_peer(config.relay)
    listen = [parse_own(addr, "listen") for addr in config.listen]
    sockets = [str(addr).split("/")[1:5] for addr in listen]
    for addr, socket in zip(listen, sockets, strict=True):
        if socket[3] != "0" and sockets.count(socket) > 1:
            raise BadInput(f"the listen address {addr} has the port of another one: each transport needs its own")
        if is_webrtc(addr):
            _check_webrtc(addr, config)
        if config.tls is None and set(transport_of(addr) or ()) & {"tls", "wss"}:
            raise BadInput(f"the listen address {addr} needs --tls-certificate and --tls-key")
    return {
        "listen": listen,
        "announce": [parse_own(addr, "announce") for addr in config.announce],
        "psk": config.psk,
        "max_upload": config.max_upload,
        "max_download": config.max_download,
        "certificate": config.tls and Certificate(*config.tls),
    }
