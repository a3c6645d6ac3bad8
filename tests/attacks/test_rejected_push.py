"""A push that a server refuses must not change what the session answers next, and signs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.requests import session as session_module
from petalnode.node.server.requests.request import RequestPolicy
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire, sha256
from tests.attacks.one_server import OneServer, one_server, pushed
from tests.noted_blocks import NotedBlocks, nothing
from tests.swarm.raw import RawSession, values
from tests.tiny_models import HIDDEN

CLIENT, UPSTREAM, STRANGER = Identity.generate(), Identity.generate(), Identity.generate()
TIMEOUT = 120.0


@asynccontextmanager
async def a_server(blocks: BlockSpan) -> AsyncIterator[Any]:
    with trio.fail_after(TIMEOUT):
        async with one_server(blocks) as server:
            yield server


async def opened(server: OneServer, upstream: Identity | None = UPSTREAM) -> RawSession:
    session = server.session(CLIENT)
    named = peer_id_to_bytes(upstream.peer_id) if upstream is not None else b""
    assert (await session.open(upstream=named)).HasField("granted")
    frame, _ = await session.step(1, 0, values(3))
    assert frame.HasField("reply")
    return session


async def refusal(server: OneServer, pusher: Identity, frame: wire.PushFrame, payload: bytes) -> wire.Error:
    stream = server.pusher(pusher)
    await stream.send(frame, [payload], timeout=TIMEOUT)
    answer, _ = await stream.receive(timeout=TIMEOUT)
    return answer.error


GARBAGE = values(3, seed=9)
HUGE = np.full(HIDDEN, 3e38, np.float32).tobytes()
PUSHES: dict[str, Callable[[RawSession], tuple[Identity, wire.PushFrame]]] = {
    "signed with another key": lambda session: (UPSTREAM, pushed(session, CLIENT, STRANGER, 2, 0, GARBAGE)),
    "for another client": lambda session: (
        UPSTREAM,
        pushed(session, CLIENT, UPSTREAM, 2, 0, GARBAGE, client=STRANGER.peer_id),
    ),
    "for another payload": lambda session: (
        UPSTREAM,
        pushed(session, CLIENT, UPSTREAM, 2, 0, GARBAGE, reply_hash=sha256(b"")),
    ),
    "without a hash of the payload": lambda session: (
        UPSTREAM,
        pushed(session, CLIENT, UPSTREAM, 2, 0, GARBAGE, reply_hash=b""),
    ),
    "of the step behind the next": lambda session: (UPSTREAM, pushed(session, CLIENT, UPSTREAM, 3, 0, GARBAGE)),
    "of a step far ahead": lambda session: (UPSTREAM, pushed(session, CLIENT, UPSTREAM, 1 << 40, 0, GARBAGE)),
    "of a stranger who knows the nonce": lambda session: (STRANGER, pushed(session, CLIENT, STRANGER, 2, 0, GARBAGE)),
    "of a stranger with another's receipt": lambda session: (
        STRANGER,
        pushed(session, CLIENT, UPSTREAM, 2, 0, GARBAGE),
    ),
}


NEXT: dict[str, Callable[[RawSession], wire.PushFrame]] = {
    "signed with another key": lambda session: pushed(session, CLIENT, STRANGER, 2, 3, values(1, seed=8)),
    "for another client": lambda session: pushed(
        session, CLIENT, UPSTREAM, 2, 3, values(1, seed=8), client=STRANGER.peer_id
    ),
    "that the blocks make infinite": lambda session: pushed(session, CLIENT, STRANGER, 2, 3, HUGE),
}


@pytest.mark.parametrize("kind", NEXT)
async def test_refused_push_of_next_token_is_forgotten(kind: str, blocks: BlockSpan) -> None:
    """Its receipt is checked while it is computed."""
    async with a_server(blocks) as server:
        undisturbed, victim = await opened(server), await opened(server)
        frame = NEXT[kind](victim)
        payload = HUGE if "infinite" in kind else values(1, seed=8)
        assert (await refusal(server, UPSTREAM, frame, payload)).code == wire.ERROR_BAD_REQUEST
        await _answers_as(undisturbed, victim)


@pytest.mark.parametrize("kind", PUSHES)
async def test_refused_push_leaves_cache_as_it_was(
    kind: str, blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "REQUESTS", RequestPolicy(turn=0.01))
    async with a_server(blocks) as server:
        undisturbed, victim = await opened(server), await opened(server)
        pusher, frame = PUSHES[kind](victim)
        assert (await refusal(server, pusher, frame, GARBAGE)).code in (
            wire.ERROR_BAD_REQUEST,
            wire.ERROR_NOT_ALLOWED,
        )
        await _answers_as(undisturbed, victim)


async def _answers_as(undisturbed: RawSession, victim: RawSession) -> None:
    right, (expected,) = await undisturbed.step(2, 3, values(1, seed=4))
    frame, (payload,) = await victim.step(2, 3, values(1, seed=4))
    assert frame.reply.position == right.reply.position == 4
    assert payload == expected


async def test_receipt_other_than_the_steps_changes_nothing(blocks: BlockSpan) -> None:
    async with a_server(blocks) as server:
        undisturbed, victim = await opened(server), await opened(server)
        frame = pushed(victim, CLIENT, UPSTREAM, 2, 0, GARBAGE)
        frame.push.step.previous_receipt = b"x" * 32
        assert (await refusal(server, UPSTREAM, frame, GARBAGE)).code == wire.ERROR_BAD_REQUEST
        await _answers_as(undisturbed, victim)


async def test_values_that_are_not_finite_change_nothing(blocks: BlockSpan) -> None:
    async with a_server(blocks) as server:
        undisturbed, victim = await opened(server), await opened(server)
        payload = b"\xff" * len(GARBAGE)
        frame = pushed(victim, CLIENT, UPSTREAM, 2, 0, payload)
        assert "NaN" in (await refusal(server, UPSTREAM, frame, payload)).message
        await _answers_as(undisturbed, victim)


async def test_push_at_which_blocks_fail_ends_session(blocks: BlockSpan) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    noted: Any = NotedBlocks(blocks)
    async with a_server(noted) as server:
        victim = await opened(server)
        noted.before = fail
        frame = pushed(victim, CLIENT, UPSTREAM, 2, 0, GARBAGE)
        assert (await refusal(server, UPSTREAM, frame, GARBAGE)).code == wire.ERROR_INTERNAL
        noted.before = nothing
        answer, _ = await victim.step(2, 3, values(1))  # or it would be computed over half a cache
        assert answer.error.code == wire.ERROR_NOT_FOUND


@pytest.mark.parametrize("upstream", [UPSTREAM, None])
async def test_the_server_before_pushes(upstream: Identity | None, blocks: BlockSpan) -> None:
    """Without a server before this one, the client stands before it."""
    async with a_server(blocks) as server:
        session, relayed = await opened(server, upstream), await opened(server, upstream)
        payload = values(1, seed=4)
        pusher = upstream or CLIENT
        stream = server.pusher(pusher)
        await stream.send(pushed(session, CLIENT, pusher, 2, 3, payload), [payload], timeout=TIMEOUT)
        frame, (answer,) = await session.receive()
        assert frame.reply.pushed and frame.reply.position == 4
        _, (expected,) = await relayed.step(2, 3, payload)
        assert answer == expected


async def test_replacing_server_pushes_and_the_old_does_not(
    blocks: BlockSpan,
) -> None:
    async with a_server(blocks) as server:
        session = await opened(server)
        new = Identity.generate()
        payload = values(1, seed=4)
        relayed = receipt_from_wire(pushed(session, CLIENT, new, 2, 3, payload).push.receipt)
        frame, _ = await session.step(2, 3, payload, previous_receipt=relayed.hash())
        assert frame.reply.position == 4
        unrelated = pushed(session, CLIENT, STRANGER, 3, 0, GARBAGE)
        assert (await refusal(server, STRANGER, unrelated, GARBAGE)).code == wire.ERROR_NOT_ALLOWED
        stream = server.pusher(new)
        following = pushed(session, CLIENT, new, 3, 4, payload, previous_receipt=relayed.hash())
        await stream.send(following, [payload], timeout=TIMEOUT)
        frame, _ = await session.receive()
        assert frame.reply.pushed and frame.reply.position == 5
        late = pushed(session, CLIENT, UPSTREAM, 4, 0, GARBAGE)
        assert (await refusal(server, UPSTREAM, late, GARBAGE)).code == wire.ERROR_NOT_ALLOWED


NEVER = 1e6


async def test_a_push_waits_for_the_step_before_it(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server before could not push that one, and the client sends it."""
    monkeypatch.setattr(session_module, "REQUESTS", RequestPolicy(turn=NEVER))
    async with a_server(blocks) as server:
        session = await opened(server)
        assert session.granted.bytes_in_flight and session.granted.credits > 1
        payload = values(2, seed=5)
        await server.pusher(UPSTREAM).send(pushed(session, CLIENT, UPSTREAM, 3, 4, payload), [payload], timeout=TIMEOUT)
        await trio.testing.wait_all_tasks_blocked()
        frame, _ = await session.step(2, 3, values(1))
        assert frame.reply.sequence == 2 and not frame.reply.pushed
        frame, _ = await session.receive()
        assert (frame.reply.sequence, frame.reply.position, frame.reply.pushed) == (3, 6, True)


async def test_a_push_far_ahead_waits_for_nothing(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REQUESTS", RequestPolicy(turn=NEVER))
    async with a_server(blocks) as server:
        session = await opened(server)
        frame = pushed(session, CLIENT, UPSTREAM, 2 + session.granted.credits, 3, GARBAGE)
        assert (await refusal(server, UPSTREAM, frame, GARBAGE)).code == wire.ERROR_BAD_REQUEST
