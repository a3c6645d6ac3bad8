"""How fast bytes pass into this server and out of it: measured with those it will talk to."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.directory import TRANSFER_BYTES, TransferStream, answer_transfer, measure_transfer
from ....protocols.framing import PeerError
from ....protocols.ids import TRANSFER
from ...swarm.swarm import Swarm

INTERVAL: Final = 600.0
"""Seconds between two measurements."""
_SOON: Final = 20.0
"""Seconds to the next one as long as nobody has answered."""
_PEERS: Final = 4
_OPEN_TIMEOUT: Final = 3.0
_TIMEOUT: Final = 10.0
_AT_ONCE: Final = 2


def serve_transfers(swarm: Swarm) -> None:
    """Lets other servers measure with this one, a few at once."""
    turns = trio.CapacityLimiter(_AT_ONCE)

    async def handle(stream: TransferStream) -> None:
        async with turns:
            await answer_transfer(stream, timeout=_TIMEOUT)

    swarm.set_handler(TRANSFER, wire.TransferFrame, handle, max_payload=TRANSFER_BYTES)


async def measure_network(swarm: Swarm, model_version: bytes, *, timeout: float) -> float:
    """Seconds that a byte takes in and out again, with the best of a few servers of the model; 0 if none answered
    within `timeout` seconds.

    The best: what is slow with one peer may be that peer's own network.
    """
    servers = [server.peer_id for server in swarm.view.servers(model_version, now=time.time())]
    peers = [peer_id for peer_id in servers if peer_id != swarm.peer_id]
    found = []
    with trio.move_on_after(timeout):
        for peer_id in random.sample(peers, min(len(peers), _PEERS)):
            try:
                async with swarm.open_stream(
                    peer_id, TRANSFER, wire.TransferFrame, timeout=_OPEN_TIMEOUT, max_payload=TRANSFER_BYTES
                ) as stream:
                    found.append(await measure_transfer(stream, timeout=_TIMEOUT))
            except PeerError:
                continue
    return min(found, default=0.0)


async def keep_measured(
    swarm: Swarm, model_version: bytes, known: bool, on_measured: Callable[[float], Awaitable[None]]
) -> None:
    """Measures now and then, as long as it runs, and tells `on_measured` the seconds of a byte. `known`: it has just
    been measured."""
    while True:
        await trio.sleep((INTERVAL if known else _SOON) * random.uniform(0.8, 1.2))
        seconds = await measure_network(swarm, model_version, timeout=_PEERS * _TIMEOUT)
        if seconds:
            known = True
            await on_measured(seconds)
