"""Answers of validators, accusers and neighbours that are not what was asked for: nobody takes them for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from google.protobuf.message import Message

from petalnode.crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer, sign_voucher
from petalnode.crypto.identity import Identity
from petalnode.node.errors import unwrapped
from petalnode.node.network.shares import Turns
from petalnode.node.server.lifecycle.other_servers import answer_transfers
from petalnode.node.testing import message_streams, run_autojumping, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.credits import CREDITS, ask_clearing, ask_credit, ask_voucher, serve_credits
from petalnode.protocols.directory import DIRECTORY_LIMITS, TRANSFER, measure_transfer
from petalnode.protocols.evidence import EVIDENCE, check_pick, receive_bundle, send_bundle
from petalnode.protocols.framing import MessageStream, PeerError, ProtocolError, StreamClosed
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import Refusal

ISSUER, HOLDER, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in (31, 32, 33))
TIMEOUT = 10.0
Stream = MessageStream[Any]
End = Callable[[Stream], Awaitable[Any]]


def converse(protocol: StreamProtocol[Any], ours: End, theirs: End) -> Any:
    """What `ours` returns or raises, on a stream to the other end."""
    ends = stream_pair(window=1 << 23)
    near, far = message_streams(protocol, HOLDER.peer_id, ISSUER.peer_id, ends=ends)
    return run_autojumping(_converse, ours, near, theirs, far)


async def _converse(ours: End, near: Stream, theirs: End, far: Stream) -> Any:
    with unwrapped(Exception):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(theirs, far)
            with trio.fail_after(1000):
                result = await ours(near)
            nursery.cancel_scope.cancel()
    return result


def saying(*frames: Message, payloads: tuple[bytes, ...] = ()) -> End:
    """Answers every question with the next of these."""

    async def say(stream: Stream) -> None:
        for frame in frames:
            await stream.receive(timeout=None)
            await stream.send(frame, payloads, timeout=TIMEOUT)
        await trio.sleep_forever()

    return say


# --- credits


class Bank:
    """An issuer that signs what it is told to."""

    def __init__(self, signer: Identity = ISSUER, **lies: Any) -> None:
        self.signer, self.lies = signer, lies

    async def credit(self, query: CreditQuery) -> Credit:
        said = {"issuer": ISSUER.peer_id, "holder": query.holder, "points": 7, "deposit": 0} | self.lies
        credit = Credit(deposit_until_ms=0, sequence=3, time_ms=5, **said)
        return credit.signed(self.signer) if self.signer is ISSUER else credit

    async def clear(self, transfer: Transfer) -> Clearing:
        if self.lies:
            raise Refusal(wire.ERROR_NOT_ALLOWED, "the points do not suffice")
        clearing = Clearing(transfer, 5)
        return replace(clearing, signature=self.signer.sign(Clearing.DOMAIN, clearing.canonical_bytes()))

    async def deposit(self, order: DepositOrder) -> bytes:
        return sign_voucher(self.signer, order.server, order.points + len(self.lies), order.until_ms)


QUERY = CreditQuery(ISSUER.peer_id, HOLDER.peer_id, 1).signed(HOLDER)
SPENT = Transfer(ISSUER.peer_id, HOLDER.peer_id, OTHER.peer_id, 5, 1, 100).signed(HOLDER)
ORDER = DepositOrder(ISSUER.peer_id, HOLDER.peer_id, 50, 1000, 2).signed(HOLDER)
ASKED: list[tuple[Any, Any]] = [(ask_credit, QUERY), (ask_clearing, SPENT), (ask_voucher, ORDER)]


def ask(question: Any, statement: Any, theirs: End) -> Any:
    return converse(CREDITS, lambda stream: question(stream, statement, timeout=TIMEOUT), theirs)


def serving(bank: Bank) -> End:
    async def serve(stream: Stream) -> None:
        await serve_credits(stream, bank, timeout=TIMEOUT)

    return serve


def test_what_an_issuer_has_signed_is_taken() -> None:
    credit, clearing, voucher = (ask(question, statement, serving(Bank())) for question, statement in ASKED)
    assert (credit.points, credit.holder, credit.is_signed) == (7, HOLDER.peer_id, True)
    assert clearing.transfer == SPENT and clearing.is_signed
    assert voucher == sign_voucher(ISSUER, HOLDER.peer_id, 50, 1000)
    with pytest.raises(Refusal, match="do not suffice"):
        ask(ask_clearing, SPENT, serving(Bank(points=9)))


@pytest.mark.parametrize(("question", "statement"), ASKED)
def test_what_another_key_has_signed_is_not(question: Any, statement: Any) -> None:
    with pytest.raises(PeerError, match="not signed"):
        ask(question, statement, serving(Bank(OTHER)))


@pytest.mark.parametrize("lie", [{"holder": OTHER.peer_id}, {"holder": ISSUER.peer_id}])
def test_another_s_credit_is_not(lie: dict[str, str]) -> None:
    with pytest.raises(PeerError, match="not signed"):
        ask(ask_credit, QUERY, serving(Bank(**lie)))


def test_a_credit_of_nobody_is_not() -> None:
    with pytest.raises(PeerError, match="peer id"):
        ask(ask_credit, QUERY, saying(wire.CreditsFrame(credit=wire.Credit(holder=b"nobody"))))


def test_a_voucher_for_other_points_is_not() -> None:
    with pytest.raises(PeerError, match="not signed"):
        ask(ask_voucher, ORDER, serving(Bank(more=1)))


@pytest.mark.parametrize(("question", "statement"), ASKED)
def test_an_answer_of_another_kind_is_none(question: Any, statement: Any) -> None:
    with pytest.raises(PeerError, match="instead of"):
        ask(question, statement, saying(wire.CreditsFrame(query=wire.CreditQuery())))


def test_an_issuer_answers_orders_only_and_goes_on() -> None:
    async def ours(stream: Stream) -> list[int]:
        codes = []
        unreadable = wire.CreditsFrame(query=wire.CreditQuery(holder=b"nobody"))
        for frame in (wire.CreditsFrame(credit=wire.Credit()), unreadable, wire.CreditsFrame()):
            await stream.send(frame, timeout=TIMEOUT)
            codes.append((await stream.receive(timeout=TIMEOUT))[0].error.code)
        assert (await ask_credit(stream, QUERY, timeout=TIMEOUT)).points == 7
        return codes

    assert converse(CREDITS, ours, serving(Bank())) == [wire.ERROR_BAD_REQUEST] * 3


# --- evidence


def receive(limit: int, theirs: End) -> bytes:
    data: bytes = converse(EVIDENCE, lambda stream: receive_bundle(stream, limit=limit, timeout=TIMEOUT), theirs)
    return data


def pieces(size: int, *parts: bytes, end: bool = True) -> End:
    async def send(stream: Stream) -> None:
        await stream.send(wire.EvidenceFrame(sending=wire.Sending(nbytes=size)), timeout=TIMEOUT)
        for part in parts:
            frame = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(part))])
            await stream.send(frame, [part], timeout=TIMEOUT)
        if end:
            await stream.send(wire.EvidenceFrame(close=wire.Close()), timeout=TIMEOUT)
        await trio.sleep_forever()

    return send


@pytest.mark.parametrize("size", [1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_bundle_arrives(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert receive(size, lambda stream: send_bundle(stream, data, timeout=TIMEOUT)) == data


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (pieces(0), "no bundle"),
        (pieces(101, bytes(101)), "no bundle"),
        (pieces(10, bytes(9), bytes(2)), "more than it said"),
        (pieces(10, bytes(9)), "before its end"),
        (pieces(10, b"", bytes(10)), "before its end"),
    ],
)
def test_bundle_unlike_its_announcement_is_not_taken(theirs: End, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        receive(100, theirs)
    assert receive(100, pieces(100, bytes(50), bytes(50))) == bytes(100)


def test_a_piece_is_one_tensor() -> None:
    async def two_at_once(stream: Stream) -> None:
        await stream.send(wire.EvidenceFrame(sending=wire.Sending(nbytes=10)), timeout=TIMEOUT)
        frame = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=10), wire.Tensor(nbytes=1)])
        await stream.send(frame, [bytes(10), b"x"], timeout=TIMEOUT)
        await trio.sleep_forever()

    with pytest.raises(ProtocolError, match="before its end"):
        receive(100, two_at_once)


def test_other_frames_are_no_bundle() -> None:
    async def close(stream: Stream) -> None:
        await stream.send(wire.EvidenceFrame(close=wire.Close()), timeout=TIMEOUT)

    async def refuse(stream: Stream) -> None:
        await stream.send(wire.EvidenceFrame(error=wire.Error(message="gone")), timeout=TIMEOUT)

    with pytest.raises(ProtocolError, match="no bundle"):
        receive(100, close)
    with pytest.raises(Refusal, match="gone"):
        receive(100, refuse)


def test_an_auditor_picks_what_was_offered() -> None:
    assert check_pick(wire.EvidenceFrame(pick=wire.Pick(number=2)), 3) == 2
    assert check_pick(wire.EvidenceFrame(close=wire.Close()), 3) is None
    for frame in (wire.EvidenceFrame(pick=wire.Pick(number=3)), wire.EvidenceFrame(sending=wire.Sending())):
        with pytest.raises(Refusal):
            check_pick(frame, 3)


# --- the speed of a way


def test_speed_of_way_is_that_of_its_bytes() -> None:
    async def theirs(stream: Stream) -> None:
        await answer_transfers(Turns(), stream)

    seconds = converse(TRANSFER, lambda stream: measure_transfer(stream, timeout=TIMEOUT), theirs)
    assert 0 < seconds < 1


@pytest.mark.parametrize("size", [0, 2, DIRECTORY_LIMITS.transfer_bytes])
def test_other_bytes_than_were_asked_for_measure_nothing(size: int) -> None:
    answer = wire.TransferFrame(tensors=[wire.Tensor(nbytes=size)])
    with pytest.raises(ProtocolError, match="other than 1 bytes"):
        converse(
            TRANSFER,
            lambda stream: measure_transfer(stream, timeout=TIMEOUT),
            saying(answer, payloads=(bytes(size),)),
        )


@pytest.mark.parametrize(
    ("wanted", "answered"),
    [(DIRECTORY_LIMITS.transfer_bytes, DIRECTORY_LIMITS.transfer_rounds), (DIRECTORY_LIMITS.transfer_bytes + 1, 0)],
)
def test_nobody_sends_more_than_a_measurement_takes(wanted: int, answered: int) -> None:
    async def ours(stream: Stream) -> int:
        count = 0
        try:
            while count < 100:
                await stream.send(wire.TransferFrame(wanted=wanted), timeout=TIMEOUT)
                _, payloads = await stream.receive(timeout=TIMEOUT)
                assert payloads == [bytes(wanted)]
                count += 1
        except StreamClosed:
            pass
        return count

    async def theirs(stream: Stream) -> None:
        try:
            await answer_transfers(Turns(), stream)
        except ProtocolError:
            pass
        await stream.close()

    assert converse(TRANSFER, ours, theirs) == answered


def test_order_of_nobody_is_refused_alone() -> None:
    async def orders(stream: Stream) -> list[str]:
        bodies = []
        nobody = {"issuer": b"\xff", "holder": b"\xff"}
        for frame in (
            wire.CreditsFrame(query=wire.CreditQuery(**nobody)),
            wire.CreditsFrame(credit=wire.Credit()),
            wire.CreditsFrame(),
        ):
            await stream.send(frame, timeout=TIMEOUT)
            answer, _ = await stream.receive(timeout=TIMEOUT)
            bodies.append(f"{answer.error.code} {answer.error.message}")
        return bodies

    first, second, third = converse(CREDITS, orders, serving(Bank()))
    assert all(said.startswith(f"{wire.ERROR_BAD_REQUEST} ") for said in (first, second, third))
    assert "not credit" in second and "can be asked for" in third and "can be asked for" not in first
