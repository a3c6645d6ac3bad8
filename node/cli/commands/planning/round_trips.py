"""Round trips from this client to the servers that a plan is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from .....protocols.announcement import Announcement
from .....protocols.framing import PeerError
from ....client.deadlines import DEADLINES
from ....swarm.swarm import Swarm
from ...output import Output

_PINGS_AT_ONCE: Final = 32


async def measured(swarm: Swarm, servers: Sequence[Announcement], output: Output) -> dict[str, float]:
    """Seconds of a round trip by peer id, of the servers that answer."""
    rtts: dict[str, float] = {}
    limiter = trio.CapacityLimiter(_PINGS_AT_ONCE)
    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(_measure, swarm, server.peer_id, rtts, limiter, output)
    return rtts


async def _measure(
    swarm: Swarm, peer_id: str, rtts: dict[str, float], limiter: trio.CapacityLimiter, output: Output
) -> None:
    async with limiter:
        try:
            rtts[peer_id] = await swarm.measure_rtt(peer_id, timeout=DEADLINES.rtt)
        except PeerError as error:
            output.note(f"left out: {error}")
