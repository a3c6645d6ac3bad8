"""Who relays in a swarm, as far as a client can see: asked of them, and else as their announcements say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio

from ...protocols.framing import PeerError
from ..swarm.swarm import Swarm

_MAX_ASKED = 32
_ANSWER = 2.5  # seconds


@dataclass(frozen=True)
class Relay:
    """A node that relays: places that peers hold and that are free, circuits and bytes of them so far, None where it
    did not answer."""

    peer_id: str
    role: str
    reservations: int
    free: int
    circuits: int | None = None
    relayed_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        load = f"{self.reservations} of {self.reservations + self.free} places taken"
        if self.circuits is not None and self.relayed_bytes is not None:
            load += f", {self.circuits} connections now, {self.relayed_bytes / 1e6:.1f} MB so far"
        return f"…{self.peer_id[-8:]} ({self.role}): {load}"


async def known_relays(swarm: Swarm) -> list[Relay]:
    """The relays among the servers that are known and the peers that are connected."""
    announced = {
        each.peer_id: Relay(each.peer_id, "server", each.relay.reservations, each.relay.free)
        for each in swarm.view.servers(now=time.time())
        if each.relay is not None
    }
    asked = list(dict.fromkeys([*swarm.connected(), *announced]))[:_MAX_ASKED]
    found = dict(announced)

    async def ask(peer_id: str) -> None:
        try:
            info = await swarm.ask_node(peer_id, timeout=_ANSWER)
        except PeerError:
            return
        found.pop(peer_id, None)
        if info.relay is not None:
            offer = info.relay
            found[peer_id] = Relay(
                peer_id, info.role, offer.reservations, offer.free, info.circuits, info.relayed_bytes
            )

    async with trio.open_nursery() as nursery:
        for peer_id in asked:
            nursery.start_soon(ask, peer_id)
    return sorted(found.values(), key=lambda each: (each.role, each.peer_id))


def relay_lines(relays: Sequence[Relay]) -> list[str]:
    """For a person."""
    if not relays:
        return ["relays: none known, so nodes behind NAT cannot be reached from outside their network"]
    return [f"relay {relay}" for relay in relays]
