"""How fast the bytes of a token pass into this server and out of it: measured with those it will talk to."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

import trio

from ...protocols import wire_pb2 as wire
from ...protocols.framing import PeerError
from ...protocols.ids import TRANSFER
from ...protocols.transfer import SIZE, TransferStream, answer_transfer, measure_transfer
from ..swarm.swarm import Swarm

INTERVAL: Final = 600.0
"""Seconds between two measurements."""
_FIRST: Final = 20.0
_PEERS: Final = 4
_OPEN_TIMEOUT: Final = 5.0
_TIMEOUT: Final = 10.0
_AT_ONCE: Final = 2


def serve_transfers(swarm: Swarm) -> None:
    """Lets other servers measure with this one, a few at once."""
    turns = trio.CapacityLimiter(_AT_ONCE)

    async def handle(stream: TransferStream) -> None:
        async with turns:
            await answer_transfer(stream, timeout=_TIMEOUT)

    swarm.set_handler(TRANSFER, wire.TransferFrame, handle, max_payload=SIZE)


async def network_seconds(swarm: Swarm, peers: Sequence[str], token_bytes: int) -> float | None:
    """Seconds that `token_bytes` take in and out again, with the best of a few of `peers`; None if none answered.

    The best: what is slow with one peer may be that peer's own network.
    """
    found = []
    for peer_id in random.sample(peers, min(len(peers), _PEERS)):
        try:
            async with swarm.open_stream(
                peer_id, TRANSFER, wire.TransferFrame, timeout=_OPEN_TIMEOUT, max_payload=SIZE
            ) as stream:
                found.append(await measure_transfer(stream, timeout=_TIMEOUT))
        except PeerError:
            continue
    return min(found) * token_bytes if found else None


async def keep_measured(swarm: Swarm, model_version: bytes, token_bytes: int, measured: dict[str, float]) -> None:
    """Keeps `measured["network"]` up to date, for as long as it runs."""
    await trio.sleep(_FIRST * random.uniform(0.5, 1.5))
    while True:
        peers = [server.peer_id for server in swarm.view.servers(model_version, now=time.time())]
        seconds = await network_seconds(swarm, [each for each in peers if each != swarm.peer_id], token_bytes)
        if seconds is not None:
            measured["network"] = seconds
        await trio.sleep(INTERVAL * random.uniform(0.8, 1.2))
