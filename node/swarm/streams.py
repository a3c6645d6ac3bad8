"""Typed message streams over a host: opening them to peers, and serving those that peers open."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

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
from ..network.transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Message)


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

    def set_handler(
        self,
        protocol: str,
        frame_type: type[F],
        handler: Callable[[MessageStream[F]], Awaitable[None]],
        *,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        """`handler` gets every stream of `protocol` that a peer opens, in a task of its own.

        When it returns, the stream is closed; when it raises, it is reset. Errors never reach the node: a
        `PeerError` is the peer's matter, any other is logged once per kind.
        """

        async def serve(raw: StreamBytes, peer_id: str) -> None:
            stream = MessageStream(raw, frame_type, peer_id, max_header=max_header, max_payload=max_payload)
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
            return MessageStream(raw, frame_type, peer_id, max_header=max_header, max_payload=max_payload)
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
