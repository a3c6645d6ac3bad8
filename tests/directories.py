"""A directory of one node whose streams a test opens, on a host and with a table that do nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.announcer import Announcer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.streams import MessageStreams
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import MessageStream, PeerError
from tests.announcements import held

LISTENING = "/ip4/192.0.2.1/tcp/1"

Stream = MessageStream[wire.DirectoryFrame]
OpenStream = Callable[[str, float], Awaitable[Stream]]
"""Opens a stream to a peer (id) within some seconds."""


async def nothing(*_: Any, **__: Any) -> None:
    await trio.lowlevel.checkpoint()


class _Streams(MessageStreams):
    def __init__(self, open_stream: OpenStream, host: dict[str, Any]) -> None:
        parts: dict[str, Any] = {"connected": list, "remember": nothing_now, "learn": nothing_now, "addrs": list}
        made: Any = SimpleNamespace(**parts | {"origin_of": str} | host)
        super().__init__(made)
        self._open_stream = open_stream

    async def new_stream(self, peer_id: str, *_: object, timeout: float, **__: object) -> Any:
        return await self._open_stream(peer_id, timeout)


def nothing_now(*_: object) -> None:
    pass


def a_directory(
    identity: Identity,
    open_stream: OpenStream = nothing,  # type: ignore[assignment]
    peers: Sequence[str] = (),
    *,
    ttl: float = 45.0,
    listens: bool = False,
    **host: Any,
) -> Directory:
    """`peers` are the ids of those to join by; `host` has what the node's host does other than nothing."""
    config = SwarmConfig(
        identity,
        listen=(LISTENING,) if listens else (),
        peers=tuple(f"{LISTENING}/p2p/{peer_id}" for peer_id in peers),
        announcement_ttl=ttl,
    )
    dht: Any = SimpleNamespace(add_peer=nothing)
    return Directory(config, dht, _Streams(open_stream, host))


def announcer_of(directory: Directory, identity: Identity, dht: Any = None, *, ttl: float = 45.0) -> Announcer:
    """What announces the node of a directory."""
    config = SwarmConfig(identity, announcement_ttl=ttl)
    return Announcer(config, directory._host, dht or directory._dht, directory)


def answered_by(serve: Callable[[Stream], Awaitable[None]], nursery: trio.Nursery, asker: str = "us") -> OpenStream:
    """Opens streams from `asker` (a peer id) at whose other end `serve` runs."""

    async def answer(stream: Stream) -> None:
        try:
            await serve(stream)
        except PeerError:
            await stream.reset()

    async def open_stream(peer_id: str, _timeout: float) -> Stream:
        ours, theirs = message_streams(DIRECTORY, asker, peer_id)
        nursery.start_soon(answer, theirs)
        return ours

    return open_stream


def from_many(count: int) -> SwarmView:
    """What servers have said that this node has met, one announcement of 600 bytes each."""
    view = SwarmView()
    for number in range(count):
        view = view.merge([held(number, size=600)], time.time(), source=f"server {number}", met=True)
    return view
