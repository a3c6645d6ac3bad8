"""A directory of one node whose streams a test opens, on a host and with a table that do nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.announcer import Announcer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.directory import Directory
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream

LISTENING = "/ip4/192.0.2.1/tcp/1"

OpenStream = Callable[[str, float], Awaitable[MessageStream[wire.DirectoryFrame]]]
"""Opens a stream to a peer (id) within some seconds."""


async def nothing(*_: Any, **__: Any) -> None:
    await trio.lowlevel.checkpoint()


class _Streams:
    def __init__(self, open_stream: OpenStream, host: dict[str, Any]) -> None:
        parts: dict[str, Any] = {"connected": list, "remember": nothing_now, "learn": nothing_now, "addrs": list}
        self.host: Any = SimpleNamespace(**parts | {"origin_of": str} | host)
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
    streams: Any = _Streams(open_stream, host)
    return Directory(config, dht, streams)


def announcer_of(directory: Directory, identity: Identity, dht: Any = None, *, ttl: float = 45.0) -> Announcer:
    """What announces the node of a directory."""
    config = SwarmConfig(identity, announcement_ttl=ttl)
    return Announcer(config, directory._host, dht or directory._dht, directory)
