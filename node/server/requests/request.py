"""What all requests for a span share: who may open one, the memory that it gets, and the receipts for its replies."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import trio

from ....crypto.identity import Identity
from ....crypto.pledge import Pledge
from ....crypto.receipts import NO_RECEIPT, Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.framing import MessageStream, PeerError
from ....protocols.ids import PROTOCOL_VERSION
from ....protocols.inference import EPOCH_BYTES, Refusal, SessionTerms, pledge_to_wire, without_tensors
from ....protocols.prefix import BLOCK_TOKENS
from ....protocols.training import BatchTerms
from ...network.shares import ONE_BY_ONE, Origins, ShareCount
from ...network.transport.muxed_stream import WINDOW
from ..budget import BudgetFull, Lease, MemoryBudget
from ..compute_thread import ComputeThread
from ..tallies import ChangeSignal, ServerTallies
from .admission import Hosted, PrefixCache, check_client, check_terms

log = logging.getLogger(__name__)

F = TypeVar("F", wire.InferenceFrame, wire.BatchFrame, wire.PushFrame)


@dataclass(frozen=True)
class RequestPolicy:
    """How long requests wait, in seconds, and how many a client may have."""

    open: float = 10.0  # For the first frame of a stream
    send: float = 30.0  # For a client to read an answer
    piece: float = 30.0  # The same, and to send, of a piece of a tensor
    memory: float = 20.0  # For others to give memory back
    session_idle: float = 1800.0
    """For which a session that asks nothing keeps its cache; a dead connection is noticed far sooner."""
    turn: float = 5.0  # Of a push, for the steps before it, which the client may be sending
    least_open: int = 8  # Of one kind that a client, or an address, may have open as long as there may be any


REQUESTS: Final = RequestPolicy()


@dataclass
class RequestContext:
    """What all requests for one hosted span share.

    Attributes:
        identity: the peer key that signs receipts.
        allowed_clients: the peer ids that are served; none lets everybody.
        pledger: gives the pledge for what is opened now; None for none.
        draining: set it and nothing new is admitted, and present clients are told to leave.
        tallies: what is counted.
        prefix_cache: who uses what sessions leave for later ones.
        origins: where clients are.
        changed: set when free cache or queue depth, which are announced, have changed.
    """

    hosted: Hosted
    compute: ComputeThread
    identity: Identity
    allowed_clients: frozenset[str] = frozenset()
    pledger: Callable[[], Pledge | None] = lambda: None
    draining: bool = False
    tallies: ServerTallies = field(default_factory=ServerTallies)
    prefix_cache: PrefixCache = "own"
    origins: Origins = ONE_BY_ONE
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    _ended: bool = False
    _serving: set[trio.CancelScope] = field(default_factory=set)

    def end(self) -> None:
        """Ends all that is served, with what is under way: the blocks are left, and nothing is to hold them."""
        self._ended = True
        for scope in self._serving:
            scope.cancel()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """For the length of a stream.

        Raises:
            Refusal: ERROR_DRAINING, `end` has ended it.
        """
        with trio.CancelScope(deadline=-math.inf if self._ended else math.inf) as scope:
            self._serving.add(scope)
            try:
                yield
            finally:
                self._serving.discard(scope)
        if scope.cancelled_caught:
            raise Refusal(wire.ERROR_DRAINING, "this server has left its blocks")

    def refused(self, refusal: Refusal) -> None:
        """Counts what a client was refused, and logs it."""
        log.info("refused: %s", refusal)
        self.tallies.refusals[wire.ErrorCode.Name(refusal.code)] += 1

    def admit(self, client: str, terms: SessionTerms | BatchTerms, kind: OpenCount) -> None:
        """
        Raises:
            Refusal: this client may not open this here now; with the code and a sentence for it.
        """
        check_client(client, self.allowed_clients)
        check_terms(terms, self.hosted)
        if self.draining:
            raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
        kind.check(client)


class OpenCount:
    """Counts requests of one kind that are open, of which there may be `most`. A client that is alone, or the clients
    of one address together, may have half of that. They leave as much for others as they have."""

    def __init__(self, kind: str, most: int, origins: Origins = ONE_BY_ONE) -> None:
        self._kind = kind
        self._share = ShareCount(most, REQUESTS.least_open)
        self._peers = origins
        self._origins: dict[str, str] = {}  # where those that have any open were with the first of these
        self._none = trio.Event()

    @property
    def count(self) -> int:
        return self._share.total

    def check(self, client: str) -> None:
        """
        Raises:
            Refusal: ERROR_BUSY, there are too many for another one of this client.
        """
        origin = self._origins.get(client) or self._peers.origin_of(client)
        if not all(map(self._share.has_room, (client, origin))):
            own = self._share.of(client)
            raise Refusal(wire.ERROR_BUSY, f"this server already has {self.count} {self._kind}, {own} of them of yours")

    def add(self, client: str) -> None:
        self._share.count(client, self._origins.setdefault(client, self._peers.origin_of(client)))

    def remove(self, client: str, number: int = 1) -> None:
        for _ in range(number):
            self._share.remove(client, self._origins[client])
        if not self._share.of(client):
            self._origins.pop(client, None)
        if not self.count:
            self._none.set()
            self._none = trio.Event()

    async def wait_none(self) -> None:
        while self.count:
            await self._none.wait()


async def serve_stream(
    stream: MessageStream[F], serve: Callable[[MessageStream[F], F], Awaitable[None]], context: RequestContext
) -> None:
    """Gives `serve` a stream with its first frame; what it refuses is counted, and said to the client.

    Never raises for anything that the client did.
    """
    try:
        frame, _ = await stream.receive(timeout=REQUESTS.open, admit=without_tensors(stream.peer_id))
        try:
            with context.serving():
                await serve(stream, frame)
        except Refusal as refusal:
            context.refused(refusal)
            await stream.send(type(frame)(error=refusal.to_wire()), timeout=REQUESTS.send)
        await stream.close()
    except PeerError:
        # The client is gone, silent or speaks nonsense; what it held has been given back on the way here.
        await stream.reset()


def open_window(stream: MessageStream[F], served: bool) -> None:
    """Lets a client send what it was granted. What its streams cost counts as that of strangers does until something is
    `served`. So who asks for much and waits for nothing pays for it."""
    if served:
        stream.grant()
    else:
        stream.widen(WINDOW)


async def reserve(
    budget: MemoryBudget,
    amount: int,
    *,
    holder: str,
    never: wire.ErrorCode.ValueType = wire.ERROR_BUSY,
) -> Lease:
    """Memory for a request of the client `holder`, after waiting for it for at most `RequestPolicy.memory` seconds.

    Raises:
        Refusal: ERROR_BUSY if too little came free, `never` if it is more than there is in all.
    """
    try:
        return await budget.acquire(amount, REQUESTS.memory, holder=holder)
    except BudgetFull as error:
        raise Refusal(wire.ERROR_BUSY if amount <= budget.capacity else never, str(error)) from None


class ReceiptChain:
    """Signs for the replies to one client, each receipt over the one before it.

    Attributes:
        epoch: random, names this session or stream.
        last: the hash of the newest receipt. Before the first one the session's root, which is the hash of its terms.
    """

    def __init__(
        self, context: RequestContext, client: str, terms: SessionTerms | BatchTerms, prefix_tokens: int = 0
    ) -> None:
        """`prefix_tokens`: of a row, that the session begins with."""
        self.epoch = os.urandom(EPOCH_BYTES)
        self._hosted = context.hosted
        self._identity = context.identity
        self._client = client
        self._terms = terms
        self._pledge = context.pledger()
        self.last = NO_RECEIPT
        if isinstance(terms, SessionTerms):
            pledge = self._pledge.hash() if self._pledge is not None else b""
            prefix = terms.prefix[prefix_tokens // BLOCK_TOKENS - 1] if prefix_tokens else b""
            self.last = terms.root(client, self.epoch, pledge, prefix)

    def granted(self) -> dict[str, Any]:
        """The fields of Granted and BatchGranted that say what the receipts will stand for."""
        return {
            "session_epoch": self.epoch,
            "dtype": self._hosted.dtype,
            "quantisation": self._hosted.quantisation,
            "pledge": pledge_to_wire(self._pledge) if self._pledge is not None else None,
        }

    def sign(self, sequence: int, request_hash: bytes, reply_hash: bytes, upstream: bytes = b"") -> Receipt:
        """The next receipt. `upstream` is the hash of the pushing server's receipt for the request."""
        terms = self._terms
        receipt = Receipt(
            protocol_version=PROTOCOL_VERSION,
            model_version=self._hosted.model_version,
            span=(terms.span.start, terms.span.end),
            dtype=self._hosted.dtype,
            quantisation=self._hosted.quantisation,
            client=self._client,
            nonce=terms.nonce,
            session_epoch=self.epoch,
            sequence=sequence,
            request_hash=request_hash,
            reply_hash=reply_hash,
            previous_receipt=self.last,
            upstream_receipt=upstream,
            time_ms=time.time_ns() // 1_000_000,
            adapter=terms.adapter if isinstance(terms, SessionTerms) else b"",
        ).signed(self._identity)
        self.last = receipt.hash()
        return receipt


def not_held() -> Refusal:
    """What is answered about a session that is over, or never was."""
    return Refusal(wire.ERROR_NOT_FOUND, "this session is not held here (any more)")
