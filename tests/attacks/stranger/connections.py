"""Attacks on connections, frames and streams, before any protocol of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from petalnode.node.network.transport.muxed_stream import DATA, HEADER, PING, RST, SYN, WINDOW_UPDATE
from petalnode.node.network.transport.negotiation import question
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.inference import INFERENCE

from .keys import Key, Victim, until_reset

OPENED_AND_RESET = b"".join(
    HEADER.pack(0, WINDOW_UPDATE, flags, stream_id, 0)
    for stream_id in range(100_001, 100_001 + 2 * 2048, 2)
    for flags in (SYN, RST)
)
PINGS = HEADER.pack(0, PING, SYN, 0, 0) * 4096
OF_NO_STREAM = (HEADER.pack(0, DATA, 0, 100_001, 1) + b"x") * 4096
GARBAGE_PORTION = 16 << 10


def flooding(frames: bytes) -> Callable[[Key, Victim], Awaitable[None]]:
    """The same frames again and again."""

    async def flood(key: Key, victim: Victim) -> None:
        muxer = await key.muxer(victim)
        while muxer.lost is None:
            muxer.secured_conn.put(frames)
            await muxer.wait_room()
            await trio.lowlevel.checkpoint()

    return flood


async def open_and_reset(key: Key, victim: Victim) -> None:
    """Streams that ask for a protocol and are reset at once, with ever new numbers."""
    muxer = await key.muxer(victim)
    asked = question(DIRECTORY.id)
    for first in range(1_000_001, 1 << 31, 512):
        if muxer.lost is not None:
            return
        muxer.secured_conn.put(
            b"".join(
                HEADER.pack(0, DATA, SYN, number, len(asked)) + asked + HEADER.pack(0, WINDOW_UPDATE, RST, number, 0)
                for number in range(first, first + 512, 2)
            )
        )
        await muxer.wait_room()
        await trio.lowlevel.checkpoint()


async def handshakes_without_end(key: Key, victim: Victim) -> None:
    """Connections that begin a handshake and never end it."""
    held = []
    try:
        while True:
            with trio.move_on_after(1.0):
                stream = await key.dial(victim)
                held.append(stream)
                await stream.send_all(key.random.choice((b"", b"\x13/multi", question("/noise"), b"\0" * 64)))
            if len(held) > 200:
                await trio.aclose_forcefully(held.pop(0))
            await trio.sleep(0.002)
    finally:
        for stream in held:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)


async def reconnect(key: Key, victim: Victim) -> None:
    """Whole handshakes, each for nothing."""
    await key.connect(victim)
    await key.host.disconnect(victim.peer_id)


async def silent_streams(key: Key, victim: Victim, protocol: str = DIRECTORY.id) -> None:
    """As many streams as there can be, on which nothing is said."""
    streams = []
    with suppress(ConnectionError):
        for _ in range(1000):
            streams.append(await key.open(victim, protocol))
            await trio.lowlevel.checkpoint()
    await trio.sleep(5)
    for stream in streams:
        await stream.reset()


async def slow_negotiation(key: Key, victim: Victim) -> None:
    """Streams that ask for a protocol a byte at a time."""
    muxer = await key.muxer(victim)
    asked = question(INFERENCE.id)
    first = key.random.randrange(1 << 20, 1 << 28) * 2 + 1
    numbers = range(first, first + 400, 2)
    for place in range(len(asked)):
        flags = 0 if place else SYN
        muxer.secured_conn.put(
            b"".join(HEADER.pack(0, DATA, flags, number, 1) + asked[place : place + 1] for number in numbers)
        )
        await muxer.wait_room()
        await trio.sleep(0.2)
        if muxer.lost is not None:
            return


def garbage(protocol: str) -> Callable[[Key, Victim], Awaitable[None]]:
    """Random bytes on the streams of a protocol."""

    async def send(key: Key, victim: Victim) -> None:
        async with until_reset(key.open(victim, protocol)) as stream:
            with trio.move_on_after(5.0):
                while True:
                    await stream.write(key.random.randbytes(key.random.randrange(1, GARBAGE_PORTION)))

    return send
