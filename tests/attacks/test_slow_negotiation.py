"""Who opens streams under many keys of one address and never names a protocol holds few of them, and stops nobody."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamReset

from petalnode.node.network.transport.limits import LIMITS, NodeLimits
from petalnode.node.network.transport.muxed_stream import DATA, HEADER, SYN, MuxedStream
from petalnode.node.network.transport.negotiation import question
from petalnode.node.network.transport.yamux import Muxer
from petalnode.protocols.inference import INFERENCE
from tests.attacks.muxed_connections import ATTACKER, HONEST, connections
from tests.memory_muxer import MemoryRaw, OtherEnd, muxer

KEYS, STREAMS = 10, 100
QUESTION = question(INFERENCE.id)


def opened(numbers: range, said: bytes) -> bytes:
    return b"".join(HEADER.pack(0, DATA, SYN, number, len(said)) + said for number in numbers)


class Negotiator:
    """Reads the question of each stream of a connection, and agrees."""

    def __init__(self) -> None:
        self.agreed = 0
        self.reset = 0

    async def serve(self, end: Muxer, nursery: trio.Nursery) -> None:
        with suppress(MuxedConnUnavailable):
            while True:
                nursery.start_soon(self._negotiate, await end.accept_stream())

    async def _negotiate(self, stream: MuxedStream) -> None:
        said = b""
        try:
            while len(said) < len(QUESTION):
                said += await stream.read(len(QUESTION) - len(said))
        except MuxedStreamReset:
            self.reset += 1
        else:
            stream.agree(INFERENCE.id)
            self.agreed += 1


@pytest.mark.virtual_time
async def test_an_address_holds_few_streams_without_a_protocol() -> None:
    limits, hostile, honest, neighbour = NodeLimits(), Negotiator(), Negotiator(), Negotiator()
    async with (
        connections(KEYS, ATTACKER, limits) as attackers,
        muxer(MemoryRaw(origin=HONEST), limits=limits, key=3) as ours,
        muxer(MemoryRaw(origin=ATTACKER), limits=limits, key=4) as beside,
        trio.open_nursery() as nursery,
    ):
        sides: list[tuple[Negotiator, tuple[Muxer, OtherEnd]]] = [(hostile, end) for end in attackers]
        for negotiator, (end, _) in [*sides, (honest, ours), (neighbour, beside)]:
            nursery.start_soon(negotiator.serve, end, nursery)
        for _, other in attackers:
            other.say_bytes(opened(range(1, 1 + 2 * STREAMS, 2), QUESTION[:1]))
        await trio.sleep(1)  # what strangers may ask for is limited; on a clock that jumps
        assert sum(end.open_streams for end, _ in attackers) == LIMITS.negotiating
        assert hostile.reset == KEYS * STREAMS - LIMITS.negotiating
        for _, other in (ours, beside):  # all at once, and at the attacker's own address as well
            other.say_bytes(opened(range(1, 1 + 2 * 2 * LIMITS.negotiating, 2), QUESTION))
        await trio.sleep(1)  # what strangers may ask for is limited; on a clock that jumps
        assert (honest.agreed, honest.reset) == (2 * LIMITS.negotiating, 0)
        assert (neighbour.agreed, neighbour.reset) == (2 * LIMITS.negotiating, 0)
        for end, _ in [*attackers, ours, beside]:
            await end.close()
        await trio.sleep(1)  # what strangers may ask for is limited; on a clock that jumps
        assert not limits.streams and not limits.of_address(ATTACKER).negotiating
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_neighbour_who_takes_round_trip_keeps_its_streams() -> None:
    """As js-libp2p's do, which name a protocol only when they were told that multistream is spoken."""
    limits, hostile, neighbour = NodeLimits(), Negotiator(), Negotiator()
    async with (
        connections(KEYS, ATTACKER, limits) as attackers,
        muxer(MemoryRaw(origin=ATTACKER), limits=limits, key=4) as beside,
        trio.open_nursery() as nursery,
    ):
        sides = [(hostile, end) for end, _ in attackers]
        for negotiator, end in [*sides, (neighbour, beside[0])]:
            nursery.start_soon(negotiator.serve, end, nursery)
        beside[1].say_bytes(opened(range(1, 11, 2), QUESTION[:20]))
        await trio.sleep(0.1)  # a round trip: these are the oldest at this address
        for _, other in attackers:
            other.say_bytes(opened(range(1, 1 + 2 * STREAMS, 2), QUESTION[:1]))
        await trio.sleep(1)  # what strangers may ask for is limited; on a clock that jumps
        assert sum(end.open_streams for end, _ in attackers) == LIMITS.negotiating - 5
        beside[1].say_bytes(
            b"".join(HEADER.pack(0, DATA, 0, number, len(QUESTION) - 20) + QUESTION[20:] for number in range(1, 11, 2))
        )
        await trio.sleep(1)  # what strangers may ask for is limited; on a clock that jumps
        assert (neighbour.agreed, neighbour.reset) == (5, 0)
        nursery.cancel_scope.cancel()
