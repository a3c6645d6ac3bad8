"""Sessions end while steps are under way, begin twice, or stay where a server leaves its blocks; and memory that fills.
Nobody else is hurt, and nothing is left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.models.folder import ModelFolder
from petalnode.node.placement.plan import Move
from petalnode.node.server.lifecycle import span_server
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from tests.attacks.held_prompts import CLIENT, KEEP, NEVER, PUSHER, held_up
from tests.attacks.one_server import one_server, pushed
from tests.noted_blocks import NotedBlocks
from tests.swarm.raw import TIMEOUT, RawSession, values


async def test_one_nonce_names_one_session(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    async with one_server(blocks) as server:
        steps = server.service.context.compute.steps
        close = steps.close
        monkeypatch.setattr(steps, "close", lambda session: (closed.append(session), close(session)))
        twins = [server.session(CLIENT) for _ in range(2)]
        async with held_up(server):
            for twin in twins:
                twin.nonce = twins[0].nonce
                await twin.send_open(keep_ms=KEEP)
            await wait_all_tasks_blocked()
        answers = [(await twin.receive())[0] for twin in twins]
        assert sorted(str(answer.WhichOneof("body")) for answer in answers) == ["error", "granted"]
        refused, granted = sorted(answers, key=lambda answer: answer.HasField("granted"))
        assert refused.error.code == wire.ERROR_BAD_REQUEST
        await wait_all_tasks_blocked()
        assert len(closed) == 1, "its cache is left"
        await twins[answers.index(granted)].stream.reset()
        await wait_all_tasks_blocked()
        back = server.session(CLIENT)
        resume = wire.Resume(nonce=twins[0].nonce, session_epoch=granted.granted.session_epoch)
        await back.stream.send(wire.InferenceFrame(resume=resume), timeout=NEVER)
        assert (await back.receive())[0].HasField("granted")
        await back.close()
        while server.service.sessions:
            await wait_all_tasks_blocked()
        assert server.service.cache.free == server.service.cache.capacity


async def test_client_closes_while_pushed_prompt_is_computed(blocks: BlockSpan) -> None:
    """What is large is sent by a task of the session, which is over when the blocks are done."""
    tokens, rows, there = 150, 2, trio.lowlevel.current_trio_token()

    async def leave() -> None:
        await session.close()
        await wait_all_tasks_blocked()

    def leaving(caches: Any, _: int) -> None:
        if caches[0].length == tokens:
            trio.from_thread.run(leave, trio_token=there)

    noted: Any = NotedBlocks(blocks, then=leaving)
    async with one_server(noted) as server:
        session, pusher = server.session(CLIENT), server.pusher(PUSHER)
        await session.open(upstream=peer_id_to_bytes(PUSHER.peer_id), keep_ms=KEEP, max_length=tokens, batch=rows)
        payload = values(tokens, rows)
        push = pushed(session, CLIENT, PUSHER, 1, 0, payload)
        push.tensors[0].shape[:] = [rows, tokens, len(payload) // (4 * rows * tokens)]
        await pusher.send(push, [payload], timeout=NEVER)
        while server.service.sessions:
            await wait_all_tasks_blocked()
        await pusher.send(push, [payload], timeout=NEVER)
        assert (await pusher.receive(timeout=TIMEOUT))[0].error.code == wire.ERROR_NOT_FOUND


async def test_blocks_without_room_are_not_left(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(cache: SpanCache, start: int, end: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SpanCache, "read", fill)
    async with one_server(blocks) as server:
        session = server.session(CLIENT)
        await session.open(prefix=wire.Prefix(keep=True), max_length=100)
        with trio.fail_after(TIMEOUT):
            for number, tokens in ((1, 40), (2, 1), (3, 40)):
                at = sum((40, 1)[: number - 1])
                frame, _ = await session.step(number, at, values(tokens))
                assert frame.reply.position == at + tokens


async def test_end_of_service_reaches_who_only_pushes(blocks: BlockSpan) -> None:
    """Else an idle stream of the server before would hold the blocks for half an hour."""
    async with one_server(blocks) as server:
        session, pusher = server.session(CLIENT), server.pusher(PUSHER)
        await session.open(upstream=peer_id_to_bytes(PUSHER.peer_id), max_length=10)
        payload = values(1)
        await pusher.send(pushed(session, CLIENT, PUSHER, 1, 0, payload), [payload], timeout=NEVER)
        assert (await session.receive())[0].HasField("reply")
        server.service.context.end()
        assert (await pusher.receive(timeout=TIMEOUT))[0].error.code == wire.ERROR_DRAINING


def test_moving_server_ends_who_stays(swarm: MemorySwarm, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is told to go elsewhere, and nothing holds the blocks that were left."""
    loaded, go = [], trio.Event()

    async def moves(*arguments: Any) -> Move:
        await go.wait()
        if len(loaded) > 1:
            await trio.sleep_forever()
        return Move(server.peer_id, Span(0, 3), Span(1, 4))

    def noted(blocks: Any) -> Any:
        loaded.append(weakref.ref(blocks))
        return blocks

    async def stay() -> wire.InferenceFrame:
        node: Any = swarm.network.node()
        session = await RawSession.opened(node, server.ready, keep_ms=KEEP)
        assert (await session.step(1, 0, values(3)))[0].HasField("reply")
        go.set()
        frame, _ = await session.receive()
        while server.events[-1]["event"] != "moved":  # noqa: ASYNC110  (what it waits for tells nobody)
            await trio.sleep(0.01)
        return frame

    monkeypatch.setattr(span_server, "next_move", moves)
    server = swarm.start(folder.path, num_blocks=3, computing=noted, drain_timeout=0.0)
    assert server.span == (0, 3)
    assert swarm.call(stay).error.code == wire.ERROR_DRAINING
    gc.collect()
    assert loaded[0]() is None
