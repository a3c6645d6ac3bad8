"""A client's end of one session, against a server that says what a test has it say."""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.request import PushedOther, ServerRefused, StreamLost, WireTensor
from petalnode.node.client.session.history import Input
from petalnode.node.client.session.stream import Answer
from petalnode.node.errors import ServerCheated, ServerFailed
from petalnode.node.trust.receipt_log import ReceiptArchive, SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.inference import (
    pushed_step,
    receipt_to_wire,
    sha256,
)
from tests.answering_server import (
    BEFORE,
    GRANT,
    OTHER,
    SERVER,
    SPEC,
    Server,
    asked,
    chunk_of,
    received,
    talking,
)

pytestmark = pytest.mark.virtual_time

# --- steps


async def test_an_answer_is_checked_and_told_of() -> None:
    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    async with talking(log=log) as (server, session):
        chunk, output = chunk_of(tokens=2), chunk_of(5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0, tokens=2)
        step = await asked(session, chunk)
        frame, (payload,) = await server.stream.receive(timeout=1)
        assert frame.step == step and payload == chunk.payload and list(frame.tensors) == [chunk.tensor]
        await trio.sleep(2)
        told = {"handed_on": True, "pushed": True, "draining": True, "queue_us": 250_000, "compute_us": 1_500_000}
        receipt = await server.answer(step, chunk, output, **told)
        answer = await received(session, step, chunk)
        assert answer.chunk.payload == output.payload and answer.receipt == receipt and answer.handed_on
        assert session.draining and session.pushed_steps == 1
        assert (session.bytes_sent, session.bytes_received) == (32, 32)
        timing = session.timing
        assert (timing.peer_id, timing.queue, timing.compute, timing.total) == (SERVER.peer_id, 0.25, 1.5, 0.0)
        step = await asked(session, chunk, 2)
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(3)
                await server.answer(step, chunk)

            nursery.start_soon(later)
            answer = await received(session, step, chunk)
        assert session.timing.total == pytest.approx(3.0) and not session.draining and not answer.handed_on
        assert session.pushed_steps == 1
        first, second = log.entries
        assert first.receipt == receipt and first.output == output.payload
        assert second.step == step and second.input == chunk.payload and log.complete


@pytest.mark.parametrize("begins", [True, False], ids=["beside a thread", "alone"])
async def test_answer_is_shown_early_and_given_checked(begins: bool) -> None:
    async with talking() as (server, session):
        shown: list[bytes] = []

        async def early(step: wire.Step, chunk: WireTensor) -> Answer:
            unchecked = await session.read(step, chunk, 5.0)
            assert unchecked is not None and unchecked.chunk is not None
            for _ in range(2 if begins else 0):  # the second call does nothing
                unchecked.start_check()
            shown.append(bytes(unchecked.chunk.payload))
            return await session.checked(unchecked)

        chunk, output = chunk_of(), chunk_of(5.0, 6.0, 7.0, 8.0)
        step = await asked(session, chunk)
        await server.hear()
        receipt = await server.answer(step, chunk, output)
        answer = await early(step, chunk)
        assert answer.receipt == receipt
        assert shown == [output.payload] == [answer.chunk.payload]

        step = await asked(session, chunk, 1)
        await server.hear()
        await server.answer(step, chunk, signed={"request_hash": bytes(32)})
        with pytest.raises(ServerCheated, match="something else than what was sent"):
            await early(step, chunk)
        assert len(shown) == 2


async def test_a_large_answer_is_checked_as_well() -> None:
    """Off the trio thread."""
    async with talking() as (server, session):
        tokens = 1 << 13
        payload = bytes(16 * tokens)
        tensor = wire.Tensor(shape=[1, tokens, 4], dtype="float32", codec="none", nbytes=len(payload))
        chunk = WireTensor(tensor, payload)
        step = await asked(session, chunk)
        await server.answer(step, chunk)
        assert (await received(session, step, chunk)).chunk.payload == payload
        step = await asked(session, chunk, tokens)
        infinite = WireTensor(chunk.tensor, payload[:-4] + struct.pack("f", math.inf))
        await server.answer(step, chunk, infinite)
        with pytest.raises(ServerFailed, match="NaN or infinity"):
            await session.receive(step, chunk, 5.0)


async def test_large_answer_counts_where_its_check_is_cancelled() -> None:
    """It has been read: without its receipt the next one would look like a lie."""
    async with talking() as (server, session):
        large, chunk = chunk_of(tokens=1 << 13), chunk_of()
        step = await asked(session, large)
        await server.answer(step, large)
        unchecked = await session.read(step, large, 5.0)
        assert unchecked is not None
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.checked(unchecked)
        step = await asked(session, chunk)
        await server.answer(step, chunk)
        await received(session, step, chunk)


async def test_sufficient_receipt_is_checked_alone() -> None:
    async with talking(log=SessionLog(SERVER.peer_id, keeps_tensors=True)) as (server, session):
        chunk = chunk_of()
        step = await asked(session, chunk, receipt_only=True)
        receipt = await server.answer(step, chunk, chunk_of(5.0, 6.0, 7.0, 8.0), receipt_alone=True)
        answer = await received(session, step, chunk)
        assert (answer.receipt, answer.chunk.payload) == (receipt, b"")
        step = await asked(session, chunk, 1, receipt_only=True)
        await server.answer(step, chunk_of(9.0, 9.0, 9.0, 9.0), receipt_alone=True)
        with pytest.raises(ServerCheated, match="something else than what was sent"):
            await session.receive(step, chunk, 5.0)


async def test_a_receipt_names_the_adapter() -> None:
    adapter: Any = SimpleNamespace(hash=b"a" * 32)
    async with talking(spec=replace(SPEC, adapter=adapter)) as (server, session):
        chunk = chunk_of()
        step = await asked(session, chunk)
        await server.answer(step, chunk, signed={"adapter": adapter.hash})
        await received(session, step, chunk)
        step = await asked(session, chunk, 1)
        await server.answer(step, chunk)
        with pytest.raises(ServerCheated):
            await session.receive(step, chunk, 5.0)


async def failing(answer: Callable[[Server, wire.Step, WireTensor], Awaitable[object]]) -> ServerFailed:
    """The error of the second step of a session, which is answered so."""
    async with talking(log=SessionLog(SERVER.peer_id)) as (server, session):
        chunk = chunk_of()
        step = await asked(session, chunk)
        await server.answer(step, chunk)
        await received(session, step, chunk)
        step = await asked(session, chunk, 1)
        await answer(server, step, chunk)
        with pytest.raises(ServerFailed) as caught:
            await session.receive(step, chunk, 5.0)
    assert caught.value.peer_id == SERVER.peer_id
    return caught.value


def other(**fields: Any) -> WireTensor:
    """One token under another header."""
    chunk = chunk_of()
    payload = fields.pop("payload", chunk.payload)
    tensor = wire.Tensor(**{"shape": [1, 1, 4], "dtype": "float32", "codec": "none", "nbytes": len(payload), **fields})
    return WireTensor(tensor, payload)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (chunk_of(1.0, math.nan, 0.0, 0.0), "NaN or infinity"),
        (chunk_of(1.0, 0.0, 0.0, -math.inf), "NaN or infinity"),
        (other(shape=[1, 4, 1]), "answered a tensor"),
        (other(dtype="float16"), "answered a tensor"),
        (other(codec="float16"), "answered a tensor"),
        (other(payload=bytes(12)), "answered 12 bytes for a tensor of 16"),
    ],
)
async def test_useless_answer_is_a_failure_and_no_lie(output: WireTensor, why: str) -> None:
    error = await failing(lambda server, step, chunk: server.answer(step, chunk, output))
    assert why in str(error) and not isinstance(error, ServerCheated)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sequence": 3}, "answered step 3, which nobody has sent"),
        ({"sequence": 1}, "more often than it was asked"),
        ({"position": 1}, "holds 1 tokens after a step"),
        ({"position": 3}, "holds 3 tokens after a step"),
    ],
)
async def test_answer_to_something_else_is_no_lie(fields: dict[str, Any], why: str) -> None:
    async def answer(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        if fields.get("sequence") == 1:  # the reply to the first step, as it was
            fields["receipt"] = receipt_to_wire(replace(server.receipt(step, chunk, b""), sequence=1).signed(SERVER))
        await server.answer(step, chunk, **fields)

    error = await failing(answer)
    if fields.get("sequence") == 1:
        assert isinstance(error, ServerCheated)  # it is not the one that came
    else:
        assert why in str(error) and not isinstance(error, ServerCheated)


async def test_other_frames_are_no_answer() -> None:
    chunk = chunk_of()
    frames: list[tuple[wire.InferenceFrame, list[bytes], str]] = [
        (wire.InferenceFrame(reply=wire.Reply(sequence=2)), [], "something else than one reply"),
        (
            wire.InferenceFrame(reply=wire.Reply(sequence=2), tensors=[wire.Tensor(nbytes=8), wire.Tensor(nbytes=8)]),
            [bytes(8), bytes(8)],
            "something else than one reply",
        ),
        (wire.InferenceFrame(granted=wire.Granted(**GRANT)), [], "something else than one reply"),
        (wire.InferenceFrame(error=wire.Error(code=wire.ERROR_BUSY, message="busy now")), [], "busy now"),
        (wire.InferenceFrame(reply=wire.Reply(sequence=2), tensors=[wire.Tensor(nbytes=17)]), [bytes(17)], "17 bytes"),
    ]
    for frame, payloads, why in frames:
        error = await failing(lambda server, step, chunk: server.say(frame, *payloads))  # noqa: B023
        assert why in str(error) and not isinstance(error, ServerCheated | StreamLost)
        assert isinstance(error, ServerRefused) == frame.HasField("error")
    assert chunk.tokens == 1


async def test_lost_server_is_told_and_late_one_awaited() -> None:
    async def close(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        await server.stream.reset()

    assert isinstance(await failing(close), StreamLost)
    async with talking() as (server, session):
        chunk = chunk_of()
        step = await asked(session, chunk)
        assert await session.receive(step, chunk, 4.0) is None
        assert trio.current_time() == pytest.approx(4.0, abs=0.1)
        await server.answer(step, chunk)
        assert (await received(session, step, chunk)).chunk.payload == chunk.payload
        assert session.timing.total < 1
        with pytest.raises(ServerFailed, match=r"did not answer for 20 s"):
            await session.exchange(Input(1, (), chunk), 1)
        await server.stream.reset()
        with pytest.raises(StreamLost):
            await asked(session, chunk, 1)
        assert session.bytes_sent == 32  # not what did not leave


async def test_skipped_answers_stay_in_the_chain() -> None:
    log = SessionLog(SERVER.peer_id)
    async with talking(log=log) as (server, session):
        chunk = chunk_of()
        steps = [await asked(session, chunk, position) for position in range(3)]
        for step in steps:
            await server.answer(step, chunk)
        answer = await received(session, steps[2], chunk)
        assert answer.receipt.sequence == 3 and session.bytes_received == 48
    assert [entry.receipt.sequence for entry in log.entries] == [1, 2, 3] and log.complete


async def skipping(
    spoil: Callable[[Server, wire.Step, WireTensor], Awaitable[object]], log: SessionLog | None = None
) -> ServerFailed | None:
    """What comes of a session in which the answer to a step that nobody waits for any more is this."""
    async with talking(log=log) as (server, session):
        chunk = chunk_of()
        early, late = await asked(session, chunk), await asked(session, chunk, 1)
        await spoil(server, early, chunk)
        await server.answer(late, chunk)
        try:
            await received(session, late, chunk)
        except ServerFailed as error:
            return error
    return None


async def test_skipped_answers_are_signed_in_order() -> None:
    assert await skipping(lambda server, step, chunk: server.answer(step, chunk)) is None
    for signed in ({"previous_receipt": b"x" * 32}, {"signer": OTHER}):
        error = await skipping(lambda server, step, chunk: server.answer(step, chunk, signed=signed))  # noqa: B023
        assert isinstance(error, ServerCheated) and "do not follow" in str(error)

    async def twice(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        before = server.previous
        receipt = await server.answer(step, chunk)
        server.previous = before
        await server.answer(step, chunk, signed={"time_ms": receipt.time_ms})

    for log in (None, SessionLog(SERVER.peer_id)):
        error = await skipping(twice, log)
        assert "more often than it was asked" in str(error) and not isinstance(error, ServerCheated)

    async def two_answers(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        before = server.previous
        receipt = await server.answer(step, chunk)
        server.previous = before
        await server.answer(step, chunk, signed={"time_ms": receipt.time_ms, "reply_hash": b"x" * 32})

    error = await skipping(two_answers, SessionLog(SERVER.peer_id))
    assert isinstance(error, ServerCheated) and error.proof is not None
    assert [receipt.reply_hash == b"x" * 32 for receipt in error.proof] == [False, True]


# --- steps that the server before has pushed


async def pushing(
    shown: Callable[[Receipt], wire.Receipt | None],
    *,
    targeted: bool = True,
    signs: Callable[[Receipt, Receipt], tuple[bytes, bytes]] = lambda before, pushed: (before.hash(), pushed.hash()),
) -> ServerFailed:
    """A server signs for what it was pushed, which is not what the server before it answered to the client. `signs`:
    which receipt the client names to it, and which it signs for."""
    async with talking(log=SessionLog(SERVER.peer_id, keeps_tensors=True)) as (server, session):
        chunk, lie = chunk_of(), chunk_of(9.0, 9.0, 9.0, 9.0)
        before = replace(server.receipt(wire.Step(sequence=1), chunk, b""), upstream_receipt=b"").signed(BEFORE)
        pushed = replace(before, reply_hash=sha256(lie.payload)).signed(BEFORE)
        if targeted:
            assert session.target().sequence == 1
        step, told = (
            wire.Step(sequence=1, position=0, route_epoch=1, previous_receipt=named) for named in signs(before, pushed)
        )
        extra = {} if (upstream := shown(pushed)) is None else {"upstream": upstream}
        await server.answer(told, lie, pushed=True, position=1, **extra)
        with pytest.raises(ServerFailed) as caught:
            await session.receive(step, chunk, 5.0)
    return caught.value


async def test_pushed_step_is_logged_with_its_input() -> None:
    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    async with talking(log=log) as (server, session):
        chunk = chunk_of()
        assert session.target().sequence == 1
        step = wire.Step(sequence=1, position=0, route_epoch=1, previous_receipt=b"b" * 32)
        receipt = await server.answer(step, chunk, pushed=True)
        await received(session, step, chunk)
        (entry,) = log.entries
        assert (entry.receipt, entry.step, entry.input, log.complete) == (receipt, step, chunk.payload, True)


async def test_unawaited_push_is_the_next_ones_question() -> None:
    archive = ReceiptArchive(shared_bytes=1 << 20)
    first, second = archive.session(SERVER.peer_id), archive.session(OTHER.peer_id)
    second.begin(wire.Open(nonce=b"n" * 16), wire.Granted())
    async with talking(log=first) as (server, session):
        chunk, output = chunk_of(), chunk_of(5.0, 6.0, 7.0, 8.0)
        target = wire.PushTarget(peer_id=peer_id_to_bytes(OTHER.peer_id), nonce=b"n" * 16, sequence=7)
        early = await asked(session, chunk, targets=[target])
        late = await asked(session, chunk)
        receipt = await server.answer(early, chunk, output)
        await server.answer(late, chunk)
        await received(session, late, chunk)
        assert second.waiting(7) == (pushed_step(early, receipt.hash()), output.tensor, output.payload)
        assert second.waiting(late.sequence) is None and first.complete


async def test_server_pushed_otherwise_shows_by_whom() -> None:
    error = await pushing(receipt_to_wire)
    assert isinstance(error, PushedOther) and error.upstream is not None
    assert error.upstream.is_signed_by(BEFORE.peer_id)
    assert isinstance(await pushing(lambda receipt: None), PushedOther)
    same = await pushing(lambda receipt: None, signs=lambda before, pushed: (before.hash(), before.hash()))
    assert isinstance(same, PushedOther), "what the server before it says of the step is not signed"


async def test_push_that_nobody_can_have_made_is_lie() -> None:
    assert isinstance(await pushing(receipt_to_wire, targeted=False), ServerCheated)
    other = await pushing(lambda receipt: receipt_to_wire(replace(receipt, time_ms=1).signed(BEFORE)))
    assert isinstance(other, ServerCheated) and "is not the one that it signed for" in str(other)
    for named in (True, False):  # it names no receipt, or one though there is no server before it
        error = await pushing(
            receipt_to_wire,
            signs=lambda before, pushed: (before.hash(), b"") if named else (b"", pushed.hash()),  # noqa: B023
        )
        assert isinstance(error, ServerCheated), named


@pytest.mark.parametrize(("batch", "receipt_only", "misled"), [(1, False, False), (2, False, True), (1, True, True)])
async def test_who_may_have_got_other_rows_is_misled(batch: int, receipt_only: bool, misled: bool) -> None:
    async with talking(log=SessionLog(SERVER.peer_id, keeps_tensors=True), spec=replace(SPEC, batch=batch)) as (
        server,
        session,
    ):
        chunk = chunk_of()
        early = await asked(session, chunk, previous_receipt=b"b" * 32, receipt_only=receipt_only)
        late = await asked(session, chunk)
        await server.answer(early, chunk_of(9.0, 9.0, 9.0, 9.0), pushed=True)
        await server.answer(late, chunk)
        await received(session, late, chunk)
        assert session.misled == misled


async def test_push_names_server_session_and_own_number() -> None:
    async with talking(nonce=b"n" * 16) as (_, session):
        targets = [session.target() for _ in range(2)]
        assert [target.sequence for target in targets] == [1, 2] and session.next_sequence() == 3
        assert {target.peer_id for target in targets} == {peer_id_to_bytes(SERVER.peer_id)}
        assert {target.nonce for target in targets} == {b"n" * 16}


async def test_pushed_output_is_pushed_no_second_time() -> None:
    """Who signs for it makes it up: an honest server refuses it."""
    async with talking() as (server, session):
        chunk = chunk_of()
        first, second, third = (
            server.receipt(wire.Step(sequence=number), chunk, bytes([number]), signer=BEFORE) for number in (1, 2, 3)
        )
        for position, receipt in enumerate((first, second)):
            target = session.target()
            step = wire.Step(sequence=target.sequence, position=position, previous_receipt=receipt.hash())
            await server.answer(step, chunk, pushed=True)
            await received(session, step, chunk)
        target = session.target()
        step = wire.Step(sequence=target.sequence, position=2, previous_receipt=third.hash())
        told = wire.Step(sequence=target.sequence, position=2, previous_receipt=first.hash())
        await server.answer(told, chunk, pushed=True, upstream=receipt_to_wire(first))
        with pytest.raises(ServerCheated, match="for an earlier one once more"):
            await session.receive(step, chunk, 5.0)


# --- leaving


async def test_who_closes_says_so_and_leavers_do_not() -> None:
    async with talking() as (server, session):
        await session.close()
        assert (await server.hear()).WhichOneof("body") == "close"
        with pytest.raises(PeerError):
            await server.hear()
    async with talking() as (server, session):
        await session.leave()
        with pytest.raises(PeerError):
            await server.hear()
        await session.wait_lost()
        await session.close()  # never raises
