"""Into how many steps a prompt is cut: what is chosen is compared with a chain in virtual time."""

from __future__ import annotations

import math

import pytest
import trio

from petalnode.node.swarm.cost import CHUNK_TOKENS, COST, StageCost, chunk_tokens, prefill_seconds

TOKENS, TOKEN_BYTES = 2048, 4 * 576
MEGABYTE = 1 << 20
CHAINS = {
    "near": [StageCost(0.01, 0.001, 0.001, None, k > 0, 16 * MEGABYTE, 8) for k in range(3)],
    "far": [StageCost(0.01, 0.001, 0.05, None, k > 0, 16 * MEGABYTE, 8) for k in range(3)],
    "one slow": [StageCost(0.01, 0.002 if k == 1 else 0.0004, 0.1, None, k > 0, 16 * MEGABYTE, 8) for k in range(4)],
    "quick and very far": [StageCost(0.002, 0.00005, 0.2, None, k > 0, 16 * MEGABYTE, 8) for k in range(3)],
    "a poor line": [StageCost(0.01, 0.0005, 0.05, 1e-6, k > 0, 16 * MEGABYTE, 8) for k in range(3)],
    "little memory": [StageCost(0.01, 0.0005, 0.05, None, k > 0, MEGABYTE // 2, 8) for k in range(3)],
    "no pushes": [StageCost(0.01, 0.0005, 0.05, None, False, 16 * MEGABYTE, 8) for _ in range(3)],
    "older servers": [StageCost(0.01, 0.0005, 0.05, None, False, 0, 8) for _ in range(3)],
    "a step costs most": [StageCost(0.2, 0.0001, 0.02, None, k > 0, 16 * MEGABYTE, 8) for k in range(2)],
    "alone": [StageCost(0.01, 0.001, 0.05, None, False, 16 * MEGABYTE, 8)],
}


Letter = tuple[float, float, trio.MemorySendChannel[int], int]
"""Seconds on a line, and on the way behind it; where to; which step."""


class Chain:
    """Servers that compute one step at a time, and a client that keeps within what each grants."""

    def __init__(self, stages: list[StageCost], size: int, nursery: trio.Nursery) -> None:
        self.stages, self.steps, self.nursery = stages, TOKENS // size, nursery
        self.nbytes = size * TOKEN_BYTES
        self.works = [stage.step + stage.token * size + COST.chunk_seconds for stage in stages]
        self.answered = [0] * len(stages)
        self.changed = trio.Event()
        channels = [trio.open_memory_channel[int](self.steps) for _ in stages]
        self.into, self.at = zip(*channels, strict=True)
        self.here = [trio.open_memory_channel[int](self.steps) for _ in stages]  # answers, at the client

    def line(self, stage: int) -> float:
        return self.nbytes * (self.stages[stage].per_byte or 0.0)

    async def later(self, seconds: float, channel: trio.MemorySendChannel[int], step: int) -> None:
        await trio.sleep(seconds)
        channel.send_nowait(step)

    async def server(self, index: int) -> None:
        trips = [stage.round_trip for stage in self.stages]
        lines: list[trio.MemorySendChannel[Letter]] = []

        async def carry(
            queue: trio.MemoryReceiveChannel[Letter],
        ) -> None:
            async for busy, way, channel, step in queue:
                await trio.sleep(busy)
                self.nursery.start_soon(self.later, way, channel, step)

        for _ in range(2):  # to the next server, and to the client
            send, receive = trio.open_memory_channel[Letter](self.steps)
            self.nursery.start_soon(carry, receive)
            lines.append(send)
        async for step in self.at[index]:
            await trio.sleep(self.works[index])
            following = index + 1
            if following < len(self.stages) and self.stages[following].pushed:
                busy = max(self.line(index), self.line(following))
                lines[0].send_nowait((busy, max(trips[index : following + 1]) / 2, self.into[following], step))
            lines[1].send_nowait((self.line(index), trips[index] / 2, self.here[index][0], step))

    async def collect(self, index: int) -> None:
        """Notes answers; what a server behind is not pushed, it is sent here."""
        following = index + 1
        relays = following < len(self.stages) and not self.stages[following].pushed
        send, receive = trio.open_memory_channel[int](self.steps)
        if relays:
            self.nursery.start_soon(self.send, following, receive)
        async for step in self.here[index][1]:
            self.answered[index] += 1
            self.changed.set()
            self.changed = trio.Event()
            if relays:
                send.send_nowait(step)
            if self.answered[-1] == self.steps:
                self.nursery.cancel_scope.cancel()

    async def send(self, index: int, source: trio.MemoryReceiveChannel[int]) -> None:
        last = index
        while last + 1 < len(self.stages) and self.stages[last + 1].pushed:
            last += 1
        segment = range(index, last + 1)
        rooms = [max(1, min(self.stages[k].credits, self.stages[k].in_flight // self.nbytes)) for k in segment]
        async for step in source:
            while any(step - self.answered[k] >= room for k, room in zip(segment, rooms, strict=True)):
                await self.changed.wait()
            await trio.sleep(self.line(index))
            self.nursery.start_soon(self.later, self.stages[index].round_trip / 2, self.into[index], step)


async def simulated(stages: list[StageCost], size: int) -> float:
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        chain = Chain(stages, size, nursery)
        send, receive = trio.open_memory_channel[int](chain.steps)
        for step in range(chain.steps):
            send.send_nowait(step)
        nursery.start_soon(chain.send, 0, receive)
        for index in range(len(stages)):
            nursery.start_soon(chain.server, index)
            nursery.start_soon(chain.collect, index)
    return trio.current_time() - begun


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", CHAINS)
async def test_the_chosen_size_is_about_the_quickest(kind: str) -> None:
    chain = CHAINS[kind]
    found = {size: await simulated(chain, size) for size in CHUNK_TOKENS}
    for size, seconds in found.items():
        assert prefill_seconds(TOKENS, size, TOKEN_BYTES, chain) == pytest.approx(seconds, rel=0.12)
    assert found[chunk_tokens(TOKENS, TOKEN_BYTES, chain)] <= 1.05 * min(found.values())


@pytest.mark.virtual_time
async def test_far_pushing_servers_nearly_reach_one_trip() -> None:
    """And take about half of what they took, one step of 256 tokens at a time, where computing is not most of it."""
    for step, token, of_before in ((0.005, 0.001, 0.85), (0.002, 0.0001, 0.52)):
        chain = [StageCost(step, token, 0.05, None, k > 0, 16 * MEGABYTE, 8) for k in range(3)]
        older = [StageCost(stage.step, stage.token, stage.round_trip, None) for stage in chain]
        size = chunk_tokens(TOKENS, TOKEN_BYTES, chain)
        seconds, computing = await simulated(chain, size), token * TOKENS + step * TOKENS / size
        assert seconds <= 1.3 * (computing + 4 * 0.05 / 2)
        assert seconds <= of_before * await simulated(older, 256)


def test_whatever_servers_announce_a_size_is_chosen() -> None:
    for value in (0.0, -1.0, math.nan, math.inf, 1e300):
        chain = [StageCost(value, value, value, value, index > 0, 0, 0) for index in range(3)]
        assert chunk_tokens(TOKENS, TOKEN_BYTES, chain) in CHUNK_TOKENS
        assert prefill_seconds(TOKENS, 32, TOKEN_BYTES, chain) <= TOKENS * 20 * COST.max_seconds
