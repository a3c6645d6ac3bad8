"""Typed message streams over a host: opening them to peers, and serving those that peers open."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import trio
from google.protobuf.message import Message

from ...crypto.identity import peer_id_to_bytes
from ...protocols import wire_pb2 as wire
from ...protocols.framing import (
    MessageStream,
    PeerError,
    StreamClosed,
    StreamTimeout,
)
from ...protocols.ids import StreamProtocol
from ..network.host import Host
from ..network.shares import ShareCount
from ..network.transport.memory import own_budgets
from ..network.transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamShares:
    """How streams and the memory for their messages are shared."""

    max_served: int = 1024
    """Streams of one protocol that a node serves at once. A peer or address gets no more than it leaves for others."""
    least_served: int = 8  # Of one peer or address, as long as there are any
    of_rest: int = 4
    """An address may hold a quarter of the memory for messages that it leaves free, and a peer half of that."""
    refusal: float = 5.0  # seconds for a peer to read why it is not served
    ungranted: int = 4  # What was granted nothing has a quarter as much memory for its messages as the rest


SHARES: Final = StreamShares()
F = TypeVar("F", bound=Message)


_Holder = tuple[str, str]  # an address, as `origin_of_ip` counts them, and a peer there


@dataclass
class _RoomWaiter:
    nbytes: int
    granted: trio.Event = field(default_factory=trio.Event)


class ReceivedBytes:
    """The memory for messages that all streams of a node share: `most` bytes, and one message more of any size.

    An address has a share of it, and a peer a share of its address's. A message larger than what is left of these waits
    to be that one more, in turn with those of other addresses. Who waits keeps nobody else waiting.

    No `MemoryBudget`: nothing here may wait in line behind a peer that does not read.

    Args:
        most: what this machine has for it if it is not given.
        granted: the memory of streams that were granted something; this if there is no other.
    """

    def __init__(self, most: int | None = None, granted: ReceivedBytes | None = None) -> None:
        self.most = own_budgets().received if most is None else most
        self.granted = granted or self
        self._taken = 0
        self._of: Counter[str | _Holder] = Counter()
        self._one_more: tuple[_Holder, int] | None = None
        self._waiting: dict[_Holder, deque[_RoomWaiter]] = {}

    @property
    def taken(self) -> int:
        return self._taken + (self._one_more[1] if self._one_more else 0)

    def of(self, origin: str, peer_id: str) -> int:
        holder, nbytes = self._one_more or (None, 0)
        return self._of[origin, peer_id] + (nbytes if holder == (origin, peer_id) else 0)

    def take_nowait(self, origin: str, peer_id: str, nbytes: int) -> bool:
        holder = origin, peer_id
        return holder not in self._waiting and self._take(holder, nbytes, only_share=bool(self._waiting))

    async def take(self, origin: str, peer_id: str, nbytes: int) -> None:
        holder, waiter = (origin, peer_id), _RoomWaiter(nbytes)
        self._waiting.setdefault(holder, deque()).append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self.give_back(origin, peer_id, nbytes)
            else:
                self._leave(holder, waiter)
                self._grant()
            raise

    def give_back(self, origin: str, peer_id: str, nbytes: int) -> None:
        holder = origin, peer_id
        if self._one_more == (holder, nbytes):  # another of the same size is as good
            self._one_more = None
        else:
            self._add(holder, -nbytes)
        self._grant()

    def _add(self, holder: _Holder, nbytes: int) -> None:
        self._taken += nbytes
        for name in (holder[0], holder):
            self._of[name] += nbytes
            if not self._of[name]:
                del self._of[name]

    def _take(self, holder: _Holder, nbytes: int, *, only_share: bool = False) -> bool:
        """Takes it as a part of the peer's share, or as the one more."""
        share = (
            (self.most - self._taken - nbytes) // SHARES.of_rest - self._of[holder[0]] - nbytes
        )  # left for others there
        if self._of[holder] + nbytes <= share:
            self._add(holder, nbytes)
            return True
        if only_share or self._one_more is not None:
            return False
        self._one_more = holder, nbytes
        return True

    def _grant(self) -> None:
        """To those first that have the least; of one peer, first come, first served."""
        for holder in sorted(self._waiting, key=lambda holder: (self._of[holder[0]], self._of[holder])):
            while holder in self._waiting and self._take(holder, self._waiting[holder][0].nbytes):
                waiter = self._waiting[holder][0]
                waiter.granted.set()
                self._leave(holder, waiter)
                if self._one_more == (holder, waiter.nbytes):  # the others of its address are last now
                    self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[0][0] == holder[0]))

    def _leave(self, holder: _Holder, waiter: _RoomWaiter) -> None:
        self._waiting[holder].remove(waiter)
        if not self._waiting[holder]:
            del self._waiting[holder]


class _InTurn(MessageStream[F]):
    """A stream that a peer opened, each of whose messages waits for the turn of its address."""

    _raw: StreamBytes

    async def _receive(self) -> tuple[F, list[bytes]]:
        await self.wait_begun(timeout=math.inf)
        await self._raw.turn()
        return await super()._receive()


class PeerFinder(Protocol):
    """Knows where peers may be dialed."""

    def addrs_of(self, peer_id: str) -> Sequence[str]:
        """As far as is known now."""

    async def find(self, peer_id: str) -> None:
        """Looks for a peer of which nothing is known."""


class NoFinder:
    """Knows nothing that the host does not know."""

    def addrs_of(self, peer_id: str) -> Sequence[str]:
        return ()

    async def find(self, peer_id: str) -> None:
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True)
class _Service(Generic[F]):
    """Serves the streams of one protocol that peers open."""

    streams: MessageStreams
    protocol: StreamProtocol[F]
    handler: Callable[[MessageStream[F]], Awaitable[None]]
    served: ShareCount
    stream_type: Callable[..., MessageStream[F]]  # made of a raw stream and a peer's id

    async def serve(self, raw: StreamBytes, peer_id: str) -> None:
        origin = self.streams.host.origin_of(peer_id)
        if not self.served.add(peer_id, origin):
            log.info("%s: there are too many streams of %s", self.protocol.id, peer_id)
            await raw.reset()
            return
        try:
            await self._serve_messages(self.stream_type(raw, peer_id=peer_id))
        finally:
            self.served.remove(peer_id, origin)

    async def _serve_messages(self, stream: MessageStream[F]) -> None:
        try:
            await (self.handler(stream) if self._has_our_key(stream.peer_id) else self._refuse(stream))
        except PeerError as error:
            log.debug("%s: %s", self.protocol.id, error)
            await stream.reset()
        except Exception as error:
            await stream.reset()
            self.streams.log_once(self.protocol.id, error)
        except BaseException:
            await stream.reset()
            raise
        else:
            await stream.close()

    def _has_our_key(self, peer_id: str) -> bool:
        try:
            return bool(peer_id_to_bytes(peer_id))
        except ValueError:
            return False

    async def _refuse(self, stream: MessageStream[F]) -> None:
        """Says why, where a message of the protocol can."""
        if "error" in self.protocol.frame.DESCRIPTOR.fields_by_name:
            text = f"petalnode's peers have Ed25519 keys, and the one of {stream.peer_id} is of another kind"
            refused: F = self.protocol.frame(error=wire.Error(code=wire.ERROR_UNSUPPORTED, message=text))
            await stream.send(refused, timeout=SHARES.refusal)


class MessageStreams:
    """The streams of one node.

    Attributes:
        finder: where peers may be dialed that the host does not know.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.finder: PeerFinder = NoFinder()
        self._logged: set[tuple[str, type]] = set()
        self.received = ReceivedBytes()
        self.received_ungranted = ReceivedBytes(self.received.most // SHARES.ungranted, self.received)

    def set_handler(
        self,
        protocol: StreamProtocol[F],
        handler: Callable[[MessageStream[F]], Awaitable[None]],
        *,
        max_streams: int = SHARES.max_served,
        in_turn: bool = True,
    ) -> None:
        """`handler` gets every stream of `protocol` that a peer opens, in a task of its own.

        At most `max_streams` are served at once, half of that for a peer or an address that is alone. What is more is
        reset. When it returns, the stream is closed; when it raises, it is reset. Errors never reach the node: a
        `PeerError` is the peer's matter, any other is logged once per kind.

        What the handler does counts for the peer's address until it grants something. With `in_turn`, each message
        waits for its turn, too (`NodeLimits.work_turn`).
        """
        stream_type = functools.partial(
            _InTurn if in_turn else MessageStream,
            protocol=protocol,
            room=self.received_ungranted,
            keeps_room=True,
        )
        served = ShareCount(max_streams, SHARES.least_served)
        service = _Service(self, protocol, handler, served, stream_type)
        self.host.set_stream_handler(protocol.id, service.serve)

    def log_once(self, protocol: str, error: Exception) -> None:
        """Logs a failure of ours; as an error the first time of each kind."""
        kind = (protocol, type(error))
        level = logging.DEBUG if kind in self._logged else logging.ERROR
        self._logged.add(kind)
        log.log(level, "a handler of %s failed", protocol, exc_info=error)

    async def new_stream(
        self,
        peer_id: str,
        protocol: StreamProtocol[F],
        *,
        timeout: float,
        direct: bool = False,
    ) -> MessageStream[F]:
        """A stream that the caller has to close or reset.

        Connects first if need be, to where the peer announced itself or the host remembers it. Kademlia is asked for
        the announcement of a peer of which nothing is known. Does not wait for the peer's consent: one that
        does not speak the protocol ends the stream, and the first `receive` says so. With `direct`, the stream takes an
        existing connection without a relay, or none.

        Raises:
            StreamTimeout: nothing came of it within `timeout` seconds.
            StreamClosed: the peer cannot be reached.
        """
        self.host.learn(peer_id, self.finder.addrs_of(peer_id))
        with trio.move_on_after(timeout):
            if not direct and not self.host.knows(peer_id):
                await self.finder.find(peer_id)
                self.host.learn(peer_id, self.finder.addrs_of(peer_id))
            try:
                raw = await self.host.open_stream(peer_id, protocol.id, direct=direct)
            except ConnectionError as error:
                raise StreamClosed(str(error), peer_id) from error
            return MessageStream(raw, protocol, peer_id, room=self.received)
        raise StreamTimeout(f"{peer_id} did not open a stream of {protocol.id} within {timeout:g} s", peer_id)

    @contextlib.asynccontextmanager
    async def open_stream(
        self, peer_id: str, protocol: StreamProtocol[F], *, timeout: float
    ) -> AsyncIterator[MessageStream[F]]:
        """As `new_stream`, closed at the end of the block, or reset if the block raises."""
        stream = await self.new_stream(peer_id, protocol, timeout=timeout)
        try:
            yield stream
        except BaseException:
            await stream.reset()
            raise
        else:
            await stream.close()
