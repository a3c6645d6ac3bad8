"""Typed message streams over a host: opening them to peers, and serving those that peers open."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio
from google.protobuf.message import Message

from ...protocols.framing import (
    MAX_HEADER,
    MAX_PAYLOAD,
    MessageStream,
    PeerError,
    StreamClosed,
    StreamTimeout,
)
from ..network.host import Host
from ..network.transport.limits import ShareCount
from ..network.transport.memory import own_budgets
from ..network.transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)

MAX_SERVED: Final = 1024
"""Streams of one protocol that a node serves at once; a peer or address gets no more than it leaves for others."""
LEAST_SERVED: Final = 8
"""Of one peer or address, as long as there are any."""

F = TypeVar("F", bound=Message)


@dataclass
class _Waiter:
    peer_id: str
    nbytes: int
    granted: trio.Event = field(default_factory=trio.Event)


class ReceivedBytes:
    """The memory for messages that all streams of a node share: `most` bytes in all, `most_of_peer` for one peer; what
    this machine has for it if they are not given.

    First come, first served; who waits for what its own messages take keeps nobody else waiting.
    """

    def __init__(self, most: int | None = None, most_of_peer: int | None = None) -> None:
        self.most = own_budgets().received if most is None else most
        self.most_of_peer = own_budgets().received_of_peer if most_of_peer is None else most_of_peer
        self.taken = 0
        self._of_peer: Counter[str] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def of(self, peer_id: str) -> int:
        return self._of_peer[peer_id]

    def take_nowait(self, peer_id: str, nbytes: int) -> bool:
        overtakes = any(self._has_share(waiter.peer_id, waiter.nbytes) for waiter in self._waiting)
        if overtakes or not self._has_share(peer_id, nbytes) or not self._has_room(nbytes):
            return False
        self._take(peer_id, nbytes)
        return True

    async def take(self, peer_id: str, nbytes: int) -> None:
        waiter = _Waiter(peer_id, nbytes)
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self.give_back(peer_id, nbytes)
            else:
                self._waiting.remove(waiter)
                self._grant()
            raise

    def give_back(self, peer_id: str, nbytes: int) -> None:
        self.taken -= nbytes
        self._of_peer[peer_id] -= nbytes
        if not self._of_peer[peer_id]:
            del self._of_peer[peer_id]
        self._grant()

    def _take(self, peer_id: str, nbytes: int) -> None:
        self.taken += nbytes
        self._of_peer[peer_id] += nbytes

    def _has_share(self, peer_id: str, nbytes: int) -> bool:
        """A peer that holds nothing may have one message of any size."""
        held = self._of_peer[peer_id]
        return not held or held + nbytes <= self.most_of_peer

    def _has_room(self, nbytes: int) -> bool:
        return not self.taken or self.taken + nbytes <= self.most

    def _grant(self) -> None:
        for waiter in list(self._waiting):
            if not self._has_share(waiter.peer_id, waiter.nbytes):
                continue
            if not self._has_room(waiter.nbytes):
                return
            self._waiting.remove(waiter)
            self._take(waiter.peer_id, waiter.nbytes)
            waiter.granted.set()


class MessageStreams:
    """The streams of one node.

    `addrs_of` gives where a peer may be dialed as far as is known; `find` looks for a peer of which nothing is known.
    """

    def __init__(
        self, host: Host, *, addrs_of: Callable[[str], Sequence[str]], find: Callable[[str], Awaitable[None]]
    ) -> None:
        self.host = host
        self._addrs_of = addrs_of
        self._find = find
        self._logged: set[tuple[str, type]] = set()
        self.received = ReceivedBytes()

    def set_handler(
        self,
        protocol: str,
        frame_type: type[F],
        handler: Callable[[MessageStream[F]], Awaitable[None]],
        *,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
        max_streams: int = MAX_SERVED,
    ) -> None:
        """`handler` gets every stream of `protocol` that a peer opens, in a task of its own.

        At most `max_streams` are served at once, half of that for a peer or an address that is alone; what is more is
        reset. When it returns, the stream is closed; when it raises, it is reset. Errors never reach the node: a
        `PeerError` is the peer's matter, any other is logged once per kind.
        """

        served = ShareCount(max_streams, LEAST_SERVED)

        async def serve(raw: StreamBytes, peer_id: str) -> None:
            origin = self.host.origin_of(peer_id)
            if not served.add(peer_id, origin):
                log.info("%s: there are too many streams of %s", protocol, peer_id)
                await raw.reset()
                return
            try:
                await serve_message(raw, peer_id)
            finally:
                served.remove(peer_id, origin)

        async def serve_message(raw: StreamBytes, peer_id: str) -> None:
            stream = MessageStream(
                raw,
                frame_type,
                peer_id,
                max_header=max_header,
                max_payload=max_payload,
                room=self.received,
                keeps_room=True,
            )
            try:
                await handler(stream)
            except PeerError as error:
                log.debug("%s: %s", protocol, error)
                await stream.reset()
            except Exception as error:
                await stream.reset()
                self._log_once(protocol, error)
            except BaseException:
                await stream.reset()
                raise
            else:
                await stream.close()

        self.host.set_stream_handler(protocol, serve)

    def _log_once(self, protocol: str, error: Exception) -> None:
        kind = (protocol, type(error))
        level = logging.DEBUG if kind in self._logged else logging.ERROR
        self._logged.add(kind)
        log.log(level, "a handler of %s failed", protocol, exc_info=error)

    async def new_stream(
        self,
        peer_id: str,
        protocol: str,
        frame_type: type[F],
        *,
        addrs: Sequence[str] = (),
        timeout: float,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
        direct: bool = False,
    ) -> MessageStream[F]:
        """A stream that the caller has to close or reset.

        Connects first if need be, to `addrs`, which a person gave, or to where the peer announced itself; Kademlia is
        asked for the announcement of a peer of which nothing is known. Does not wait for the peer's consent: one that
        does not speak the protocol ends the stream, and the first `receive` says so. With `direct`, the stream takes an
        existing connection without a relay, or none.

        Raises:
            StreamTimeout: nothing came of it within `timeout` seconds.
            StreamClosed: the peer cannot be reached.
        """
        self.host.learn(peer_id, self._addrs_of(peer_id))
        self.host.remember(peer_id, addrs)
        with trio.move_on_after(timeout):
            if not direct and not self.host.knows(peer_id):
                await self._find(peer_id)
                self.host.learn(peer_id, self._addrs_of(peer_id))
            try:
                raw = await self.host.open_stream(peer_id, protocol, direct=direct)
            except ConnectionError as error:
                raise StreamClosed(str(error), peer_id) from error
            return MessageStream(
                raw, frame_type, peer_id, max_header=max_header, max_payload=max_payload, room=self.received
            )
        raise StreamTimeout(f"{peer_id} did not open a stream of {protocol} within {timeout:g} s", peer_id)

    @contextlib.asynccontextmanager
    async def open_stream(
        self,
        peer_id: str,
        protocol: str,
        frame_type: type[F],
        *,
        addrs: Sequence[str] = (),
        timeout: float,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
    ) -> AsyncIterator[MessageStream[F]]:
        """As `new_stream`, closed at the end of the block, or reset if the block raises."""
        stream = await self.new_stream(
            peer_id,
            protocol,
            frame_type,
            addrs=addrs,
            timeout=timeout,
            max_header=max_header,
            max_payload=max_payload,
        )
        try:
            yield stream
        except BaseException:
            await stream.reset()
            raise
        else:
            await stream.close()
