"""The tasks of many streams that are lost at once end in portions: nobody else of the loop waits for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.lowlevel
from libp2p.stream_muxer.exceptions import MuxedStreamReset

from petalnode.node.network.transport.limits import WORK, NodeLimits
from petalnode.node.network.transport.muxed_stream import WOKEN_AT_ONCE, MuxedStream
from petalnode.node.network.transport.yamux import Muxer
from petalnode.protocols.inference import INFERENCE
from tests.memory_muxer import MemoryRaw, OtherEnd, muxer, settled

pytestmark = pytest.mark.virtual_time

STREAMS = 300
ATTACKER, HONEST = "203.0.113.7", "198.51.100.1"


class EndsPerPass(trio.abc.Instrument):
    """Counts the readers that are told of the end of their stream in one pass of the loop."""

    def __init__(self) -> None:
        self.most = self.now = self.total = 0
        self.order: list[str] = []

    def note(self, name: str) -> None:
        self.now += 1
        self.total += 1
        self.order.append(name)

    def before_io_wait(self, timeout: float) -> None:
        self.most, self.now = max(self.most, self.now), 0


async def _read(stream: MuxedStream, name: str, ends: EndsPerPass) -> None:
    try:
        await stream.read()
    except MuxedStreamReset:
        ends.note(name)


@asynccontextmanager
async def read_streams(
    ends: EndsPerPass, nursery: trio.Nursery, limits: NodeLimits, *, keys: int, streams: int, origin: str = ATTACKER
) -> AsyncIterator[list[tuple[Muxer, OtherEnd]]]:
    """Connections of some keys at this address, with some streams each that somebody reads."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(muxer(MemoryRaw(origin=origin), limits=limits, key=10 + number))
            for number in range(keys)
        ]
        for ours, other in made:
            for number in range(streams):
                other.open(2 * number + 1)
            for _ in range(streams):
                stream = await ours.accept_stream()
                stream.agree(INFERENCE.id)  # of those that name no protocol an address has few
                nursery.start_soon(_read, stream, origin, ends)
        await settled()
        yield made


async def test_streams_of_lost_connection_end_in_portions() -> None:
    """Hundreds of tasks ended in one pass of the loop, in which nobody else had a turn."""
    ends = EndsPerPass()
    trio.lowlevel.add_instrument(ends)
    async with (
        trio.open_nursery() as nursery,
        read_streams(ends, nursery, NodeLimits(), keys=1, streams=STREAMS) as [(ours, _)],
    ):
        await ours.close()
        assert ours.open_streams == 0
        await trio.sleep(1)
    assert ends.total == STREAMS and ends.most <= WOKEN_AT_ONCE


async def test_connections_lost_at_once_have_ones_portions() -> None:
    ends = EndsPerPass()
    trio.lowlevel.add_instrument(ends)
    limits = NodeLimits()
    async with (
        trio.open_nursery() as nursery,
        read_streams(ends, nursery, limits, keys=20, streams=STREAMS // 20) as made,
    ):
        for _, other in made:
            other.raw.say.close()
        await trio.sleep(5)
    assert ends.total == STREAMS and ends.most <= WOKEN_AT_ONCE


async def test_quiet_address_does_not_wait_for_loud_ones() -> None:
    ends = EndsPerPass()
    trio.lowlevel.add_instrument(ends)
    limits = NodeLimits()
    async with (
        trio.open_nursery() as nursery,
        read_streams(ends, nursery, limits, keys=1, streams=STREAMS) as [(loud, _)],
        read_streams(ends, nursery, limits, keys=1, streams=1, origin=HONEST) as [(quiet, _)],
    ):
        await trio.sleep(1)  # what opening them took is forgotten
        limits.worked(limits.of_address(ATTACKER), 1.9 * WORK.per_second * WORK.burst)
        await loud.close()
        await quiet.close()
        await trio.sleep(0.01)
        assert ends.order == [HONEST]
        await trio.sleep(3)
        assert ends.total == STREAMS + 1


async def test_own_streams_are_told_at_once() -> None:
    ends = EndsPerPass()
    limits = NodeLimits()
    async with (
        trio.open_nursery() as nursery,
        read_streams(ends, nursery, limits, keys=1, streams=STREAMS) as [(ours, _)],
    ):
        nursery.start_soon(_read, await ours.open_stream(), "own", ends)
        await settled()
        limits.worked(limits.of_address(ATTACKER), WORK.per_second * (1 + WORK.burst))
        await ours.close()
        await trio.sleep(0.1)
        assert ends.order == ["own"]
    assert ends.total == STREAMS + 1
