"""Where a request is admitted: what all requests for a span share, who may open one, and the memory that it gets."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from ....crypto.identity import Identity
from ....crypto.pledge import Pledge
from ....protocols import wire_pb2 as wire
from ....protocols.framing import MessageStream, PeerError
from ....protocols.inference import Refusal, SessionTerms
from ....protocols.training import BatchTerms
from ..budget import BudgetFull, Lease, MemoryBudget
from ..compute_thread import ComputeThread
from .admission import Hosted, check_client, check_terms

OPEN_TIMEOUT: Final = 10.0
SEND_TIMEOUT: Final = 30.0

F = TypeVar("F", wire.InferenceFrame, wire.BatchFrame)


@dataclass
class RequestContext:
    """What all requests for one hosted span share.

    Attributes:
        identity: the peer key that signs receipts.
        allowed_clients: the peer ids that are served; none lets everybody.
        pledger: gives the pledge for what is opened now; None for none.
        draining: set it and nothing new is admitted, and present clients are told to leave.
    """

    hosted: Hosted
    compute: ComputeThread
    identity: Identity
    allowed_clients: frozenset[str] = frozenset()
    pledger: Callable[[], Pledge | None] = lambda: None
    draining: bool = False

    def admit(self, client: str, terms: SessionTerms | BatchTerms, kind: OpenCount) -> None:
        """
        Raises:
            Refusal: this client may not open this here now; with the code and a sentence for it.
        """
        check_client(client, self.allowed_clients)
        check_terms(terms, self.hosted)
        if self.draining:
            raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
        kind.check()


class OpenCount:
    """Counts requests of one kind that are open, of which there may be `most`."""

    def __init__(self, kind: str, most: float = math.inf) -> None:
        self.count = 0
        self._kind = kind
        self._most = most
        self._none = trio.Event()

    def check(self) -> None:
        """
        Raises:
            Refusal: ERROR_BUSY, there are too many for another one.
        """
        if self.count >= self._most:
            raise Refusal(wire.ERROR_BUSY, f"this server already has {self.count} {self._kind}")

    def add(self, change: int) -> None:
        self.count += change
        if not self.count:
            self._none.set()
            self._none = trio.Event()

    async def wait_none(self) -> None:
        while self.count:
            await self._none.wait()


async def serve_stream(stream: MessageStream[F], serve: Callable[[MessageStream[F], F], Awaitable[None]]) -> None:
    """Gives `serve` a stream with its first frame; what it refuses is said to the client.

    Never raises for anything that the client did.
    """
    try:
        frame, _ = await stream.receive(timeout=OPEN_TIMEOUT)
        try:
            await serve(stream, frame)
        except Refusal as refusal:
            await stream.send(type(frame)(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
        await stream.close()
    except PeerError:
        # The client is gone, silent or speaks nonsense; what it held has been given back on the way here.
        await stream.reset()


async def reserve(
    budget: MemoryBudget,
    amount: int,
    wait: float,
    *,
    full: wire.ErrorCode.ValueType = wire.ERROR_BUSY,
    never: wire.ErrorCode.ValueType = wire.ERROR_BUSY,
    paid: bool = False,
) -> Lease:
    """Memory for a request, after waiting for it for at most `wait` seconds.

    Raises:
        Refusal: `full` if too little came free, `never` if it is more than there is in all.
    """
    try:
        return await budget.acquire(amount, wait, paid=paid)
    except BudgetFull as error:
        raise Refusal(full if amount <= budget.capacity else never, str(error)) from None
