"""Clients that open sessions, leave, and do not come back: their caches are freed once, before others take the room."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.protocols import wire_pb2 as wire
from tests.attacks.one_server import one_server
from tests.swarm.raw import values

ROWS, LENGTH = 60, 100
"""6,000 of the 10,000 cache tokens that there are."""


def test_the_cache_of_an_evicted_session_is_freed_before_its_room_is_used(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    freed_before: list[list[bool]] = []
    make_cache = blocks.make_cache

    def make(*arguments: Any) -> Any:
        cache = make_cache(*arguments)
        freed_before.append([earlier in freed for earlier in made])
        made.append(cache)
        free, freeing = cache.free, cache

        def note() -> None:
            freed.append(freeing)
            free()

        cache.free = note
        return cache

    freed: list[Any] = []
    monkeypatch.setattr(blocks, "make_cache", make)

    async def main() -> None:
        with trio.fail_after(60):
            async with one_server(blocks) as server:
                for number in range(4):
                    session = server.session(Identity.generate())
                    answer = await session.open(batch=ROWS, max_length=LENGTH, keep_ms=600_000, wait_ms=60_000)
                    assert answer.HasField("granted"), number
                    frame, _ = await session.step(1, 0, values(1, rows=ROWS))
                    assert frame.HasField("reply")
                    if number < 3:
                        await session.stream.reset()
                await session.close()
                while server.service.sessions:  # noqa: ASYNC110  (what it waits for tells nobody)
                    await trio.sleep(0.01)
                assert server.service.cache.free == server.service.cache.capacity
                await server.service.context.compute.call(lambda: None)  # behind what frees the last one
            assert [made.index(cache) for cache in freed] == [0, 1, 2, 3], "each once, in their order"

    trio.run(main)
    assert freed_before == [[], [True], [True, True], [True, True, True]]


def test_an_evicted_session_is_over(blocks: BlockSpan) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with one_server(blocks) as server:
                client = Identity.generate()
                first = server.session(client)
                await first.open(batch=ROWS, max_length=LENGTH, keep_ms=600_000)
                await first.stream.reset()
                second = server.session(Identity.generate())
                answer = await second.open(batch=ROWS, max_length=LENGTH, wait_ms=60_000)
                assert answer.HasField("granted")
                back = server.session(client)
                resume = wire.Resume(nonce=first.nonce, session_epoch=first.granted.session_epoch)
                await back.stream.send(wire.InferenceFrame(resume=resume), timeout=10)
                frame, _ = await back.receive()
                assert frame.error.code == wire.ERROR_NOT_FOUND

    trio.run(main)
