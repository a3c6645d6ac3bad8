"""A client takes nothing from a server whose receipts are not for exactly what was sent and came back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import Pledge
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.request import ServerClaims, WireTensor
from petalnode.node.client.session.history import Input
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.errors import ServerCheated, ServerFailed
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.routing import Hop
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import INFERENCE, pledge_to_wire, receipt_to_wire, root_of
from tests.inspection import skip_reply
from tests.receipts import RECEIPT, of_answer
from tests.swarm.processes import LOOPBACK

OTHER = Identity.from_seed(bytes(range(32)))
SPEC = SessionSpec(model_version=b"m" * 32, span=Span(0, 2), batch=1, max_length=16)
CLAIMS = ServerClaims(SPEC.model_version, Span(0, 4), "float32", "none")
WRONG_CLOCKS = ("a clock that is far ahead", "a clock that is far behind")
"""It may be the client's clock, put right in the middle of a session: no reason to ban all servers for an hour."""
HONEST_MISTAKES = ("another position", "another sequence", "the answer before, once more", *WRONG_CLOCKS)
"""Answers that are of no use, but say nothing of what the server would sign."""
Cheat = Callable[[wire.Reply, Receipt, Identity], None]


def signed(**changed: object) -> Cheat:
    """Signs another statement than what happened."""

    def cheat(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
        reply.receipt.CopyFrom(receipt_to_wire(replace(receipt, **changed).signed(identity)))  # type: ignore[arg-type]

    return cheat


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def dated(seconds: float) -> Cheat:
    def cheat(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
        signed(time_ms=now_ms() + round(1000 * seconds))(reply, receipt, identity)

    return cheat


def unsigned(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.receipt.signature = bytes(64)


def signed_by_another(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.receipt.CopyFrom(receipt_to_wire(receipt.signed(OTHER)))


def not_signing(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.receipt.signature = b""


def no_receipt(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.ClearField("receipt")


def another_position(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.position += 1


def another_sequence(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    reply.sequence += 1


def repeated(reply: wire.Reply, receipt: Receipt, identity: Identity) -> None:
    """In the place of this answer the one before it, which is in order; what was asked is never answered."""
    reply.CopyFrom(_last[0])


_last: list[wire.Reply] = []

CHEATS: dict[str, Cheat] = {
    "the answer before, once more": repeated,
    "no signature": not_signing,
    "an empty signature": unsigned,
    "a clock that is far ahead": dated(3600),
    "a clock that is far behind": dated(-3600),
    "an adapter that was not asked for": signed(adapter=b"x" * 32),
    "another's signature": signed_by_another,
    "no receipt": no_receipt,
    "another position": another_position,
    "another sequence": another_sequence,
    "another model": signed(model_version=b"x" * 32),
    "other blocks": signed(span=(0, 1)),
    "another dtype": signed(dtype="bfloat16"),
    "another quantisation": signed(quantisation="int8"),
    "another client": signed(client=OTHER.peer_id),
    "another nonce": signed(nonce=b"x" * 16),
    "another epoch": signed(session_epoch=b"x" * 16),
    "another request": signed(request_hash=b"x" * 32),
    "another answer": signed(reply_hash=b"x" * 32),
    "a broken chain": signed(previous_receipt=b"x" * 32),
    "an upstream that was none": signed(upstream_receipt=b"x" * 32),
}


def name_of(cheat: Cheat) -> str:
    return next(name for name, candidate in CHEATS.items() if candidate is cheat)


def answering(identity: Identity, cheat: Cheat | None) -> Callable[[MessageStream[wire.InferenceFrame]], object]:
    """A server whose blocks change nothing, and which cheats at its second step."""

    async def handle(stream: MessageStream[wire.InferenceFrame]) -> None:
        frame, _ = await stream.receive(timeout=60)
        terms, epoch, previous, count = frame.open, b"e" * 16, b"", 0
        previous = root_of(terms, stream.peer_id, epoch)
        granted = wire.Granted(session_epoch=epoch, codec=terms.codec, dtype="float32", quantisation="none")
        granted.max_step_tokens = granted.credits = 4
        await stream.send(wire.InferenceFrame(granted=granted), timeout=60)
        while True:
            frame, (payload,) = await stream.receive(timeout=60)
            step, tensor = frame.step, frame.tensors[0]
            count += 1
            receipt = of_answer(terms, stream.peer_id, epoch, step, (tensor, payload), payload)
            receipt = replace(receipt, previous_receipt=previous).signed(identity)
            previous = receipt.hash()
            reply = wire.Reply(
                sequence=step.sequence, position=step.position + tensor.shape[1], receipt=receipt_to_wire(receipt)
            )
            if cheat is not None and count == 2:
                cheat(reply, receipt, identity)
            _last[:] = [reply]
            await stream.send(wire.InferenceFrame(reply=reply, tensors=[tensor]), [payload], timeout=60)

    return handle


PLEDGE = Pledge("", SPEC.model_version, (0, 2), "float32", "none", 5, 0, 0)
PLEDGES: dict[str, tuple[Pledge, bool]] = {
    "of a clock a day ahead": (replace(PLEDGE, from_ms=86_400_000, until_ms=90_000_000), False),
    "of a clock a day behind": (replace(PLEDGE, from_ms=-90_000_000, until_ms=-86_400_000), False),
    "for other blocks": (replace(PLEDGE, span=(1, 2), until_ms=90_000_000), True),
    "for other blocks, of another day": (replace(PLEDGE, span=(1, 2), from_ms=86_400_000, until_ms=90_000_000), True),
}
"""Times are from now on. The second says whether it tells that the server cheats."""


@pytest.mark.parametrize("name", PLEDGES)
async def test_pledge_of_another_time_is_no_lie(name: str) -> None:
    pledge, lie = PLEDGES[name]
    server, now = Identity.generate(), now_ms()
    pledge = replace(pledge, server=server.peer_id, from_ms=now + pledge.from_ms, until_ms=now + pledge.until_ms)
    granted = wire.Granted(
        session_epoch=b"e" * 16, codec="none", dtype="float32", quantisation="none", max_step_tokens=4, credits=4
    )
    granted.pledge.CopyFrom(pledge_to_wire(pledge.signed(server)))

    async def grant(stream: MessageStream[wire.InferenceFrame]) -> None:
        await stream.receive(timeout=60)
        await stream.send(wire.InferenceFrame(granted=granted), timeout=60)

    with trio.fail_after(60):
        async with open_swarm(SwarmConfig(server, listen=(LOOPBACK,))) as serving:
            serving.set_handler(INFERENCE, grant)
            config = SwarmConfig(Identity.generate(), peers=tuple(serving.addrs), serve_dht=False)
            async with open_swarm(config) as client:
                stream = await client.new_stream(server.peer_id, INFERENCE, timeout=60)
                session = SessionStream(
                    stream, Hop(server.peer_id, SPEC.span), SPEC, client.peer_id, claims=None, log=None
                )
                with pytest.raises(ServerFailed, match="pledge") as caught:
                    await session.open(1, None, None)
    assert isinstance(caught.value, ServerCheated) == lie


async def talk(cheat: Cheat | None, claims: ServerClaims | None = None, log: SessionLog | None = None) -> None:
    identity = Identity.generate()
    with trio.fail_after(60):
        async with open_swarm(SwarmConfig(identity, listen=(LOOPBACK,))) as server:
            server.set_handler(INFERENCE, answering(identity, cheat))  # type: ignore[arg-type]
            config = SwarmConfig(Identity.generate(), peers=tuple(server.addrs), serve_dht=False)
            async with open_swarm(config) as client:
                stream = await client.new_stream(server.peer_id, INFERENCE, timeout=60)
                session = SessionStream(
                    stream, Hop(server.peer_id, SPEC.span), SPEC, client.peer_id, claims=claims, log=log
                )
                await session.open(1, None, None)
                chunk = WireTensor(wire.Tensor(shape=[1, 1, 4], dtype="float32", codec="none", nbytes=16), bytes(16))
                assert (await session.exchange(Input(0, (), chunk), 1)).chunk.payload == bytes(16)
                if cheat is None:
                    await session.exchange(Input(1, (), chunk), 1)
                else:
                    with pytest.raises(ServerFailed) as caught:
                        await session.exchange(Input(1, (), chunk), 1)
                    assert caught.value.peer_id == server.peer_id
                    assert isinstance(caught.value, ServerCheated) == (name_of(cheat) not in HONEST_MISTAKES)
                await session.close()


async def test_honest_server_is_believed_and_its_receipts_kept() -> None:
    log = SessionLog("server", keeps_tensors=True)
    await talk(None, CLAIMS, log)
    assert log.complete and log.opening is not None and log.granted is not None
    assert [entry.receipt.sequence for entry in log.entries] == [1, 2]
    assert [entry.step and entry.step.position for entry in log.entries] == [0, 1]
    assert {entry.input for entry in log.entries} == {entry.output for entry in log.entries} == {bytes(16)}
    first, second = log.entries
    assert first.receipt.previous_receipt == root_of(log.opening, first.receipt.client, log.granted.session_epoch)
    assert second.receipt.previous_receipt == first.receipt.hash()


@pytest.mark.parametrize("signer", [True, False])
def test_reply_that_comes_again_has_to_be_same(signer: bool) -> None:
    """Two answers to one request, signed by the server, are kept as the proof."""
    server = Identity.generate()
    log = SessionLog(server.peer_id)
    session = SessionStream(None, Hop(server.peer_id, SPEC.span), SPEC, OTHER.peer_id, log=log)  # type: ignore[arg-type]
    first = replace(RECEIPT, sequence=3).signed(server)
    log.answered(3, first, None)
    skip_reply(session, wire.Reply(sequence=3, receipt=receipt_to_wire(first)), answered=4)
    other = replace(first, reply_hash=b"x" * 32).signed(server if signer else OTHER)
    with pytest.raises(ServerCheated) as caught:
        skip_reply(session, wire.Reply(sequence=3, receipt=receipt_to_wire(other)), answered=4)
    assert caught.value.proof == ((first, other) if signer else None)


@pytest.mark.parametrize("promised", [{"dtype": "bfloat16"}, {"quantisation": "nf4"}])
async def test_a_server_is_held_to_what_it_announced(promised: dict[str, str]) -> None:
    with pytest.raises(ServerCheated, match="announces"):
        await talk(None, replace(CLAIMS, **promised))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheating_server_is_not_believed(name: str) -> None:
    await talk(CHEATS[name])
