"""A server that grants a session with numbers that no step can have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.client.deadlines import PATH_KEEP
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.errors import ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing import message_streams, run_autojumping
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import STEP_TOKENS

CLIENT, SERVER = Identity.generate().peer_id, Identity.generate().peer_id
EPOCH = b"e" * 16


def granted(use: Callable[[SessionStream], Awaitable[None]], batch: int = 1, **numbers: int) -> None:
    """Has a client take up a session that the server grants with these numbers."""

    async def main() -> None:
        ours, theirs = message_streams(wire.InferenceFrame, CLIENT, SERVER)
        answer = wire.Granted(**{"session_epoch": EPOCH, "codec": "none", "max_step_tokens": 1, **numbers})
        await theirs.send(wire.InferenceFrame(granted=answer), timeout=10)
        spec = SessionSpec(b"v" * 32, Span(0, 1), batch=batch, max_length=100)
        await use(SessionStream(ours, Hop(SERVER, Span(0, 1)), spec, CLIENT, b"n" * 16))

    run_autojumping(main)


@pytest.mark.parametrize("batch", [1, 7, 1024])
def test_a_step_of_any_size_is_one_of_the_size_that_the_protocol_has(batch: int) -> None:
    async def use(session: SessionStream) -> None:
        await session.resume(EPOCH)
        assert session.max_step_tokens >= 1 and session.max_step_tokens * batch <= STEP_TOKENS

    granted(use, batch, max_step_tokens=2**32 - 1)


def test_a_session_is_kept_no_longer_than_the_client_asked() -> None:
    """For so long it tries to take up a session at a server that is gone."""

    async def use(session: SessionStream) -> None:
        await session.resume(EPOCH)
        assert session.kept == PATH_KEEP

    granted(use, keep_ms=2**32 - 1)


def test_a_step_number_after_which_none_can_come_is_refused() -> None:
    """The client would fail at its next step, and not for anything that it did."""

    async def use(session: SessionStream) -> None:
        with pytest.raises(ServerFailed):
            await session.resume(EPOCH)

    granted(use, sequence=2**64 - 1)
