"""The other servers of a model: how far away they are, and how fast bytes pass."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from ....protocols.announcement import Announcement
from ....protocols.directory import DIRECTORY_LIMITS, TRANSFER, TransferStream, answer_transfer, measure_transfer
from ....protocols.framing import PeerError
from ...network.shares import Turns
from ...swarm.swarm import Swarm
from ..tallies import ChangeSignal
from .speed import SpanSpeed


@dataclass(frozen=True)
class RoundTripPolicy:
    """Of which servers a server knows the round trips."""

    rtt_timeout: float = 3.0
    most: int = 16  # Servers whose round trips are known, and
    new_ones: int = 2  # Places among them for others, if there are more: the farthest ones make room


ROUND_TRIPS: Final = RoundTripPolicy()
FIRST_RTT_INTERVAL, RTT_INTERVAL = 4.0, 60.0
"""Seconds between two measurements of round trips; longer each time, as long as there is nobody to measure."""


def to_measure(following: Sequence[str], rtts: dict[str, float]) -> list[str]:
    """The servers of `following` whose round trips are to be known. All if they are few, else the nearest of those that
    were measured (`rtts`, seconds), and some others. Drops those of `rtts` that are not among them."""
    known = sorted((peer for peer in following if peer in rtts), key=rtts.__getitem__)
    others = [peer for peer in following if peer not in rtts]
    known = known[: max(ROUND_TRIPS.most - ROUND_TRIPS.new_ones, ROUND_TRIPS.most - len(others))]
    for peer_id in rtts.keys() - set(known):
        del rtts[peer_id]
    return [*known, *random.sample(others, min(len(others), ROUND_TRIPS.most - len(known)))]


async def _measure_rtt(swarm: Swarm, peer_id: str, rtts: dict[str, float]) -> None:
    try:
        rtts[peer_id] = await swarm.measure_rtt(peer_id, timeout=ROUND_TRIPS.rtt_timeout)
    except PeerError:
        rtts.pop(peer_id, None)


async def keep_rtts(swarm: Swarm, own: Announcement, rtts: dict[str, float], changed: ChangeSignal) -> None:
    """Keeps `rtts` filled with round trips to servers that may come next, for routes that push."""
    pause = FIRST_RTT_INTERVAL / 2
    while True:
        known_before = bool(rtts)
        servers = swarm.view.servers(own.model_version, now=time.time())
        following = [
            server.peer_id
            for server in servers
            if server.peer_id != swarm.peer_id and server.span.start <= own.span.end < server.span.end
        ]
        for gone in rtts.keys() - set(following):
            del rtts[gone]
        async with trio.open_nursery() as nursery:
            for peer_id in to_measure(following, rtts):
                nursery.start_soon(_measure_rtt, swarm, peer_id, rtts)
        if rtts or known_before:
            changed.set()
        pause = RTT_INTERVAL if rtts else min(2 * pause, RTT_INTERVAL)
        await trio.sleep(pause * random.uniform(0.8, 1.2))


@dataclass(frozen=True)
class TransferPolicy:
    """How often the way of bytes is measured, and how servers that measure share it."""

    interval: float = 600.0  # Seconds between two measurements; twice as many each time that nothing has changed, up to
    longest_interval: float = 7200.0
    same: float = 1.25  # Two measurements say the same if one is no more than this factor times the other
    soon: float = 20.0  # Seconds to the next one as long as nobody has answered
    peers: int = 4
    open_timeout: float = 3.0
    timeout: float = 10.0
    at_once: int = 2
    max_streams: int = 128
    contended: float = 2.0
    """Seconds for a round, if others wait: whoever takes longer than that for 256 KiB each way gives its turn up."""


TRANSFERS: Final = TransferPolicy()


def serve_transfers(swarm: Swarm) -> None:
    """Lets other servers measure with this one, a few at once: more would measure each other."""
    answer = partial(answer_transfers, Turns(TRANSFERS.at_once, TRANSFERS.contended))
    swarm.set_handler(TRANSFER, answer, max_streams=TRANSFERS.max_streams)


async def answer_transfers(turns: Turns, stream: TransferStream) -> None:
    """Answers one stream. Takes a turn for each answer, and not before the peer has asked."""
    for _ in range(DIRECTORY_LIMITS.transfer_rounds):
        await stream.wait_begun(timeout=TRANSFERS.timeout)
        async with turns.turn(stream.peer_id):
            await answer_transfer(stream, timeout=TRANSFERS.timeout)


async def measure_network(swarm: Swarm, model_version: bytes, *, timeout: float) -> float:
    """Seconds that a byte takes in and out again, with the best of a few servers of the model; 0 if none answered
    within `timeout` seconds.

    The best: what is slow with one peer may be that peer's own network.
    """
    servers = [server.peer_id for server in swarm.view.servers(model_version, now=time.time())]
    peers = [peer_id for peer_id in servers if peer_id != swarm.peer_id]
    found = []
    with trio.move_on_after(timeout):
        for peer_id in random.sample(peers, min(len(peers), TRANSFERS.peers)):
            try:
                async with swarm.open_stream(peer_id, TRANSFER, timeout=TRANSFERS.open_timeout) as stream:
                    found.append(await measure_transfer(stream, timeout=TRANSFERS.timeout))
            except PeerError:
                continue
    return min(found, default=0.0)


async def keep_measured(swarm: Swarm, model_version: bytes, known: bool, speed: SpanSpeed) -> None:
    """Measures now and then, as long as it runs, how fast bytes pass. `known`: it has just been measured."""
    pause, before = (TRANSFERS.interval if known else TRANSFERS.soon), 0.0
    while True:
        await trio.sleep(pause * random.uniform(0.8, 1.2))
        seconds = await measure_network(swarm, model_version, timeout=TRANSFERS.peers * TRANSFERS.timeout)
        if seconds:
            same = before / TRANSFERS.same < seconds < before * TRANSFERS.same
            pause, before = (min(2 * pause, TRANSFERS.longest_interval) if same else TRANSFERS.interval), seconds
            await speed.network_measured(seconds)
