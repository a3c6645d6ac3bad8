"""`/petalnode/credits/1`: points, with the validator that issues them; and as they are shown when a session is opened.

    anyone                                            validator
    CreditQuery | CreditTransfer | CreditDeposit ->
                                                   <- Credit | CreditClearing | CreditVoucher | Error
    ... until the stream is closed.

What is asked is signed by the peer whose points they are, so anyone may bring it. A transfer that was not answered can
be sent again: it is cleared once.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from ..crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer, is_voucher
from . import wire_pb2 as wire
from .framing import MessageStream, PeerError, ProtocolError
from .ids import StreamProtocol
from .inference import Refusal, bad_request, from_wire, to_wire


@dataclass(frozen=True)
class CreditsLimits:
    """How long what is signed about points counts, and how much of it is in a message."""

    honoured_ms: int = 10 * 60_000
    """How long after it was cleared a server takes a payment."""
    skew_ms: int = 120_000
    """How far the clocks of two nodes may be apart."""
    max_orders: int = 64
    """On one stream."""


CREDITS_LIMITS: Final = CreditsLimits()
CREDITS: Final = StreamProtocol("/petalnode/credits/1", wire.CreditsFrame, max_header=4096, max_payload=0)
CreditsStream: TypeAlias = MessageStream[wire.CreditsFrame]
Order: TypeAlias = CreditQuery | Transfer | DepositOrder


class Issuer(Protocol):
    """Carries out orders. Its methods raise Refusal, with the reason."""

    def credit(self, query: CreditQuery) -> Awaitable[Credit]: ...

    def clear(self, transfer: Transfer) -> Awaitable[Clearing]: ...

    def deposit(self, order: DepositOrder) -> Awaitable[bytes]: ...


def price(batch: int, max_length: int) -> int:
    """Points for which a server gives a session priority: one for each token of cache that it reserves."""
    return batch * max_length


async def serve_credits(stream: CreditsStream, issuer: Issuer, *, timeout: float) -> None:
    """Answers one order after the other, until the peer closes the stream or asks nothing for `timeout` seconds.

    Raises:
        PeerError: the peer is gone, or sent what is no message.
    """
    for _ in range(CREDITS_LIMITS.max_orders):
        frame, _ = await stream.receive(timeout=timeout)
        try:
            answer = await _answer(_order(frame), issuer)
        except Refusal as refusal:
            answer = wire.CreditsFrame(error=refusal.to_wire())
        await stream.send(answer, timeout=timeout)


async def _answer(order: Order, issuer: Issuer) -> wire.CreditsFrame:
    if isinstance(order, CreditQuery):
        return wire.CreditsFrame(credit=to_wire(await issuer.credit(order), wire.Credit))
    if isinstance(order, Transfer):
        return wire.CreditsFrame(clearing=clearing_to_wire(await issuer.clear(order)))
    return wire.CreditsFrame(voucher=wire.CreditVoucher(voucher=await issuer.deposit(order)))


async def ask_credit(stream: CreditsStream, query: CreditQuery, *, timeout: float) -> Credit:
    """
    Raises:
        Refusal: the validator's own.
        PeerError: it does not answer, or with something else.
    """
    frame = await _ask(stream, wire.CreditsFrame(query=to_wire(query, wire.CreditQuery)), "credit", timeout)
    try:
        credit = from_wire(frame.credit, Credit)
    except ValueError as error:
        raise _nonsense(stream, str(error)) from None
    if (credit.issuer, credit.holder) != (query.issuer, query.holder) or not credit.is_signed:
        raise _nonsense(stream, "a credit that it has not signed")
    return credit


async def ask_clearing(stream: CreditsStream, transfer: Transfer, *, timeout: float) -> Clearing:
    """Raises as `ask_credit`. After a PeerError it is not known whether the transfer was cleared: send it again."""
    frame = await _ask(stream, wire.CreditsFrame(transfer=to_wire(transfer, wire.CreditTransfer)), "clearing", timeout)
    clearing = Clearing(transfer, frame.clearing.time_ms, frame.clearing.signature)
    if not clearing.is_signed:
        raise _nonsense(stream, "a clearing that it has not signed")
    return clearing


async def ask_voucher(stream: CreditsStream, order: DepositOrder, *, timeout: float) -> bytes:
    """Raises as `ask_credit`."""
    frame = await _ask(stream, wire.CreditsFrame(deposit=to_wire(order, wire.CreditDeposit)), "voucher", timeout)
    voucher = frame.voucher.voucher
    if not is_voucher(order.issuer, order.server, order.points, order.until_ms, voucher):
        raise _nonsense(stream, "a voucher that it has not signed")
    return voucher


async def _ask(stream: CreditsStream, question: wire.CreditsFrame, wanted: str, timeout: float) -> wire.CreditsFrame:
    await stream.send(question, timeout=timeout)
    frame, _ = await stream.receive(timeout=timeout)
    body = frame.WhichOneof("body")
    if body == "error":
        raise Refusal.from_wire(frame.error)
    if body != wanted:
        raise _nonsense(stream, f"{body} instead of {wanted}")
    return frame


def _nonsense(stream: CreditsStream, what: str) -> PeerError:
    return ProtocolError(f"the validator {stream.peer_id} answered with {what}", stream.peer_id)


def _order(frame: wire.CreditsFrame) -> Order:
    body = frame.WhichOneof("body")
    try:
        if body == "query":
            return from_wire(frame.query, CreditQuery)
        if body == "transfer":
            return from_wire(frame.transfer, Transfer)
        if body == "deposit":
            return from_wire(frame.deposit, DepositOrder)
    except ValueError as error:
        raise bad_request(str(error)) from None
    raise bad_request(f"a query, a transfer or a deposit can be asked for, not {body}")


def clearing_to_wire(clearing: Clearing) -> wire.CreditClearing:
    return wire.CreditClearing(
        transfer=to_wire(clearing.transfer, wire.CreditTransfer),
        time_ms=clearing.time_ms,
        signature=clearing.signature,
    )


def clearing_from_wire(message: wire.CreditClearing) -> Clearing:
    """Raises ValueError: something in it is no peer id. Its signatures are not checked."""
    return Clearing(from_wire(message.transfer, Transfer), message.time_ms, message.signature)
