"""The servers that may come next in a chain: how they are reached, and how far away they are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.announcement import Announcement
from ....protocols.framing import PeerError
from ....protocols.ids import PUSH
from ....protocols.inference import MAX_STEP_BYTES
from ...errors import SwarmError
from ...swarm.swarm import Swarm

if TYPE_CHECKING:
    from ..requests.pushes import PushStream

_REFRESH_TIMEOUT: Final = 5.0
_PUSH_OPEN_TIMEOUT: Final = 5.0
_RTT_TIMEOUT: Final = 3.0
_INTERVAL: Final = 60.0
_MOST: Final = 16


class Neighbours:
    """Reaches the servers to which this one pushes."""

    def __init__(self, swarm: Swarm, model_version: bytes) -> None:
        self._swarm = swarm
        self._model_version = model_version

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        if not self._swarm.is_connected(peer_id) and peer_id not in self._swarm.view.records:
            with suppress(SwarmError):  # the client has heard of a server that we have not
                await self._swarm.refresh(model_version=self._model_version, timeout=_REFRESH_TIMEOUT)
        return await self._swarm.new_stream(
            peer_id, PUSH, wire.PushFrame, timeout=_PUSH_OPEN_TIMEOUT, max_payload=MAX_STEP_BYTES, direct=direct
        )

    def watch_direct(self, peer_id: str) -> trio.Event:
        return self._swarm.watch_direct(peer_id)


async def keep_rtts(swarm: Swarm, own: Announcement, rtts: dict[str, float], on_change: Callable[[], None]) -> None:
    """Keeps `rtts` filled with the round trips to servers that may come next in a chain, for routes that push."""

    async def measure(peer_id: str) -> None:
        try:
            rtts[peer_id] = await swarm.measure_rtt(peer_id, timeout=_RTT_TIMEOUT)
        except PeerError:
            rtts.pop(peer_id, None)

    while True:
        servers = swarm.view.servers(own.model_version, now=time.time())
        following = [
            server.peer_id
            for server in servers
            if server.peer_id != swarm.peer_id and server.span.start <= own.span.end < server.span.end
        ]
        for gone in rtts.keys() - set(following):
            del rtts[gone]
        async with trio.open_nursery() as nursery:
            for peer_id in random.sample(following, min(len(following), _MOST)):
                nursery.start_soon(measure, peer_id)
        on_change()
        await trio.sleep(_INTERVAL * random.uniform(0.8, 1.2))
