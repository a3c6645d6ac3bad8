"""A client's session through two servers in memory: what it holds after each step, and how it is taken up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import load_span
from petalnode.node.client.chunks import to_chunks
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.request import StreamLost
from petalnode.node.client.session.history import Input
from petalnode.node.client.session.session import ClientSession, SavedSession
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.errors import BadInput, SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import STEP_TOKENS
from tests.swarm.memory_client import a_client, hidden, step
from tests.swarm.memory_pool import MemoryPool
from tests.tiny_models import HIDDEN, NUM_BLOCKS

SPEC = SessionSpec(b"", Span(0, NUM_BLOCKS), batch=1, max_length=64)


@pytest.fixture(scope="module")
def servers(pool: MemoryPool) -> tuple[MemoryServer, MemoryServer]:
    first, second = pool.start("0:3"), pool.start("3:6")
    for server in (first, second):
        server.ready  # noqa: B018  (waits)
    return first, second


@pytest.fixture(scope="module")
def expected(models: Path) -> Callable[..., torch.Tensor]:
    """What all blocks make of hidden states, as steps of (hidden, position, reorder)."""
    blocks = load_span(models / "tiny-llama", Span(0, NUM_BLOCKS))

    def compute(*steps: tuple[torch.Tensor, int, tuple[int, ...]]) -> torch.Tensor:
        cache = blocks.make_cache(steps[0][0].shape[0], 128, None)
        for given, position, reorder in steps:
            if position < cache.length:
                cache.rollback(position)
            if reorder:
                cache.reorder(reorder)
            out = blocks.forward(given, cache)
        return out

    return compute


def close_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4)


@pytest.mark.usefixtures("servers")
async def test_what_a_session_holds_and_may_be(
    pool: MemoryPool, models: Path, expected: Callable[..., torch.Tensor]
) -> None:
    a, b, c = hidden(5), hidden(1, 1), hidden(2, 2)
    async with a_client(pool, models, None) as client:
        async with client.session(SPEC) as session:
            assert isinstance(session, ClientSession)
            assert session.position == 0 and [str(hop.span) for hop in session.route] == ["0:3", "3:6"]
            assert session.max_step_tokens == STEP_TOKENS
            assert close_to(await step(session, a), expected((a, 0, ())))
            assert close_to(await step(session, b), expected((a, 0, ()), (b, 5, ())))
            assert session.position == 6 and session.recoveries == 0 and session.interruption is None
            for wrong in (-1, 7):
                with pytest.raises(BadInput, match="that holds 6 tokens cannot go to position"):
                    session.position = wrong
            session.position = 4
            assert close_to(await step(session, c), expected((a, 0, ()), (c, 4, ())))
            assert session.position == 6
            sent = [bytes_sent for bytes_sent, _ in session.traffic]
            received = [bytes_received for _, bytes_received in session.traffic]
            assert sent[0] == received[1] == 8 * 4 * HIDDEN  # all that went in and came out
            assert {timing.peer_id for timing in session.timings} == {hop.peer_id for hop in session.route}
            with pytest.raises(BadInput, match="6 tokens and 59 more pass the session's max_length of 64"):
                await step(session, hidden(59))
            assert (await step(session, hidden(58), size=20)).shape == (1, 58, HIDDEN)  # several chunks, pipelined
            assert session.position == 64 and session.waits.fields()["step"]["count"] >= 6
        with pytest.raises(SwarmError, match="closed"):
            await step(session, b)


@pytest.mark.usefixtures("servers")
async def test_chunks_of_a_reordered_prompt_change_rows_once(
    pool: MemoryPool, models: Path, expected: Callable[..., torch.Tensor]
) -> None:
    a, b = hidden(4, rows=2), hidden(6, 1, rows=2)
    async with a_client(pool, models, None) as client, client.session(replace(SPEC, batch=2)) as session:
        assert isinstance(session, ClientSession)
        await step(session, a)
        out = await step(session, b, (1, 0), size=2)
        assert close_to(out, expected((a, 0, ()), (b, 4, (1, 0))))
        assert session.position == 10 and session.max_step_tokens == STEP_TOKENS // 2


async def test_a_session_is_taken_up_where_it_was(
    pool: MemoryPool,
    models: Path,
    servers: tuple[MemoryServer, MemoryServer],
    expected: Callable[..., torch.Tensor],
) -> None:
    a, b, c, d = hidden(5), hidden(1, 1), hidden(2, 2), hidden(1, 3)
    identity, spec = Identity.generate(), replace(SPEC, keep=100.0)
    saved: list[SavedSession] = []

    async def leave(client: SwarmClient) -> None:
        assert ClientSession(client, spec, wait=False).saved() is None
        async with client.session(spec) as session:
            await step(session, a)
            await step(session, b)
            kept = session.saved()
            assert kept is not None
            saved.append(kept)
        assert [(link.peer_id, link.start, link.end) for link in kept.links] == [
            (servers[0].peer_id, 0, 3),
            (servers[1].peer_id, 3, 6),
        ]
        assert (kept.max_length, kept.position) == (64, 6) and kept.route_epoch >= 1

    async def take_up(client: SwarmClient) -> None:
        (kept,) = saved
        async with client.session(replace(spec, keep=0.0), saved=replace(kept, max_length=63)) as session:
            assert session.position == 0  # a new one
        backwards = replace(kept, links=kept.links[::-1])
        async with client.session(spec, saved=backwards) as session:
            assert isinstance(session, ClientSession)
            assert session.position == 6 and [hop.peer_id for hop in session.route] == [s.peer_id for s in servers]
            assert close_to(await step(session, c), expected((a, 0, ()), (b, 5, ()), (c, 6, ())))
            kept = session.saved()
            assert kept is not None and kept.position == 8 and kept.route_epoch > saved[0].route_epoch
            saved[0] = kept

    async def go_back(client: SwarmClient) -> None:
        (kept,) = saved
        async with client.session(spec, saved=replace(kept, position=6)) as session:  # what a person has undone
            assert session.position == 6
            assert close_to(await step(session, d), expected((a, 0, ()), (b, 5, ()), (d, 6, ())))

    async def lose(client: SwarmClient) -> None:
        (kept,) = saved
        lost = replace(kept.links[0], epoch=b"x" * 16)
        for links in ((lost, kept.links[1]), kept.links):  # where one has lost it, the others need it no more
            async with client.session(replace(spec, keep=0.0), saved=replace(kept, links=links)) as session:
                assert session.position == 0
                assert close_to(await step(session, a), expected((a, 0, ())))

    for visit in (leave, take_up, go_back, lose):
        async with a_client(pool, models, identity) as client:
            await visit(client)


async def test_sessions_taken_up_for_nobody_are_left(
    pool: MemoryPool, models: Path, servers: tuple[MemoryServer, MemoryServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller leaves while one server has taken the session up and the other one is silent."""
    identity, spec = Identity.generate(), replace(SPEC, keep=100.0)
    asked: list[SessionStream] = []
    both, take_up = trio.Event(), SessionStream.resume

    async def resume(stream: SessionStream, epoch: bytes) -> int:
        asked.append(stream)
        if len(asked) == len(servers):
            both.set()
            await trio.sleep_forever()
        return await take_up(stream, epoch)

    async def leave(scope: trio.CancelScope) -> None:
        await both.wait()
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()

    async with a_client(pool, models, identity) as client, client.session(spec) as session:
        await step(session, hidden(5))
        saved = session.saved()
    monkeypatch.setattr(SessionStream, "resume", resume)
    async with a_client(pool, models, identity) as client, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(leave, scope)
            async with client.session(spec, saved=saved):
                pass
        for stream in asked:
            with pytest.raises(StreamLost, match="reset on this side"):
                await stream.exchange(Input(5, (), *to_chunks(hidden(1), "none", 1)), 1)
        monkeypatch.setattr(SessionStream, "resume", take_up)
        async with client.session(spec, saved=saved) as session:
            assert session.position == 5


@pytest.mark.usefixtures("servers")
async def test_steps_are_pushed_after_a_cut_off_one(pool: MemoryPool, models: Path) -> None:
    """It had numbers at both servers, and neither has seen it: the next one is sent to each, as if nothing was."""
    (chunk,) = to_chunks(hidden(1), "none", 1)
    async with a_client(pool, models, None) as client, client.session(SPEC) as session:
        assert isinstance(session, ClientSession)
        await step(session, hidden(5))
        async with session.pipeline() as pipeline:
            await pipeline.send(chunk)
            await pipeline.answer()
            with trio.CancelScope() as scope:
                scope.cancel()
                await pipeline.ask(chunk, pipeline.position)
        pushed = session.pushed_steps
        for _ in range(3):
            await step(session, hidden(1))
        assert session.pushed_steps == pushed + 2


@pytest.mark.usefixtures("servers")
async def test_prompt_in_chunks_is_refused_plainly(
    pool: MemoryPool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are under way in a nursery, and a server is lost where all others take shorter sessions."""

    async def refuse(*_: object, **__: object) -> None:
        raise BadInput("64 tokens in one sequence are wanted")

    async with a_client(pool, models, None) as client, client.session(SPEC) as session:
        assert isinstance(session, ClientSession)
        await step(session, hidden(5))
        monkeypatch.setattr(client, "route", refuse)
        session.links[0].server.misled = True
        with pytest.raises(BadInput, match="64 tokens in one sequence"):
            await step(session, hidden(20), size=2)
