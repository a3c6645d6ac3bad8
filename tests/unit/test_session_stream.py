"""A client's end of one session, against a server that says what a test has it say."""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from petalnode.crypto.credits import Clearing, Transfer
from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.crypto.receipts import Receipt
from petalnode.crypto.statement import now_ms
from petalnode.node.client.deadlines import PATH_KEEP
from petalnode.node.client.request import PushedOther, ServerClaims, ServerRefused, StreamLost, WireTensor
from petalnode.node.client.session.stream import Answer, SessionSpec, SessionStream
from petalnode.node.errors import ServerCheated, ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing import message_streams, run_autojumping
from petalnode.node.trust.receipt_log import ReceiptArchive, SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import PROTOCOL_VERSION, Span
from petalnode.protocols.inference import (
    MAX_SEQUENCE,
    hash_of_step,
    pledge_to_wire,
    pushed_step,
    receipt_to_wire,
    root_of,
    sha256,
)
from tests.statements import pledge_of

SERVER, CLIENT, BEFORE, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in range(41, 45))
SPEC = SessionSpec(b"m" * 32, Span(2, 4), batch=1, max_length=64, cache_wait=3.0, step_timeout=20.0)
HOP = Hop(SERVER.peer_id, SPEC.span)
EPOCH = b"e" * 16
GRANT: dict[str, Any] = {
    "session_epoch": EPOCH,
    "codec": "none",
    "dtype": "float32",
    "quantisation": "none",
    "max_step_tokens": 8,
    "keep_ms": 5000,
}


def chunk_of(*values: float, tokens: int = 1) -> WireTensor:
    payload = struct.pack(f"{4 * tokens}f", *(values or (1.0, 2.0, 3.0, 4.0) * tokens))
    tensor = wire.Tensor(shape=[1, tokens, 4], dtype="float32", codec="none", nbytes=len(payload))
    return WireTensor(tensor, payload)


class Server:
    """The other end of a session; its blocks change nothing.

    Attributes:
        previous: the hash of its last receipt.
        heard: what the client said, in order.
    """

    def __init__(self) -> None:
        self.ours, self.stream = message_streams(wire.InferenceFrame, CLIENT.peer_id, SERVER.peer_id)
        self.previous = b""
        self.heard: list[wire.InferenceFrame] = []
        self.opened = wire.Open()

    async def hear(self) -> wire.InferenceFrame:
        frame, _ = await self.stream.receive(timeout=10)
        self.heard.append(frame)
        return frame

    async def say(self, frame: wire.InferenceFrame, *payloads: bytes | bytearray) -> None:
        await self.stream.send(frame, payloads, timeout=10)

    async def grant(self, **changed: Any) -> None:
        frame = await self.hear()
        if frame.WhichOneof("body") == "open":
            self.opened.CopyFrom(frame.open)
            self.previous = root_of(self.opened, CLIENT.peer_id, EPOCH)
        await self.say(wire.InferenceFrame(granted=wire.Granted(**GRANT | changed)))

    def receipt(self, step: wire.Step, chunk: WireTensor, output: bytes, **changed: Any) -> Receipt:
        signer = changed.pop("signer", SERVER)
        made = Receipt(
            protocol_version=PROTOCOL_VERSION,
            model_version=SPEC.model_version,
            span=(SPEC.span.start, SPEC.span.end),
            dtype="float32",
            quantisation="none",
            client=CLIENT.peer_id,
            nonce=self.opened.nonce,
            session_epoch=EPOCH,
            sequence=step.sequence,
            request_hash=hash_of_step(step, chunk.tensor, sha256(chunk.payload)),
            reply_hash=sha256(output),
            previous_receipt=self.previous,
            upstream_receipt=step.previous_receipt,
            time_ms=now_ms(),
        )
        return replace(made, **changed).signed(signer)

    async def answer(
        self, step: wire.Step, chunk: WireTensor, output: WireTensor | None = None, **changed: Any
    ) -> Receipt:
        """A reply to `step`, with other fields of the reply or, in `signed`, of the receipt."""
        output = output or chunk
        receipt = self.receipt(step, chunk, bytes(output.payload), **changed.pop("signed", {}))
        self.previous = receipt.hash()
        usual = {"sequence": step.sequence, "position": step.position + chunk.tokens}
        reply = wire.Reply(**{**usual, "receipt": receipt_to_wire(receipt), **changed})
        await self.say(wire.InferenceFrame(reply=reply, tensors=[output.tensor]), output.payload)
        return receipt


def session_with(server: Server, spec: SessionSpec = SPEC, **options: Any) -> SessionStream:
    return SessionStream(server.ours, HOP, spec, CLIENT.peer_id, **options)


async def opened(server: Server, session: SessionStream, **granted: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.grant(**granted))
        await session.open(1, None, None)


def talk(main: Callable[[Server, SessionStream], Awaitable[None]], **options: Any) -> None:
    """Runs `main` with a session that is open."""

    async def run() -> None:
        server = Server()
        session = session_with(server, **options)
        await opened(server, session)
        await main(server, session)

    run_autojumping(run)


async def asked(session: SessionStream, chunk: WireTensor, position: int = 0, **fields: Any) -> wire.Step:
    step = wire.Step(sequence=session.next_sequence(), position=position, route_epoch=1, **fields)
    await session.send(step, chunk)
    return step


async def received(session: SessionStream, step: wire.Step, chunk: WireTensor) -> Answer:
    answer = await session.receive(step, chunk, 5.0)
    assert answer is not None
    return answer


# --- opening


def test_what_is_asked_for_is_what_the_session_is_for() -> None:
    async def main() -> None:
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

    run_autojumping(main)


def test_a_session_without_neighbours_and_points_names_none() -> None:
    async def main(server: Server, session: SessionStream) -> None:
        assert not server.opened.upstream and not server.opened.downstream and not server.opened.HasField("clearing")
        assert server.opened.keep_ms == round(PATH_KEEP * 1000)
        assert not session.priority and session.kept == 5.0 and session.max_step_tokens == 8
        assert session.direct and session.uses(server.ours) and not session.uses(server.stream)

    talk(main)


@pytest.mark.parametrize(
    ("granted", "why"),
    [
        ({"codec": "float16"}, "granted codec 'float16' instead of 'none'"),
        ({"max_step_tokens": 0}, "granted codec"),
        ({"session_epoch": b"short"}, "something else than a grant"),
    ],
)
def test_a_grant_that_cannot_be_is_a_failure(granted: dict[str, Any], why: str) -> None:
    async def main() -> None:
        server = Server()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.grant(**granted))
            with pytest.raises(ServerFailed, match=why) as caught:
                await session_with(server).open(1, None, None)
            assert not isinstance(caught.value, ServerCheated | StreamLost)

    run_autojumping(main)


def opening_against(*frames: wire.InferenceFrame, claims: ServerClaims | None = None) -> ServerFailed:
    """What a client makes of these answers to Open."""

    async def main() -> ServerFailed:
        server = Server()
        for frame in frames:
            await server.say(frame)
        if not frames:
            await server.stream.close()
        with pytest.raises(ServerFailed) as caught:
            await session_with(server, claims=claims).open(1, None, None)
        assert caught.value.peer_id == SERVER.peer_id
        return caught.value

    return run_autojumping(main)


def test_answers_that_are_no_grant() -> None:
    refused = opening_against(wire.InferenceFrame(error=wire.Error(code=wire.ERROR_CACHE_FULL, message="full")))
    assert isinstance(refused, ServerRefused) and refused.code == wire.ERROR_CACHE_FULL and "full" in str(refused)
    other = opening_against(wire.InferenceFrame(reply=wire.Reply()))
    assert "something else than a grant" in str(other) and not isinstance(other, ServerCheated | StreamLost)
    assert isinstance(opening_against(), StreamLost)


def test_a_grant_that_is_not_what_was_announced_is_a_lie() -> None:
    grant = wire.InferenceFrame(granted=wire.Granted(**GRANT))
    claims = ServerClaims(SPEC.model_version, Span(0, 4), "bfloat16", "none")
    assert isinstance(opening_against(grant, claims=claims), ServerCheated)
    now = now_ms()
    pledge = pledge_of(SERVER, OTHER, span=(0, 4), quantisation="none", from_ms=now - 1000, until_ms=now + 60_000)
    for broken in (
        replace(pledge, model_version=b"x" * 32).signed(SERVER),
        replace(pledge, model_version=SPEC.model_version, dtype="float32", span=(0, 3)).signed(SERVER),
        replace(pledge, model_version=SPEC.model_version, dtype="float32", deposit=1),
    ):
        granted = wire.Granted(**GRANT, pledge=pledge_to_wire(broken))
        assert isinstance(opening_against(wire.InferenceFrame(granted=granted)), ServerCheated)


# --- taking a session up


def resuming(granted: dict[str, Any]) -> tuple[int, SessionStream]:
    async def main() -> tuple[int, SessionStream]:
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

    return run_autojumping(main)


def test_a_session_of_an_earlier_process_goes_on_where_it_was() -> None:
    position, session = resuming({})
    assert position == 30 and session.epoch == EPOCH
    with pytest.raises(ServerFailed, match="another session, or at no step"):
        resuming({"session_epoch": b"x" * 16})
    with pytest.raises(ServerFailed, match="another session, or at no step"):
        resuming({"sequence": MAX_SEQUENCE + 1})
    resuming({"sequence": MAX_SEQUENCE - 1})


def moving(granted: dict[str, Any], unanswered: int = 1) -> list[str]:
    """A session of one answered step and some that are not goes on over another stream; what came of it."""

    async def main() -> list[str]:
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

    return run_autojumping(main)


def session_end(session: SessionStream) -> bytes:
    """The hash of the last receipt that the client has checked."""
    return session._last_receipt


def test_a_session_goes_on_over_another_stream() -> None:
    assert moving({}) == ["moved"]
    assert moving({"sequence": 2}) == ["moved"]
    assert moving({"sequence": 2, "last_receipt": b"x" * 32}) == ["moved"]  # of a reply that is still to come


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
def test_a_server_that_does_not_go_on_where_it_was_keeps_the_old_stream(granted: dict[str, Any], outcome: str) -> None:
    assert moving(granted) == [outcome]


# --- steps


def test_an_answer_is_checked_and_told_of() -> None:
    async def main(server: Server, session: SessionStream) -> None:
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

    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    talk(main, log=log)


@pytest.mark.parametrize("begins", [True, False], ids=["beside a thread", "alone"])
def test_an_answer_is_shown_early_and_given_only_when_it_is_checked(begins: bool) -> None:
    async def main(server: Server, session: SessionStream) -> None:
        shown: list[bytes] = []

        def early(answer: WireTensor, begin: Callable[[], None]) -> None:
            for _ in range(2 if begins else 0):  # the second call does nothing
                begin()
            shown.append(bytes(answer.payload))

        chunk, output = chunk_of(), chunk_of(5.0, 6.0, 7.0, 8.0)
        step = await asked(session, chunk)
        await server.hear()
        receipt = await server.answer(step, chunk, output)
        answer = await session.receive(step, chunk, 5.0, early)
        assert answer is not None and answer.receipt == receipt
        assert shown == [output.payload] == [answer.chunk.payload]

        step = await asked(session, chunk, 1)
        await server.hear()
        await server.answer(step, chunk, signed={"request_hash": bytes(32)})
        with pytest.raises(ServerCheated, match="something else than what was sent"):
            await session.receive(step, chunk, 5.0, early)
        assert len(shown) == 2

    talk(main)


def test_a_large_answer_is_checked_as_well() -> None:
    """Off the trio thread."""

    async def main(server: Server, session: SessionStream) -> None:
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

    talk(main)


def failing(answer: Callable[[Server, wire.Step, WireTensor], Awaitable[object]]) -> ServerFailed:
    """The error of the second step of a session, which is answered so."""
    errors: list[ServerFailed] = []

    async def main(server: Server, session: SessionStream) -> None:
        chunk = chunk_of()
        step = await asked(session, chunk)
        await server.answer(step, chunk)
        await received(session, step, chunk)
        step = await asked(session, chunk, 1)
        await answer(server, step, chunk)
        with pytest.raises(ServerFailed) as caught:
            await session.receive(step, chunk, 5.0)
        errors.append(caught.value)

    talk(main, log=SessionLog(SERVER.peer_id))
    assert errors[0].peer_id == SERVER.peer_id
    return errors[0]


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
def test_an_answer_of_no_use_is_a_failure_and_no_lie(output: WireTensor, why: str) -> None:
    error = failing(lambda server, step, chunk: server.answer(step, chunk, output))
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
def test_an_answer_to_something_else_is_a_failure_and_no_lie(fields: dict[str, Any], why: str) -> None:
    async def answer(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        if fields.get("sequence") == 1:  # the reply to the first step, as it was
            fields["receipt"] = receipt_to_wire(replace(server.receipt(step, chunk, b""), sequence=1).signed(SERVER))
        await server.answer(step, chunk, **fields)

    error = failing(answer)
    if fields.get("sequence") == 1:
        assert isinstance(error, ServerCheated)  # it is not the one that came
    else:
        assert why in str(error) and not isinstance(error, ServerCheated)


def test_other_frames_are_no_answer() -> None:
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
        error = failing(lambda server, step, chunk: server.say(frame, *payloads))  # noqa: B023
        assert why in str(error) and not isinstance(error, ServerCheated | StreamLost)
        assert isinstance(error, ServerRefused) == frame.HasField("error")
    assert chunk.tokens == 1


def test_a_server_that_is_gone_or_does_not_read_is_lost_and_one_that_is_late_is_waited_for() -> None:
    async def close(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        await server.stream.reset()

    assert isinstance(failing(close), StreamLost)

    async def main(server: Server, session: SessionStream) -> None:
        chunk = chunk_of()
        step = await asked(session, chunk)
        assert await session.receive(step, chunk, 4.0) is None
        assert trio.current_time() == pytest.approx(4.0, abs=0.1)
        await server.answer(step, chunk)
        assert (await received(session, step, chunk)).chunk.payload == chunk.payload
        assert session.timing.total < 1
        with pytest.raises(ServerFailed, match=r"did not answer for 20 s"):
            await session.exchange(chunk, 1, (), 1)
        await server.stream.reset()
        with pytest.raises(StreamLost):
            await asked(session, chunk, 1)
        assert session.bytes_sent == 32  # not what did not leave

    talk(main)


def test_answers_that_nobody_waits_for_are_skipped_and_stay_in_the_chain() -> None:
    async def main(server: Server, session: SessionStream) -> None:
        chunk = chunk_of()
        steps = [await asked(session, chunk, position) for position in range(3)]
        for step in steps:
            await server.answer(step, chunk)
        answer = await received(session, steps[2], chunk)
        assert answer.receipt.sequence == 3 and session.bytes_received == 48

    log = SessionLog(SERVER.peer_id)
    talk(main, log=log)
    assert [entry.receipt.sequence for entry in log.entries] == [1, 2, 3] and log.complete


def skipping(
    spoil: Callable[[Server, wire.Step, WireTensor], Awaitable[object]], log: SessionLog | None = None
) -> ServerFailed | None:
    """What comes of a session in which the answer to a step that nobody waits for any more is this."""
    outcome: list[ServerFailed] = []

    async def main(server: Server, session: SessionStream) -> None:
        chunk = chunk_of()
        early, late = await asked(session, chunk), await asked(session, chunk, 1)
        await spoil(server, early, chunk)
        await server.answer(late, chunk)
        try:
            await received(session, late, chunk)
        except ServerFailed as error:
            outcome.append(error)

    talk(main, log=log)
    return outcome[0] if outcome else None


def test_what_is_skipped_is_signed_in_its_order_and_comes_as_often_as_it_was_asked() -> None:
    assert skipping(lambda server, step, chunk: server.answer(step, chunk)) is None
    for signed in ({"previous_receipt": b"x" * 32}, {"signer": OTHER}):
        error = skipping(lambda server, step, chunk: server.answer(step, chunk, signed=signed))  # noqa: B023
        assert isinstance(error, ServerCheated) and "do not follow" in str(error)

    async def twice(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        before = server.previous
        receipt = await server.answer(step, chunk)
        server.previous = before
        await server.answer(step, chunk, signed={"time_ms": receipt.time_ms})

    error = skipping(twice)
    assert error is not None and "more often than it was asked" in str(error)

    async def two_answers(server: Server, step: wire.Step, chunk: WireTensor) -> None:
        before = server.previous
        receipt = await server.answer(step, chunk)
        server.previous = before
        await server.answer(step, chunk, signed={"time_ms": receipt.time_ms, "reply_hash": b"x" * 32})

    error = skipping(two_answers, SessionLog(SERVER.peer_id))
    assert isinstance(error, ServerCheated) and error.proof is not None
    assert [receipt.reply_hash == b"x" * 32 for receipt in error.proof] == [False, True]


# --- steps that the server before has pushed


def pushing(shown: Callable[[Receipt], wire.Receipt | None], *, targeted: bool = True, **push: Any) -> ServerFailed:
    """A server signs for what it was pushed, which is not what the server before it answered to the client."""
    errors: list[ServerFailed] = []

    async def main(server: Server, session: SessionStream) -> None:
        chunk, lie = chunk_of(), chunk_of(9.0, 9.0, 9.0, 9.0)
        before = replace(server.receipt(wire.Step(sequence=1), chunk, b""), upstream_receipt=b"").signed(BEFORE)
        pushed = replace(before, reply_hash=sha256(lie.payload), **push).signed(BEFORE)
        if targeted:
            assert session.target().sequence == 1
        step = wire.Step(sequence=1, position=0, route_epoch=1, previous_receipt=before.hash())
        told = wire.Step(sequence=1, position=0, route_epoch=1, previous_receipt=pushed.hash())
        extra = {} if (upstream := shown(pushed)) is None else {"upstream": upstream}
        await server.answer(told, lie, pushed=True, position=1, **extra)
        with pytest.raises(ServerFailed) as caught:
            await session.receive(step, chunk, 5.0)
        errors.append(caught.value)

    talk(main, log=SessionLog(SERVER.peer_id, keeps_tensors=True))
    return errors[0]


def test_a_step_that_the_server_before_pushed_is_logged_with_what_it_took() -> None:
    async def main(server: Server, session: SessionStream) -> None:
        chunk = chunk_of()
        assert session.target().sequence == 1
        step = wire.Step(sequence=1, position=0, route_epoch=1, previous_receipt=b"b" * 32)
        receipt = await server.answer(step, chunk, pushed=True)
        await received(session, step, chunk)
        (entry,) = log.entries
        assert (entry.receipt, entry.step, entry.input, log.complete) == (receipt, step, chunk.payload, True)

    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    talk(main, log=log)


def test_what_a_server_pushed_for_a_step_that_nobody_waits_for_is_what_the_next_one_was_asked() -> None:
    archive = ReceiptArchive(shared_bytes=1 << 20)
    first, second = archive.session(SERVER.peer_id), archive.session(OTHER.peer_id)
    second.begin(wire.Open(nonce=b"n" * 16), wire.Granted())

    async def main(server: Server, session: SessionStream) -> None:
        chunk, output = chunk_of(), chunk_of(5.0, 6.0, 7.0, 8.0)
        target = wire.PushTarget(peer_id=peer_id_to_bytes(OTHER.peer_id), nonce=b"n" * 16, sequence=7)
        early = await asked(session, chunk, targets=[target])
        late = await asked(session, chunk)
        receipt = await server.answer(early, chunk, output)
        await server.answer(late, chunk)
        await received(session, late, chunk)
        assert second.waiting(7) == (pushed_step(early, receipt.hash()), output.tensor, output.payload)
        assert second.waiting(late.sequence) is None and first.complete

    talk(main, log=first)


def test_a_server_that_was_pushed_something_else_shows_by_whom() -> None:
    error = pushing(receipt_to_wire)
    assert isinstance(error, PushedOther) and error.upstream is not None
    assert error.upstream.is_signed_by(BEFORE.peer_id)
    assert isinstance(pushing(lambda receipt: None), PushedOther)


def test_a_push_that_nobody_can_have_made_is_a_lie() -> None:
    assert isinstance(pushing(receipt_to_wire, targeted=False), ServerCheated)
    other = pushing(lambda receipt: receipt_to_wire(replace(receipt, time_ms=1).signed(BEFORE)))
    assert isinstance(other, ServerCheated) and "is not the one that it signed for" in str(other)


def test_a_push_names_the_server_its_session_and_a_number_of_its_own() -> None:
    async def main(server: Server, session: SessionStream) -> None:
        targets = [session.target() for _ in range(2)]
        assert [target.sequence for target in targets] == [1, 2] and session.next_sequence() == 3
        assert {target.peer_id for target in targets} == {peer_id_to_bytes(SERVER.peer_id)}
        assert {target.nonce for target in targets} == {session.nonce}

    talk(main)


def test_an_output_that_was_pushed_before_is_pushed_no_second_time() -> None:
    """Who signs for it makes it up: an honest server refuses it."""

    async def main(server: Server, session: SessionStream) -> None:
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

    talk(main)


# --- leaving


def test_who_closes_a_session_says_so_and_who_leaves_it_does_not() -> None:
    async def main(server: Server, session: SessionStream) -> None:
        await session.close()
        assert (await server.hear()).WhichOneof("body") == "close"
        with pytest.raises(PeerError):
            await server.hear()

    talk(main)

    async def leaving(server: Server, session: SessionStream) -> None:
        await session.leave()
        with pytest.raises(PeerError):
            await server.hear()
        await session.wait_lost()
        await session.close()  # never raises

    talk(leaving)
