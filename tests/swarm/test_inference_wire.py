"""What a live server says to clients that do wrong, and that it answers the next one as before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.inference import hash_of_step, pledge_from_wire, receipt_from_wire, root_of
from tests.messages import tensor
from tests.node_inspection import raw_of
from tests.swarm.memory_pool import MemoryPool
from tests.swarm.raw import HIDDEN, RawSession, Run, values

BAD, MODEL, SPAN = wire.ERROR_BAD_REQUEST, wire.ERROR_UNKNOWN_MODEL, wire.ERROR_SPAN_NOT_HOSTED
FULL, LONG, UNSUPPORTED = wire.ERROR_CACHE_FULL, wire.ERROR_TOO_LONG, wire.ERROR_UNSUPPORTED
_right_answers: list[bytes] = []


@pytest.fixture(scope="module")
def server(pool: MemoryPool) -> MemoryServer:
    started = pool.start("0:2", cache_tokens=100_000)
    started.ready  # noqa: B018  (waits)
    return started


@pytest.fixture(autouse=True)
def _the_server_lives_on(server: MemoryServer, run: Run) -> Iterator[None]:
    """After whatever a test did to it, the same server answers the same question with the same bytes."""
    yield

    async def answer(node: Swarm) -> bytes:
        session = await RawSession.opened(node, server.ready)
        frame, (payload,) = await session.step(1, 0, values(3))
        assert receipt_from_wire(frame.reply.receipt).is_signed_by(server.peer_id)
        await session.close()
        return payload

    _right_answers.append(run(answer))
    assert server.alive
    assert _right_answers[-1] == _right_answers[0]


OPENS: dict[str, tuple[wire.ErrorCode.ValueType, dict[str, Any]]] = {
    "another model": (MODEL, {"model_version": bytes(32)}),
    "a version that is none": (BAD, {"model_version": b"short"}),
    "no version": (BAD, {"model_version": b""}),
    "blocks that are elsewhere": (SPAN, {"span": (2, 4)}),
    "blocks beyond": (SPAN, {"span": (0, 3)}),
    "blocks far away": (SPAN, {"span": (2**31, 2**32 - 1)}),
    "a span backwards": (BAD, {"span": (2, 1)}),
    "an empty span": (BAD, {"span": (1, 1)}),
    "no rows": (BAD, {"batch": 0}),
    "too many rows": (BAD, {"batch": 1 << 20}),
    "no length": (BAD, {"max_length": 0}),
    "longer than the model": (LONG, {"max_length": 4097}),
    "absurdly long": (BAD, {"max_length": 2**32 - 1}),
    "more cache than there is": (FULL, {"max_length": 4096, "batch": 100}),
    "an unknown codec": (UNSUPPORTED, {"codec": "zip"}),
    "no codec": (UNSUPPORTED, {"codec": ""}),
    "an unknown dtype": (UNSUPPORTED, {"activation_dtype": "float64"}),
    "an adapter": (UNSUPPORTED, {"adapter": b"a" * 32}),
    "another protocol": (UNSUPPORTED, {"protocol_version": 2}),
    "no nonce": (BAD, {"nonce": b""}),
    "a long nonce": (BAD, {"nonce": bytes(64)}),
    "padding for another batch": (BAD, {"left_padding": [1, 2]}),
    "padding over everything": (BAD, {"left_padding": [64]}),
}


@pytest.mark.parametrize("name", OPENS)
async def test_an_open_that_cannot_be_is_refused(name: str, server: MemoryServer, raw_node: Swarm) -> None:
    code, fields = OPENS[name]
    session = await RawSession.connect(raw_node, server.ready)
    answer = await session.open(**fields)
    assert answer.WhichOneof("body") == "error", answer
    assert answer.error.code == code and answer.error.message
    with pytest.raises(PeerError):
        await session.receive()


FIRST_FRAMES = {
    "step": wire.InferenceFrame(step=wire.Step(sequence=1)),
    "close": wire.InferenceFrame(close=wire.Close()),
    "reply": wire.InferenceFrame(reply=wire.Reply(sequence=1)),
    "granted": wire.InferenceFrame(granted=wire.Granted(credits=1000)),
    "error": wire.InferenceFrame(error=wire.Error(code=BAD, message="no, you")),
    "nothing": wire.InferenceFrame(),
}


@pytest.mark.parametrize("name", FIRST_FRAMES)
@pytest.mark.parametrize("when", ["before Open", "in a session"])
async def test_a_frame_out_of_place_is_refused(name: str, when: str, server: MemoryServer, raw_node: Swarm) -> None:
    if when == "before Open":
        session = await RawSession.connect(raw_node, server.ready)
    else:
        session = await RawSession.opened(raw_node, server.ready)
    await session.stream.send(FIRST_FRAMES[name], timeout=60)
    if name == "close" and when == "in a session":
        with pytest.raises(PeerError):
            await session.receive()
        return
    frame, _ = await session.receive()
    assert frame.error.code == BAD, frame


@pytest.mark.parametrize("epoch", [b"", b"e" * 16])
async def test_a_session_that_never_was_cannot_be_resumed(epoch: bytes, server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.connect(raw_node, server.ready)
    resume = wire.Resume(nonce=session.nonce, session_epoch=epoch)
    await session.stream.send(wire.InferenceFrame(resume=resume), timeout=60)
    frame, _ = await session.receive()
    assert frame.error.code == wire.ERROR_NOT_FOUND, frame


def float_bytes(count: int, first: float) -> bytes:
    import struct

    return struct.pack("<f", first) + bytes(4 * (count - 1))


# After one step of 3 tokens in a session of 1 row and 64 tokens: what is sent, and the code that comes.
STEPS: dict[str, tuple[wire.ErrorCode.ValueType, dict[str, Any]]] = {
    "a position ahead": (BAD, {"position": 4}),
    "a position far ahead": (BAD, {"position": 2**63}),
    "no sequence": (BAD, {"sequence": 0}),
    "an old route epoch": (BAD, {"route_epoch": 0}),
    "another hidden size": (BAD, {"shape": [1, 2, 32]}),
    "another batch": (BAD, {"shape": [2, 1, HIDDEN], "payload": values(2)}),
    "two dimensions": (BAD, {"shape": [1, HIDDEN]}),
    "four dimensions": (BAD, {"shape": [1, 1, 1, HIDDEN]}),
    "no dimensions": (BAD, {"shape": []}),
    "no tokens": (BAD, {"shape": [1, 0, HIDDEN], "payload": b""}),
    "another dtype": (BAD, {"dtype": "float16", "shape": [1, 2, HIDDEN]}),
    "an unknown dtype": (BAD, {"dtype": "float7"}),
    "another codec": (BAD, {"codec": "float16", "shape": [1, 2, HIDDEN]}),
    "a shape larger than its bytes": (BAD, {"shape": [1, 2, HIDDEN]}),
    "a shape that overflows": (BAD, {"shape": [1, 2**32 - 1, HIDDEN]}),
    "a byte too many": (BAD, {"shape": [1, 1, HIDDEN], "payload": values(1) + b"x"}),
    "too many tokens for a step": (BAD, {"payload": bytes(2049 * 4 * HIDDEN)}),
    "a reorder of other rows": (BAD, {"reorder": [0, 0]}),
    "a reorder out of range": (BAD, {"reorder": [1]}),
    "NaN": (BAD, {"payload": float_bytes(HIDDEN, float("nan"))}),
    "infinity": (BAD, {"payload": float_bytes(HIDDEN, float("-inf"))}),
}


@pytest.mark.parametrize("name", STEPS)
async def test_a_step_that_cannot_be_ends_the_session(name: str, server: MemoryServer, raw_node: Swarm) -> None:
    code, changed = STEPS[name]
    session = await RawSession.opened(raw_node, server.ready)
    await session.step(1, 0, values(3))
    how = {"sequence": 2, "position": 3, "payload": values(1)} | changed
    frame, _ = await session.step(**how)
    assert frame.WhichOneof("body") == "error", frame
    assert frame.error.code == code and frame.error.message
    with pytest.raises(PeerError):
        await session.step(2, 3, values(1))


@pytest.mark.parametrize("count", [0, 2])
async def test_a_step_has_one_tensor(count: int, server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready)
    step = wire.Step(sequence=1, position=0, route_epoch=1)
    frame = wire.InferenceFrame(step=step, tensors=[tensor(1, 1, HIDDEN)] * count)
    await session.stream.send(frame, [values(1)] * count, timeout=60)
    answer, _ = await session.receive()
    assert answer.error.code == BAD


async def test_too_many_tokens_leave_the_session_open(server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready, max_length=5)
    await session.step(1, 0, values(3))
    frame, _ = await session.step(2, 3, values(3))
    assert frame.error.code == LONG
    frame, _ = await session.step(2, 3, values(2))
    assert frame.reply.position == 5


async def test_a_repeated_step_gets_the_very_same_reply(server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready)
    first = await session.step(1, 0, values(3))
    second = await session.step(2, 3, values(1, seed=1))
    for sequence, position, payload, expected in (
        (2, 3, values(1, seed=1), second),
        (1, 0, values(3), first),
        (2, 3, values(1, seed=1), second),
    ):
        frame, payloads = await session.step(sequence, position, payload)
        assert frame.SerializeToString(deterministic=True) == expected[0].SerializeToString(deterministic=True)
        assert payloads == expected[1]
    # The repeats were not computed: the session goes on where it was.
    frame, _ = await session.step(3, 4, values(1))
    assert frame.reply.position == 5
    assert frame.reply.receipt.previous_receipt == receipt_from_wire(second[0].reply.receipt).hash()


@pytest.mark.parametrize("changed", [{"payload": values(3, seed=9)}, {"position": 1}, {"reorder": [0]}])
async def test_a_repeated_step_with_other_content_is_refused(
    changed: dict[str, Any], server: MemoryServer, raw_node: Swarm
) -> None:
    session = await RawSession.opened(raw_node, server.ready)
    await session.step(1, 0, values(3))
    frame, _ = await session.step(**{"sequence": 1, "position": 0, "payload": values(3)} | changed)
    assert frame.error.code == BAD


async def test_only_the_last_replies_are_kept(server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready)
    for sequence in range(1, session.granted.credits + 2):
        await session.step(sequence, sequence - 1, values(1))
    frame, _ = await session.step(2, 1, values(1))
    assert frame.reply.sequence == 2
    frame, _ = await session.step(1, 0, values(1))
    assert frame.error.code == BAD


async def test_receipts_chain_what_was_asked_and_answered(server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready, batch=2)
    pledge = pledge_from_wire(session.granted.pledge)
    assert pledge.is_signed and pledge.server == server.peer_id and pledge.deposit == 0
    previous = root_of(session.terms, raw_node.peer_id, session.granted.session_epoch, pledge.hash())
    for sequence, position, tokens, reorder in ((1, 0, 3, []), (2, 3, 1, [1, 1]), (3, 2, 1, [])):
        sent = values(tokens, rows=2, seed=sequence)
        frame, (payload,) = await session.step(sequence, position, sent, reorder=reorder)
        receipt = receipt_from_wire(frame.reply.receipt)
        step = wire.Step(sequence=sequence, position=position, reorder=reorder, route_epoch=1)
        tensor = wire.Tensor(shape=[2, tokens, HIDDEN], dtype="float32", codec="none")
        assert receipt.is_signed_by(server.peer_id) and pledge.covers(receipt)
        assert receipt.request_hash == hash_of_step(step, tensor, hashlib.sha256(sent).digest())
        assert receipt.reply_hash == hashlib.sha256(payload).digest()
        assert receipt.previous_receipt == previous
        assert receipt.client == raw_node.peer_id and receipt.nonce == session.nonce
        assert receipt.session_epoch == session.granted.session_epoch
        assert receipt.model_version.hex() == server.ready["model_version"] and receipt.span == (0, 2)
        assert receipt.sequence == sequence and receipt.upstream_receipt == b""
        assert frame.reply.position == position + tokens
        previous = receipt.hash()


async def test_two_sessions_have_different_epochs(server: MemoryServer, raw_node: Swarm) -> None:
    first, second = [await RawSession.opened(raw_node, server.ready) for _ in range(2)]
    assert first.granted.session_epoch != second.granted.session_epoch


async def test_many_steps_at_once_are_answered_in_order(server: MemoryServer, raw_node: Swarm) -> None:
    session = await RawSession.opened(raw_node, server.ready)
    for sequence in range(1, 41):
        await session.send_step(sequence, sequence - 1, values(1))
    for sequence in range(1, 41):
        frame, _ = await session.receive()
        assert frame.reply.sequence == sequence


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xff\xff\xff\xff\xff", id="a length that is no length"),
        pytest.param(b"\xff\xff\x7f" + bytes(100), id="a header too large"),
        pytest.param(b"\x05\xff\xff\xff\xff\xff", id="a header that is no message"),
        pytest.param(b"\x00" * 200, id="empty frames"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: petals\r\n\r\n", id="another protocol"),
        pytest.param(b"\x07\x7a\x05\x20\xff\xff\xff\x7f", id="a payload of 256 MiB"),
        pytest.param(b"\x0c\x7a\x0a\x20" + b"\xff" * 8 + b"\x01" + bytes(3), id="a payload beyond counting"),
        pytest.param(b"\x64half a header", id="half a header"),
        pytest.param(b"\x05\x7a\x03\x20\xe8\x07half a payload", id="half a payload"),
        pytest.param(b"", id="nothing at all"),
    ],
)
@pytest.mark.parametrize("when", ["first", "in a session"])
async def test_bytes_that_are_no_message_end_the_stream(
    data: bytes, when: str, server: MemoryServer, raw_node: Swarm
) -> None:
    connect = RawSession.connect if when == "first" else RawSession.opened
    session = await connect(raw_node, server.ready)
    raw = raw_of(session.stream)
    if data:
        await raw.write(data)
    await raw.close()
    # An error or the end; never an answer.
    try:
        frame, _ = await session.receive()
    except PeerError:
        return
    assert frame.WhichOneof("body") == "error"


async def test_random_bytes_do_no_harm(server: MemoryServer, raw_node: Swarm) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        session = await RawSession.connect(raw_node, server.ready)
        if seed % 2:
            await session.open()
        data = bytearray(chance.randbytes(chance.choice([1, 5, 80, 3000])))
        if seed % 3 == 0:  # a length that fits, so that the header is read
            data = bytearray([min(127, len(data))]) + data
        await raw_of(session.stream).write(bytes(data))
        if seed % 5:
            await raw_of(session.stream).close()
        else:
            await session.stream.reset()


async def test_right_message_with_flipped_bit_does_no_harm(server: MemoryServer, raw_node: Swarm) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        session = await RawSession.opened(raw_node, server.ready)
        step = wire.Step(sequence=1, position=0, route_epoch=1)
        header = bytearray(wire.InferenceFrame(step=step, tensors=[tensor(1, 1, HIDDEN)]).SerializeToString())
        header[chance.randrange(len(header))] ^= 1 << chance.randrange(8)
        await raw_of(session.stream).write(bytes([len(header)]) + bytes(header) + values(1))
        await raw_of(session.stream).close()
        try:
            await session.receive()
        except PeerError:
            pass


async def test_streams_that_say_nothing_hold_up_nobody(server: MemoryServer, raw_node: Swarm) -> None:
    silent = [await RawSession.connect(raw_node, server.ready) for _ in range(30)]
    session = await RawSession.opened(raw_node, server.ready)
    frame, _ = await session.step(1, 0, values(1))
    assert frame.reply.position == 1
    for held in silent:
        await held.stream.reset()
