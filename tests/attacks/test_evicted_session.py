"""Clients that leave their sessions: caches are freed once, before others take the room; only who left comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.inference import INFERENCE
from tests.attacks.one_server import one_server
from tests.noted_blocks import NotedBlocks
from tests.swarm.raw import RawSession, values
from tests.swarm.watched_streams import WatchedStream

ROWS, LENGTH = 60, 100
"""6,000 of the 10,000 cache tokens that there are."""


class Freeing(NotedBlocks):
    """Notes the caches that are freed, and of each new one which earlier ones were freed before."""

    def __init__(self, blocks: BlockSpan) -> None:
        super().__init__(blocks)
        self.freed: list[Any] = []
        self.freed_before: list[list[bool]] = []

    def make_cache(self, *arguments: Any, **options: Any) -> Any:
        self.freed_before.append([earlier in self.freed for earlier in self.made])
        cache: Any = super().make_cache(*arguments, **options)
        free = cache.free

        def note() -> None:
            self.freed.append(cache)
            free()

        cache.free = note
        return cache


async def test_evicted_sessions_cache_is_freed_before_its_reuse(blocks: BlockSpan) -> None:
    noted: Any = Freeing(blocks)
    with trio.fail_after(600):
        async with one_server(noted) as server:
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
    assert [noted.made.index(cache) for cache in noted.freed] == [0, 1, 2, 3], "each once, in their order"
    assert noted.freed_before == [[], [True], [True, True], [True, True, True]]


async def test_an_evicted_session_is_over(blocks: BlockSpan) -> None:
    with trio.fail_after(600):
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
            await back.stream.send(wire.InferenceFrame(resume=resume), timeout=600)
            frame, _ = await back.receive()
            assert frame.error.code == wire.ERROR_NOT_FOUND


async def test_only_a_later_attempt_of_the_client_resumes(blocks: BlockSpan) -> None:
    with trio.fail_after(600):
        async with one_server(blocks) as server:
            client = Identity.generate()
            first = server.session(client)
            await first.open(keep_ms=600_000)
            answers = [await first.step(number, number - 1, values(1, seed=number)) for number in (1, 2)]
            await first.stream.reset()
            usual = {"nonce": first.nonce, "session_epoch": first.granted.session_epoch, "attempt": 1}

            async def resume(who: Identity = client, **changed: Any) -> tuple[RawSession, wire.InferenceFrame]:
                back = server.session(who)
                frame = wire.InferenceFrame(resume=wire.Resume(**usual | changed))
                await back.stream.send(frame, timeout=600)
                return back, (await back.receive())[0]

            for who, changed in ((Identity.generate(), {}), (client, {"session_epoch": b"x" * 16})):
                _, frame = await resume(who, **changed)
                assert frame.error.code == wire.ERROR_NOT_FOUND
            back, frame = await resume(answered=1)
            assert frame.granted.sequence == 2 and frame.granted.position == 2
            assert await back.receive() == answers[1]  # and not the one that the client has had
            _, frame = await resume(answered=1)
            assert frame.error.code == wire.ERROR_BAD_REQUEST
            again, frame = await resume(attempt=2)
            assert frame.HasField("granted")
            frame, _ = await again.step(3, 2, values(1))  # nothing came in between
            assert frame.reply.sequence == 3 and frame.reply.position == 3


async def test_client_lost_while_resuming_holds_no_cache(blocks: BlockSpan) -> None:
    """The stream breaks as the server writes what it grants."""

    async def break_it(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        await stream.reset()

    with trio.fail_after(600):
        async with one_server(blocks) as server:
            client = Identity.generate()
            first = server.session(client)
            await first.open(batch=ROWS, max_length=LENGTH, keep_ms=600_000)
            await first.stream.reset()
            await trio.testing.wait_all_tasks_blocked()
            handle = server.service.handle_session
            stream, _ = server.connect(INFERENCE, lambda served: handle(WatchedStream(served, sent=break_it)), client)
            resume = wire.Resume(nonce=first.nonce, session_epoch=first.granted.session_epoch, attempt=1)
            await stream.send(wire.InferenceFrame(resume=resume), timeout=600)
            with pytest.raises(PeerError):
                await stream.receive(timeout=600)
            second = server.session(Identity.generate())
            answer = await second.open(batch=ROWS, max_length=LENGTH, wait_ms=60_000)
            assert answer.HasField("granted")


async def test_unkept_session_ends_with_its_stream(blocks: BlockSpan) -> None:
    with trio.fail_after(600):
        async with one_server(blocks) as server:
            session = server.session(Identity.generate())
            await session.open()
            await session.step(1, 0, values(1))
            await session.stream.reset()
            while server.service.sessions:  # noqa: ASYNC110  (what it waits for tells nobody)
                await trio.sleep(0.01)
            assert server.service.cache.free == server.service.cache.capacity
