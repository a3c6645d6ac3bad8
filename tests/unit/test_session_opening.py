"""A client opens a session, takes one up, or moves it, at a server that says what a test has it say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from petalnode.crypto.credits import Clearing, Transfer
from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.crypto.statement import now_ms
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.request import ServerClaims, ServerRefused, StreamLost
from petalnode.node.client.session.stream import SessionStream
from petalnode.node.errors import ServerCheated, ServerFailed
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import (
    MAX_SEQUENCE,
    pledge_to_wire,
)
from tests.answering_server import (
    BEFORE,
    CLIENT,
    EPOCH,
    GRANT,
    OTHER,
    SERVER,
    SPEC,
    Server,
    asked,
    chunk_of,
    opened,
    received,
    session_with,
    talking,
)
from tests.statements import pledge_of

pytestmark = pytest.mark.virtual_time

# --- opening


async def test_what_is_asked_for_suits_the_session() -> None:
    server = Server()
    spec = replace(SPEC, batch=2, left_padding=(0, 3), codec="bfloat16", dtype="float16", keep=200.0)
    log = SessionLog(SERVER.peer_id)
    session = session_with(server, spec, log=log, nonce=b"n" * 16)
    transfer = Transfer(OTHER.peer_id, CLIENT.peer_id, SERVER.peer_id, 5, 1, 2).signed(CLIENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.grant(codec="bfloat16", keep_ms=300_000, priority=True))
        await session.open(7, BEFORE.peer_id, OTHER.peer_id, Clearing(transfer, 1, b"s" * 64))
    asked = server.opened
    assert (asked.protocol_version, asked.model_version, asked.nonce) == (1, b"m" * 32, b"n" * 16)
    assert (asked.span.start, asked.span.end, asked.max_length, asked.batch) == (2, 4, 64, 2)
    assert (list(asked.left_padding), asked.codec, asked.activation_dtype) == ([0, 3], "bfloat16", "float16")
    assert (asked.route_epoch, asked.wait_ms, asked.keep_ms) == (7, 3000, 200_000)
    assert asked.upstream == peer_id_to_bytes(BEFORE.peer_id)
    assert asked.downstream == peer_id_to_bytes(OTHER.peer_id)
    assert asked.clearing.transfer.points == 5
    assert log.opening is not None and not log.opening.HasField("clearing") and log.complete
    assert log.granted is not None and log.granted.session_epoch == EPOCH == session.epoch
    assert session.priority and session.kept == 200.0


async def test_a_session_without_neighbours_and_points_names_none() -> None:
    async with talking() as (server, session):
        assert not server.opened.upstream and not server.opened.downstream and not server.opened.HasField("clearing")
        assert server.opened.keep_ms == round(DEADLINES.path_keep * 1000)
        assert not session.priority and session.kept == 5.0 and session.max_step_tokens == 8
        assert session.direct and session.uses(server.ours) and not session.uses(server.stream)


@pytest.mark.parametrize(
    ("granted", "why"),
    [
        ({"codec": "float16"}, "granted codec 'float16' instead of 'none'"),
        ({"max_step_tokens": 0}, "granted codec"),
        ({"session_epoch": b"short"}, "something else than a grant"),
    ],
)
async def test_a_grant_that_cannot_be_is_a_failure(granted: dict[str, Any], why: str) -> None:
    server = Server()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.grant(**granted))
        with pytest.raises(ServerFailed, match=why) as caught:
            await session_with(server).open(1, None, None)
        assert not isinstance(caught.value, ServerCheated | StreamLost)


async def opening_against(*frames: wire.InferenceFrame, claims: ServerClaims | None = None) -> ServerFailed:
    """What a client makes of these answers to Open."""
    server = Server()
    for frame in frames:
        await server.say(frame)
    if not frames:
        await server.stream.close()
    with pytest.raises(ServerFailed) as caught:
        await session_with(server, claims=claims).open(1, None, None)
    assert caught.value.peer_id == SERVER.peer_id
    return caught.value


async def test_answers_that_are_no_grant() -> None:
    refused = await opening_against(wire.InferenceFrame(error=wire.Error(code=wire.ERROR_CACHE_FULL, message="full")))
    assert isinstance(refused, ServerRefused) and refused.code == wire.ERROR_CACHE_FULL and "full" in str(refused)
    other = await opening_against(wire.InferenceFrame(reply=wire.Reply()))
    assert "something else than a grant" in str(other) and not isinstance(other, ServerCheated | StreamLost)
    assert isinstance(await opening_against(), StreamLost)


async def test_grant_unlike_the_announcement_is_a_lie() -> None:
    grant = wire.InferenceFrame(granted=wire.Granted(**GRANT))
    claims = ServerClaims(SPEC.model_version, Span(0, 4), "bfloat16", "none")
    assert isinstance(await opening_against(grant, claims=claims), ServerCheated)
    now = now_ms()
    pledge = pledge_of(SERVER, OTHER, span=(0, 4), quantisation="none", from_ms=now - 1000, until_ms=now + 60_000)
    for broken in (
        replace(pledge, model_version=b"x" * 32).signed(SERVER),
        replace(pledge, model_version=SPEC.model_version, dtype="float32", span=(0, 3)).signed(SERVER),
        replace(pledge, model_version=SPEC.model_version, dtype="float32", deposit=1),
    ):
        granted = wire.Granted(**GRANT, pledge=pledge_to_wire(broken))
        assert isinstance(await opening_against(wire.InferenceFrame(granted=granted)), ServerCheated)


# --- taking a session up


async def resuming(granted: dict[str, Any]) -> tuple[int, SessionStream]:
    server = Server()
    session = session_with(server, nonce=b"n" * 16)
    answer = wire.Granted(**{**GRANT, "position": 30, "sequence": 9, "last_receipt": b"r" * 32, **granted})
    await server.say(wire.InferenceFrame(granted=answer))
    position = await session.resume(EPOCH)
    frame = await server.hear()
    assert frame.resume.nonce == b"n" * 16 and frame.resume.session_epoch == EPOCH
    assert not frame.resume.HasField("answered")
    chunk = chunk_of()
    server.previous, server.opened.nonce = b"r" * 32, b"n" * 16
    step = await asked(session, chunk, 30)
    assert step.sequence == granted.get("sequence", 9) + 1
    await server.answer(step, chunk)
    assert (await received(session, step, chunk)).chunk.payload == chunk.payload
    return position, session


async def test_earlier_processs_session_goes_on() -> None:
    position, session = await resuming({})
    assert position == 30 and session.epoch == EPOCH
    with pytest.raises(ServerFailed, match="another session, or at no step"):
        await resuming({"session_epoch": b"x" * 16})
    with pytest.raises(ServerFailed, match="another session, or at no step"):
        await resuming({"sequence": MAX_SEQUENCE + 1})
    await resuming({"sequence": MAX_SEQUENCE - 1})


async def moving(granted: dict[str, Any], unanswered: int = 1) -> list[str]:
    """A session of one answered step and some that are not goes on over another stream; what came of it."""
    server, following = Server(), Server()
    session = session_with(server)
    await opened(server, session)
    chunk = chunk_of()
    first = await asked(session, chunk)
    await server.answer(first, chunk)
    await received(session, first, chunk)
    steps = [await asked(session, chunk, position) for position in range(1, 1 + unanswered)]
    answer = {"sequence": 1, "last_receipt": server.previous} | granted
    await following.say(wire.InferenceFrame(granted=wire.Granted(**GRANT | answer)))
    try:
        await session.take_up(following.ours)
    except ServerFailed as error:
        assert session.uses(server.ours) and session.generation == 0
        with pytest.raises(PeerError):
            await following.hear()  # it was reset
        await server.answer(steps[0], chunk)  # and the old one serves as before
        await received(session, steps[0], chunk)
        return ["cheated" if isinstance(error, ServerCheated) else "failed"]
    asked_for = (await following.hear()).resume
    assert (asked_for.answered, asked_for.attempt, asked_for.session_epoch) == (1, 1, EPOCH)
    assert session.uses(following.ours) and session.generation == 1 and session.held == answer["sequence"]
    with pytest.raises(PeerError):
        await server.hear()  # the old one was reset
    following.previous, following.opened = server.previous, server.opened
    for step in steps:
        if step.sequence <= session.held:  # the server has it, and answers it here
            await following.answer(step, chunk)
            await received(session, step, chunk)
        else:
            with pytest.raises(StreamLost, match="was lost with a stream"):
                await session.receive(step, chunk, 5.0)
    again = Server()
    answer = GRANT | answer | {"last_receipt": session_end(session)}
    await again.say(wire.InferenceFrame(granted=wire.Granted(**answer)))
    await session.take_up(again.ours)
    assert (await again.hear()).resume.attempt == 2 and session.generation == 2
    return ["moved"]


def session_end(session: SessionStream) -> bytes:
    """The hash of the last receipt that the client has checked."""
    return session._last_receipt


async def test_a_session_goes_on_over_another_stream() -> None:
    assert await moving({}) == ["moved"]
    assert await moving({"sequence": 2}) == ["moved"]
    assert await moving({"sequence": 2, "last_receipt": b"x" * 32}) == ["moved"]  # of a reply that is still to come


@pytest.mark.parametrize(
    ("granted", "outcome"),
    [
        ({"session_epoch": b"x" * 16}, "failed"),
        ({"sequence": 0}, "failed"),
        ({"sequence": 3}, "failed"),
        ({"last_receipt": b"x" * 32}, "cheated"),
        ({"codec": "float16"}, "failed"),
    ],
)
async def test_server_not_going_on_keeps_its_stream(granted: dict[str, Any], outcome: str) -> None:
    assert await moving(granted) == [outcome]
