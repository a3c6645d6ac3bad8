"""The keys of an attacker, each with connections from an address of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import trio
from google.protobuf.message import Message

from petalnode.crypto.identity import Identity
from petalnode.node.network.addresses import parse_peer
from petalnode.node.network.host import Host, open_host
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.network.transport.yamux import Muxer
from petalnode.protocols.framing import MessageStream, PeerError, varint
from petalnode.protocols.ids import StreamProtocol
from tests.node_inspection import muxer_of

F = TypeVar("F", bound=Message)
PATIENCE = 10.0
"""Seconds that an attacker waits for an answer."""
PAUSE = 0.05
"""Seconds after which an attack that was broken off begins again."""


@dataclass(frozen=True)
class Victim:
    """A node, as a stranger knows it; `served` is what a server has announced, by its ready event."""

    address: str
    served: dict[str, Any] = field(default_factory=dict)
    hidden: int = 64

    @property
    def peer_id(self) -> str:
        return parse_peer(self.address)[0]

    @property
    def socket(self) -> tuple[str, int]:
        """Where it listens."""
        _, _, host, _, port, *_ = self.address.split("/")
        return host, int(port)


class Key:
    """One key of the attacker, on a host of its own that listens nowhere and dials from `source`."""

    def __init__(self, host: Host, identity: Identity, source: str | None, number: int = 0) -> None:
        self.host = host
        self.identity = identity
        self.source = source
        self.number = number
        self.random = random.Random(number)
        self.dials = 0
        self._locks: dict[str, trio.Lock] = {}

    async def dial(self, victim: Victim) -> trio.SocketStream:
        """A connection of TCP, and nothing said on it."""
        with trio.fail_after(PATIENCE):
            self.dials += 1
            return await trio.open_tcp_stream(*victim.socket, local_address=self.source)

    async def connect(self, victim: Victim) -> None:
        """Makes sure that there is a connection, encrypted and multiplexed."""
        async with self._locks.setdefault(victim.peer_id, trio.Lock()):
            if not self.host.is_connected(victim.peer_id):
                with trio.fail_after(PATIENCE):
                    await self.host.adopt(await self.dial(victim), peer_id=victim.peer_id, initiator=True)

    async def muxer(self, victim: Victim) -> Muxer:
        """The connection, to write frames on it that no stream would."""
        await self.connect(victim)
        return muxer_of(self.host, victim.peer_id)

    async def open(self, victim: Victim, protocol: str) -> StreamBytes:
        await self.connect(victim)
        return await self.host.open_stream(victim.peer_id, protocol, direct=True)

    async def messages(self, victim: Victim, protocol: StreamProtocol[F]) -> MessageStream[F]:
        unbound = replace(protocol, max_header=1 << 16, max_payload=64 << 20)
        return MessageStream(await self.open(victim, protocol.id), unbound, victim.peer_id)

    async def leave(self) -> None:
        """Closes all connections."""
        for peer_id in self.host.connected():
            with trio.move_on_after(1.0):
                await self.host.disconnect(peer_id)


class _Resettable(Protocol):
    async def reset(self) -> None: ...


S = TypeVar("S", bound=_Resettable)


@asynccontextmanager
async def until_reset(opening: Awaitable[S]) -> AsyncIterator[S]:
    """The stream that is being opened, which is reset behind the block."""
    stream = await opening
    try:
        yield stream
    finally:
        await stream.reset()


Attack = Callable[[Key, Victim], Awaitable[None]]


async def keep_up(attack: Attack, key: Key, victim: Victim) -> None:
    """Carries an attack on for ever, beginning again whenever the victim has broken it off."""
    while True:
        with suppress(OSError, PeerError, ValueError, trio.TooSlowError, trio.BrokenResourceError, IndexError):
            await attack(key, victim)
        await trio.sleep(PAUSE * (1 + key.random.random()))


@asynccontextmanager
async def open_keys(count: int, sources: Sequence[str | None], seed: int) -> AsyncIterator[list[Key]]:
    """So many keys, in turns at these addresses of the attacker's machine; None for any."""
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        keys = []
        for number in range(count):
            identity = Identity.from_seed(rng.randbytes(32))
            host = await stack.enter_async_context(open_host(identity, listen=(), announce=(), psk=None))
            keys.append(Key(host, identity, sources[number % len(sources)], number))
        yield keys


def delimited(message: Message | bytes) -> bytes:
    """A message as the standard protocols frame it."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return varint(len(data)) + data
