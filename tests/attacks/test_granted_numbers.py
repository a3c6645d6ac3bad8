"""A server that grants a session with numbers that no step can have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.errors import ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import INFERENCE, STEP_TOKENS

CLIENT, SERVER = Identity.generate().peer_id, Identity.generate().peer_id
EPOCH = b"e" * 16


@asynccontextmanager
async def a_granted(batch: int = 1, **numbers: int) -> AsyncIterator[Any]:
    """Has a client take up a session that the server grants with these numbers."""
    ours, theirs = message_streams(INFERENCE, CLIENT, SERVER)
    answer = wire.Granted(**{"session_epoch": EPOCH, "codec": "none", "max_step_tokens": 1, **numbers})
    await theirs.send(wire.InferenceFrame(granted=answer), timeout=10)
    spec = SessionSpec(b"v" * 32, Span(0, 1), batch=batch, max_length=100)
    yield SessionStream(ours, Hop(SERVER, Span(0, 1)), spec, CLIENT, b"n" * 16)


@pytest.mark.virtual_time
@pytest.mark.parametrize("batch", [1, 7, 1024])
async def test_steps_size_is_one_the_protocol_has(batch: int) -> None:
    async with a_granted(batch, max_step_tokens=2**32 - 1) as session:
        await session.resume(EPOCH)
        assert session.max_step_tokens >= 1 and session.max_step_tokens * batch <= STEP_TOKENS


@pytest.mark.virtual_time
async def test_session_is_kept_no_longer_than_client_asked() -> None:
    """For so long it tries to take up a session at a server that is gone."""
    async with a_granted(keep_ms=2**32 - 1) as session:
        await session.resume(EPOCH)
        assert session.kept == DEADLINES.path_keep


@pytest.mark.virtual_time
async def test_last_step_number_is_refused() -> None:
    """The client would fail at its next step, and not for anything that it did."""
    async with a_granted(sequence=2**64 - 1) as session:
        with pytest.raises(ServerFailed):
            await session.resume(EPOCH)
