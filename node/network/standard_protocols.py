"""What every node of libp2p answers: pings, and what a peer says of itself, asked or when that changes (identify push).

libp2p's own handlers take each 32 bytes of a frame for a ping, 2,000 of a large frame. They parse 1 MiB of what a peer
says of itself, whenever it comes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio
from libp2p.abc import IPeerStore
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError

from ...protocols.delimited import DelimitedStream
from ...protocols.nat_traversal import IDENTIFY, TRAVERSAL
from .shares import Rates
from .transport.address_book import MAX_ADDRS
from .transport.limits import LIMITS
from .transport.stream_bytes import Connection, StreamBytes

log = logging.getLogger(__name__)

PING: Final = "/ipfs/ping/1.0.0"
IDENTIFY_PUSH: Final = "/ipfs/id/push/1.0.0"
PINGS: Final = (20.0, 100.0)
"""Of a peer, per second and at once; those beyond that are answered later."""
PUSHES: Final = (0.5, 16.0)
"""Of a peer, per second and at once; those beyond that are not read."""
_PING_BYTES: Final = 32
_MAX_IDENTIFIED: Final = 256  # bytes of an address, a protocol's name and a key that a peer says of itself
_MAX_IDENTIFIED_PROTOCOLS: Final = 128

Handler = Callable[[StreamBytes, str], Awaitable[None]]


async def keep_identified(peerstore: IPeerStore, peer_id: ID, message: Identify) -> None:
    """As libp2p's own, which keeps up to 1 MiB of each key that has ever connected or pushed."""
    small = [addr for addr in message.listen_addrs if len(addr) <= _MAX_IDENTIFIED][:MAX_ADDRS]
    known = [name for name in message.protocols if len(name) <= _MAX_IDENTIFIED][:_MAX_IDENTIFIED_PROTOCOLS]
    kept = Identify(listen_addrs=small, protocols=known)
    if len(message.public_key) <= _MAX_IDENTIFIED:
        kept.public_key = message.public_key
    await update_peerstore_from_identify(peerstore, peer_id, kept)


def speaks(peerstore: IPeerStore, peer_id: str, protocol: str) -> bool:
    """Whether a peer has said that it speaks a protocol."""
    with contextlib.suppress(PeerStoreError):
        return protocol in peerstore.get_protocols(ID.from_string(peer_id))
    return False


async def identify(connection: Connection, peerstore: IPeerStore, peer_id: ID) -> bool:
    """Asks a peer who it is, and keeps what it says; whether that came."""
    try:
        with trio.fail_after(LIMITS.patience):
            raw = await connection.open_stream(IDENTIFY)
    except (ConnectionError, trio.TooSlowError) as error:
        log.debug("%s cannot be asked who it is: %r", peer_id, error)
        return False
    return await take_identified(raw, peerstore, peer_id)


async def take_identified(raw: StreamBytes, peerstore: IPeerStore, peer_id: ID) -> bool:
    """Keeps what the peer says of itself on the stream, and ends that; whether it came, in bounds and in time."""
    stream = DelimitedStream(raw, str(peer_id), max_message=TRAVERSAL.identify_max_message)
    try:
        await keep_identified(peerstore, peer_id, await stream.receive(Identify, timeout=LIMITS.patience))
        await raw.close()
        return True
    except Exception as error:  # whatever libp2p makes of a stranger's bytes
        log.debug("what %s says of itself: %r", peer_id, error)
        await raw.reset()
        return False


def answer_pings() -> Handler:
    return partial(_answer_pings, Rates(*PINGS))


def take_pushes(peerstore: IPeerStore) -> Handler:
    return partial(_take_pushes, Rates(*PUSHES), peerstore)


async def _answer_pings(rates: Rates, raw: StreamBytes, peer_id: str) -> None:
    ping = b""
    try:
        while True:
            with trio.fail_after(LIMITS.patience):
                while len(ping) < _PING_BYTES:
                    part = await raw.read(_PING_BYTES - len(ping))
                    if not part:
                        await raw.close()
                        return
                    ping += part
            await rates.wait(peer_id, 1)
            with trio.fail_after(LIMITS.patience):
                await raw.write(ping)
            ping = b""
    except (OSError, trio.TooSlowError) as error:
        log.debug("pings of %s: %r", peer_id, error)
        await raw.reset()


async def _take_pushes(rates: Rates, peerstore: IPeerStore, raw: StreamBytes, peer_id: str) -> None:
    bucket = rates.of(peer_id)
    if bucket.delay(1) == 0:
        bucket.take_ahead(1)
        await take_identified(raw, peerstore, ID.from_string(peer_id))
    else:
        await raw.reset()
