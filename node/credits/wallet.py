"""A peer's points with one validator: how many, handing them on, and paying busy servers for priority."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from ...crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer
from ...crypto.identity import Identity
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import Announcement
from ...protocols.credits import HONOURED_MS, MAX_HEADER, CreditsStream, ask_clearing, ask_credit, ask_voucher, price
from ...protocols.framing import PeerError
from ...protocols.ids import CREDITS
from ...protocols.inference import Refusal
from ..errors import SwarmError
from ..network.addresses import parse_peer
from ..swarm.swarm import Swarm

log = logging.getLogger(__name__)

ASK_TIMEOUT: Final = 10.0
PAY_TIMEOUT: Final = 15.0
"""For all of a payment: who would serve without one is not kept waiting longer."""
ORDER_MS: Final = 60_000
_ATTEMPTS: Final = 3
_RETRY_PAUSE: Final = 0.5

T = TypeVar("T")


def is_busy(server: Announcement, tokens: int) -> bool:
    """Whether a session of so many cache tokens would have to wait there, as far as the server has announced."""
    return server.cache_tokens_free < tokens or server.queue_depth > 1


class Wallet:
    """The points of `identity` with the validator at `address`, a multiaddr with /p2p. Spends one order at a time.

    Raises:
        BadInput: it is no such address.
    """

    def __init__(self, swarm: Swarm, identity: Identity, address: str) -> None:
        self._swarm = swarm
        self._identity = identity
        self.issuer, self._addr = parse_peer(address)
        self._turn = trio.Lock()
        self._unspent: dict[str, Clearing] = {}
        self._unanswered: dict[str, Transfer] = {}

    async def credit(self) -> Credit:
        """What there is.

        Raises:
            SwarmError: the validator cannot be reached, or says why not.
        """
        return await self._asked(self._credit)

    async def transfer(self, recipient: str, points: int) -> Clearing:
        """Hands points on. Where the answer to an earlier transfer of as many points to the same peer was lost, this is
        that transfer once more, which is cleared once.

        Raises:
            SwarmError: it was not cleared; or, if the validator was lost in the middle, that this is not known.
        """
        async with self._turn:
            try:
                return await self._asked(lambda stream: self._transfer(stream, recipient, points))
            except _Lost as error:
                unknown = "; it is not known whether it was cleared: ask for the balance"
                raise SwarmError(f"{error}{unknown if recipient in self._unanswered else ''}") from None

    async def _transfer(self, stream: CreditsStream, recipient: str, points: int) -> Clearing:
        order = self._unanswered.get(recipient)
        credit = await self._credit(stream)
        if order is None or order.points != points or not self._still_counts(order, credit):
            order = self._unanswered[recipient] = self._order(credit, recipient, points)
        try:
            clearing = await ask_clearing(stream, order, timeout=ASK_TIMEOUT)
        except Refusal:
            del self._unanswered[recipient]
            raise
        del self._unanswered[recipient]
        return clearing

    @staticmethod
    def _still_counts(order: Transfer, credit: Credit) -> bool:
        """Whether the order was carried out as the last one of all, or can be."""
        return credit.sequence == order.sequence or (credit.sequence < order.sequence and _now_ms() < order.until_ms)

    async def deposit(self, points: int, until_ms: int) -> bytes:
        """Leaves points with the validator for a pledge; returns its voucher.

        Raises:
            SwarmError: it does not keep them.
        """

        async def order(stream: CreditsStream) -> bytes:
            sequence = (await self._credit(stream)).sequence + 1
            order = DepositOrder(self.issuer, self._identity.peer_id, points, until_ms, sequence)
            return await ask_voucher(stream, order.signed(self._identity), timeout=ASK_TIMEOUT)

        async with self._turn:
            return await self._asked(order)

    async def pay(self, server: Announcement | None, batch: int, max_length: int) -> Clearing | None:
        """What to show this server when a session is opened: nothing if it has room, or takes no points of this
        validator. What it did not take before is shown again. Never raises: without points it goes on, too."""
        cost = price(batch, max_length)
        if server is None or self.issuer not in server.credits_of or not is_busy(server, cost):
            return None
        kept = self._unspent.get(server.peer_id)
        if kept is not None and kept.transfer.points >= cost and _now_ms() < kept.time_ms + HONOURED_MS // 2:
            return kept
        try:
            with trio.move_on_after(PAY_TIMEOUT):
                clearing = self._unspent[server.peer_id] = await self.transfer(server.peer_id, cost)
                return clearing
        except SwarmError as error:
            log.warning("no priority at server %s: %s", server.peer_id, error)
        return None

    def spent(self, clearing: Clearing) -> None:
        """The server has taken it."""
        self._unspent.pop(clearing.transfer.recipient, None)

    async def _credit(self, stream: CreditsStream) -> Credit:
        query = CreditQuery(self.issuer, self._identity.peer_id, _now_ms()).signed(self._identity)
        return await ask_credit(stream, query, timeout=ASK_TIMEOUT)

    def _order(self, credit: Credit, recipient: str, points: int) -> Transfer:
        until = _now_ms() + ORDER_MS
        order = Transfer(self.issuer, self._identity.peer_id, recipient, points, credit.sequence + 1, until)
        return order.signed(self._identity)

    async def _asked(self, question: Callable[[CreditsStream], Awaitable[T]]) -> T:
        """The answer to what can be asked again. A connection that has just died does not count as an answer."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._swarm.open_stream(
                    self.issuer,
                    CREDITS,
                    wire.CreditsFrame,
                    addrs=(self._addr,),
                    timeout=ASK_TIMEOUT,
                    max_header=MAX_HEADER,
                ) as stream:
                    return await question(stream)
            except PeerError as error:
                if attempt == _ATTEMPTS:
                    raise _Lost(f"the validator {self.issuer} does not answer: {error}") from error
                await trio.sleep(_RETRY_PAUSE)
            except Refusal as refusal:
                raise SwarmError(f"the validator {self.issuer} says: {refusal}") from None
        raise AssertionError("the last attempt ends with an answer or an error")


class _Lost(SwarmError):
    """The validator is gone; it may come back."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
