"""Hosts of this process, on loopback, and what they are told as a stranger would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from google.protobuf.message import Message as AnyMessage
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host, open_host
from petalnode.protocols.framing import varint

LOOPBACK = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
TIMEOUT = 300.0


@asynccontextmanager
async def host(listen: Sequence[Multiaddr] = ()) -> AsyncIterator[Host]:
    async with open_host(Identity.generate(), listen=listen, announce=(), psk=None) as opened:
        yield opened


@asynccontextmanager
async def knowing(victim: Host) -> AsyncIterator[Host]:
    async with host() as opened:
        opened.remember(victim.peer_id, victim.addrs())
        yield opened


def delimited(message: AnyMessage) -> bytes:
    data = message.SerializeToString()
    return varint(len(data)) + data
