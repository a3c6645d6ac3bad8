"""Many parts of a prompt are sent, by the client or by the server before, and nobody waits for what comes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.blocks.span import PREFILL_CHUNK, BlockSpan
from petalnode.node.server.requests import session as session_module
from petalnode.node.server.requests.request import RequestPolicy
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from tests.attacks.held_prompts import CLIENT, KEEP, NEVER, PUSHER, TOKENS, begins, held_up
from tests.attacks.one_server import OneServer, one_server, pushed
from tests.noted_blocks import NotedBlocks
from tests.swarm.raw import TIMEOUT, RawSession, values


@pytest.fixture
def computed() -> list[int]:
    """The position of each part of a prompt that was computed."""
    return []


@asynccontextmanager
async def a_server(blocks: BlockSpan, computed: list[int] | None = None) -> AsyncIterator[Any]:
    found = [] if computed is None else computed
    noted: Any = NotedBlocks(blocks, before=lambda caches, _: found.append(caches[0].length))
    async with one_server(noted) as server:
        yield server


@pytest.mark.parametrize("keep", [0, KEEP])
async def test_bytes_before_a_break_off_are_not_computed(keep: int, blocks: BlockSpan, computed: list[int]) -> None:
    async with a_server(blocks, computed) as server:
        session = server.session(CLIENT)
        assert (await session.open(keep_ms=keep)).HasField("granted")
        async with held_up(server):
            for number in range(6):
                await session.send_step(1 + number, number * TOKENS, values(TOKENS))
            await begins(server)
            await session.stream.reset()
            await wait_all_tasks_blocked()  # the server knows by now
        assert server.service.sessions == (1 if keep else 0)
    assert computed == []


async def test_one_chunk_is_computed_of_an_abandoned_prompt(blocks: BlockSpan) -> None:
    """The session has what it had before, and takes the same prompt again."""
    tokens, rows = 200, 2
    prompt, parts, there = values(tokens, rows), list[int](), trio.lowlevel.current_trio_token()
    terms = {"max_length": tokens, "batch": rows}

    async def leave() -> None:
        await session.stream.reset()
        await wait_all_tasks_blocked()

    def leaving(_: object, chunk: int) -> None:
        parts.append(chunk)
        if len(parts) == 1:
            trio.from_thread.run(leave, trio_token=there)

    noted: Any = NotedBlocks(blocks, then=leaving)
    async with one_server(noted) as server:
        session = server.session(CLIENT)
        assert (await session.open(keep_ms=KEEP, **terms)).HasField("granted")
        await session.send_step(1, 0, prompt)
        while server.service.context.compute.depth or not parts:
            await wait_all_tasks_blocked()
        again = server.session(CLIENT)
        resume = wire.Resume(nonce=session.nonce, session_epoch=session.granted.session_epoch, answered=0)
        await again.stream.send(wire.InferenceFrame(resume=resume), timeout=NEVER)
        granted = (await again.receive())[0].granted
        assert (granted.sequence, granted.position, parts) == (0, 0, [PREFILL_CHUNK // rows])
        again.terms = session.terms
        await again.send_step(1, 0, prompt)
        frame, payloads = await again.receive()
        assert frame.reply.position == tokens
        other = server.session(CLIENT)
        await other.open(**terms)
        await other.send_step(1, 0, prompt)
        assert (await other.receive())[1] == payloads


async def opened(server: OneServer) -> RawSession:
    session = server.session(CLIENT)
    granted = await session.open(upstream=peer_id_to_bytes(PUSHER.peer_id), keep_ms=KEEP)
    assert granted.HasField("granted")
    return session


async def push(server: OneServer, session: RawSession, count: int) -> None:
    """`PUSHER` hands on some parts of a prompt, and hears nothing."""
    stream = server.pusher(PUSHER)
    for number in range(count):
        payload = values(TOKENS)
        frame = pushed(session, CLIENT, PUSHER, 1 + number, number * TOKENS, payload)
        await stream.send(frame, [payload], timeout=NEVER)


async def test_pushes_into_a_closed_session_are_not_computed(blocks: BlockSpan, computed: list[int]) -> None:
    async with a_server(blocks, computed) as server:
        session = await opened(server)
        async with held_up(server):
            await push(server, session, 4)
            await begins(server)
            await session.close()
            await wait_all_tasks_blocked()
    assert computed == []


@pytest.mark.parametrize("patience", [0.0, NEVER], ids=["comes too late", "comes back"])
async def test_pushes_for_a_client_that_is_away_wait(
    patience: float, blocks: BlockSpan, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "REQUESTS", RequestPolicy(turn=patience))
    async with a_server(blocks, computed) as server:
        session = await opened(server)
        async with held_up(server):
            await push(server, session, 4)
            await begins(server)
            await session.stream.reset()
        assert computed == [0]
        again = server.session(CLIENT)
        resume = wire.Resume(nonce=session.nonce, session_epoch=session.granted.session_epoch, answered=0)
        await again.stream.send(wire.InferenceFrame(resume=resume), timeout=NEVER)
        assert (await again.receive())[0].granted.sequence == 1
        if patience:
            for number in range(4):
                assert (await again.receive())[0].reply.sequence == 1 + number
    assert computed == ([TOKENS * number for number in range(4)] if patience else [0])


async def test_one_token_is_computed_for_an_absent_client(blocks: BlockSpan) -> None:
    """It costs little, and a generation goes on the sooner when the connection is back."""
    async with a_server(blocks) as server:
        session = await opened(server)
        await session.stream.reset()
        await wait_all_tasks_blocked()
        stream, payload = server.pusher(PUSHER), values(1)
        await stream.send(pushed(session, CLIENT, PUSHER, 1, 0, payload), [payload], timeout=NEVER)
        again = server.session(CLIENT)
        compute = server.service.context.compute
        await wait_all_tasks_blocked()
        while compute.depth:
            await wait_all_tasks_blocked()
        resume = wire.Resume(nonce=session.nonce, session_epoch=session.granted.session_epoch, answered=0)
        await again.stream.send(wire.InferenceFrame(resume=resume), timeout=NEVER)
        assert (await again.receive())[0].granted.sequence == 1


async def test_a_pusher_learns_that_nobody_waits(
    blocks: BlockSpan, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "REQUESTS", RequestPolicy(turn=0.0))
    async with a_server(blocks, computed) as server:
        session = await opened(server)
        await session.stream.reset()
        await wait_all_tasks_blocked()
        stream, payload = server.pusher(PUSHER), values(TOKENS)
        await stream.send(pushed(session, CLIENT, PUSHER, 1, 0, payload), [payload], timeout=NEVER)
        frame, _ = await stream.receive(timeout=TIMEOUT)
        assert frame.error.code == wire.ERROR_NOT_FOUND
        with pytest.raises(PeerError):
            await stream.receive(timeout=TIMEOUT)
    assert computed == []
