"""A peer's points with one validator: asks the balance, transfers points, and pays busy servers for priority."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import trio

from ...crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer
from ...crypto.identity import Identity
from ...crypto.statement import now_ms
from ...protocols.announcement import Announcement
from ...protocols.credits import CREDITS, CREDITS_LIMITS, CreditsStream, ask_clearing, ask_credit, ask_voucher, price
from ...protocols.framing import PeerError
from ...protocols.inference import Refusal
from ..errors import SwarmError
from ..network.addresses import parse_peer
from ..swarm.swarm import Swarm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WalletTimes:
    """How long a wallet waits for its validator, and how often it asks."""

    ask_timeout: float = 10.0
    pay_timeout: float = 15.0
    """Of a whole payment: a server that would serve without one is not kept waiting longer."""
    order_ms: int = 60_000
    attempts: int = 3
    retry_pause: float = 0.5


WALLET: Final = WalletTimes()
T = TypeVar("T")


def _is_new(clearing: Clearing) -> bool:
    """Whether a server takes it for a while yet."""
    return now_ms() < clearing.time_ms + CREDITS_LIMITS.honoured_ms // 2


class Wallet:
    """The points of `identity` with the validator at `address`, a multiaddr with /p2p. One order at a time.

    Raises:
        BadInput: it is no such address.
    """

    def __init__(self, swarm: Swarm, identity: Identity, address: str) -> None:
        self._swarm = swarm
        self._identity = identity
        self.issuer, self._addr = parse_peer(address)
        self._ordering = trio.Lock()
        self._unspent: dict[str, Clearing] = {}
        self._unanswered: dict[str, Transfer] = {}

    async def credit(self) -> Credit:
        """The balance.

        Raises:
            SwarmError: the validator cannot be reached, is none, or refuses, with its reason.
        """
        return await self._ask(self._credit)

    async def transfer(self, recipient: str, points: int) -> Clearing:
        """Hands points on. If the answer to an earlier transfer of as many points to this peer was lost, that is
        repeated. The validator clears it once.

        Raises:
            SwarmError: it was not cleared; or, if the validator was lost in the middle, that this is not known.
        """
        async with self._ordering:
            try:
                return await self._ask(lambda stream: self._transfer(stream, recipient, points))
            except _ConnectionLost as error:
                unknown = "; it is not known whether it was cleared: ask for the balance"
                raise SwarmError(f"{error}{unknown if recipient in self._unanswered else ''}") from None

    async def _transfer(self, stream: CreditsStream, recipient: str, points: int) -> Clearing:
        order = self._unanswered.get(recipient)
        credit = await self._credit(stream)
        if order is None or order.points != points or not self._still_valid(order, credit):
            until = now_ms() + WALLET.order_ms
            order = Transfer(self.issuer, self._identity.peer_id, recipient, points, credit.sequence + 1, until)
            self._unanswered[recipient] = order = order.signed(self._identity)
        try:
            clearing = await ask_clearing(stream, order, timeout=WALLET.ask_timeout)
        except Refusal:
            del self._unanswered[recipient]
            raise
        del self._unanswered[recipient]
        return clearing

    @staticmethod
    def _still_valid(order: Transfer, credit: Credit) -> bool:
        """Whether the order may have been carried out, or still can be."""
        return credit.sequence >= order.sequence or now_ms() < order.until_ms

    async def deposit(self, points: int, until_ms: int) -> bytes:
        """Leaves points with the validator for a pledge until `until_ms` (milliseconds since 1970); its voucher.

        Raises:
            SwarmError: it does not keep them.
        """
        async with self._ordering:
            return await self._ask(partial(self._order_deposit, points, until_ms))

    async def _order_deposit(self, points: int, until_ms: int, stream: CreditsStream) -> bytes:
        sequence = (await self._credit(stream)).sequence + 1
        order = DepositOrder(self.issuer, self._identity.peer_id, points, until_ms, sequence)
        return await ask_voucher(stream, order.signed(self._identity), timeout=WALLET.ask_timeout)

    async def pay(self, server: Announcement | None, batch: int, max_length: int) -> Clearing | None:
        """The clearing to show this server when a session of `batch` rows of `max_length` tokens is opened.

        None if the server has room, takes no points of this validator, or the validator clears nothing. A clearing that
        the server has not taken is shown again. Never raises.
        """
        cost = price(batch, max_length)
        if server is None or self.issuer not in server.credits_of:
            return None
        if server.cache_tokens_free >= cost and server.queue_depth <= 1:
            return None
        unspent = self._unspent.get(server.peer_id)
        if unspent is not None and unspent.transfer.points >= cost and _is_new(unspent):
            return unspent
        try:
            with trio.move_on_after(WALLET.pay_timeout):
                clearing = await self.transfer(server.peer_id, cost)
                if not _is_new(clearing):  # that of an order of long ago, whose answer was lost
                    clearing = await self.transfer(server.peer_id, cost)
                self._unspent[server.peer_id] = clearing
                return clearing
        except SwarmError as error:
            log.warning("no priority at server %s: %s", server.peer_id, error)
        return None

    def spent(self, clearing: Clearing) -> None:
        """Notes that the server has taken this clearing."""
        if self._unspent.get(clearing.transfer.recipient) == clearing:  # and not a later one
            del self._unspent[clearing.transfer.recipient]

    async def _credit(self, stream: CreditsStream) -> Credit:
        query = CreditQuery(self.issuer, self._identity.peer_id, now_ms()).signed(self._identity)
        return await ask_credit(stream, query, timeout=WALLET.ask_timeout)

    async def _ask(self, question: Callable[[CreditsStream], Awaitable[T]]) -> T:
        """The answer to a question that may be asked again: a lost connection is retried."""
        self._swarm.host.remember(self.issuer, [self._addr])
        for attempt in range(1, WALLET.attempts + 1):
            try:
                async with self._swarm.open_stream(self.issuer, CREDITS, timeout=WALLET.ask_timeout) as stream:
                    return await question(stream)
            except PeerError as error:
                if isinstance(error.__cause__, ConnectionRefusedError):  # it does not speak the protocol
                    raise SwarmError(
                        f"{self.issuer} keeps no points: it is no validator, or one without --issue-points. Give the "
                        "address that `petalnode validate --issue-points` prints"
                    ) from None
                if attempt == WALLET.attempts:
                    raise _ConnectionLost(f"the validator {self.issuer} does not answer: {error}") from error
                await trio.sleep(WALLET.retry_pause)
            except Refusal as refusal:
                raise SwarmError(f"the validator {self.issuer} says: {refusal}") from None
        raise AssertionError("the last attempt ends with an answer or an error")


class _ConnectionLost(SwarmError):
    """The validator did not answer; it may come back."""
