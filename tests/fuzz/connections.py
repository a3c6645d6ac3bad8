"""Targets below the protocols: handshakes under a swarm key or none, Noise, Yamux, the negotiation of streams, and what
libp2p's host serves on them, Kademlia and gossip among it. No socket is opened."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import trio
from google.protobuf.message import Message
from libp2p.crypto.pb import crypto_pb2
from libp2p.identity.identify.pb import identify_pb2
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from multiaddr import Multiaddr

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.network import gossip as gossip_module
from petalnode.node.network.dht import Dht
from petalnode.node.network.host import Host, open_host
from petalnode.node.network.kad_store import MODELS_KEY, server_key
from petalnode.node.network.nat import hole_punching
from petalnode.node.network.nat.autonat import DialRequests, local_endpoints
from petalnode.node.network.nat.circuits import Circuits
from petalnode.node.network.nat.dial_back import DialBackService
from petalnode.node.network.nat.hole_punching import HolePuncher
from petalnode.node.network.nat.relay import RelayLimits, RelayService
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.muxed_stream import ACK, DATA, FIN, HEADER, PING, RST, SYN, WINDOW_UPDATE
from petalnode.node.network.transport.negotiation import question, reason_of
from petalnode.node.network.transport.raw_connection import Path
from petalnode.node.network.transport.websocket import accept
from petalnode.node.network.transport.yamux import Muxer
from petalnode.protocols import nat_traversal
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN
from petalnode.protocols.circuit import HOP, STOP
from tests.attacks.websocket_frames import BINARY, CLOSE, CONTINUATION, PONG, TEXT, UPGRADE
from tests.attacks.websocket_frames import PING as WEB_PING
from tests.attacks.websocket_frames import frame as websocket_frame
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, OTHER, SERVER
from tests.fuzz.harness import Target
from tests.fuzz.mutation import INTEGERS, Mutator, frame
from tests.memory_muxer import MemoryRaw, OtherEnd, muxer, noise_session
from tests.node_inspection import (
    expect_circuits,
    held_back,
    in_progress,
    network_of,
    open_ends,
    refuse_dials,
    use_swarm_key,
)

_FROM: Final = "/ip4/203.0.113.7/tcp/31330"
_RELAYED: Final = Path(False, OTHER.peer_id, f"{_FROM}/p2p/{OTHER.peer_id}/p2p-circuit", inbound=True)
_DIRECT: Final = Path(True, None, _FROM, inbound=True)
_KEY: Final = "ab" * 32

# --- Yamux


def _yamux(mutator: Mutator) -> list[bytes]:
    """Frames on a few streams, in portions."""
    draw = mutator.random
    data = bytearray()
    for _ in range(draw.choice((1, 5, 20, 60))):
        stream = draw.choice((1, 1, 3, 3, 5, 2, 0, (1 << 32) - 1))
        kind = draw.choice((DATA, DATA, WINDOW_UPDATE, WINDOW_UPDATE, PING, 3 if mutator.chance(0.02) else 0))
        flags = draw.choice((0, 0, SYN, SYN, ACK, FIN, RST, SYN | RST, SYN | FIN, 0xFFFF if mutator.chance(0.1) else 0))
        length = draw.choice((0, 1, 10, 1000)) if kind == DATA else draw.choice((0, *INTEGERS[:-1]))
        body = draw.randbytes(length) if kind == DATA else b""
        if mutator.chance(0.01):
            length = draw.choice(INTEGERS[:-1])
        data += HEADER.pack(0, kind, flags, stream, length) + body
    if mutator.chance(0.1):
        data += HEADER.pack(0, WINDOW_UPDATE, SYN | RST, 7, 0) * 3000
    return mutator.split(mutator.bytes(bytes(data)) if mutator.chance(0.2) else bytes(data))


def _noise(mutator: Mutator) -> list[bytes]:
    """What nobody has sealed."""
    return [mutator.random.randbytes(mutator.random.randrange(1, 40)), *_yamux(mutator)]


class _Yamux:
    """Connections whose streams are read, and closed by us when they end."""

    def __init__(self, sealed: bool) -> None:
        self._sealed = sealed
        self._left = {"unread": 0, "streams": 0, "held back": 0}

    def held(self) -> Mapping[str, int]:
        return self._left

    async def feed(self, given: list[bytes]) -> None:
        async with muxer() as (ours, other), trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, ours, nursery)
            for data in given:
                self._say(other, data)
                await trio.testing.wait_all_tasks_blocked()
                other.raw.sent.clear()
            too_much = held_back(ours) > 16_384
            await other.raw.close()
            await ours.close()
            self._left = {"unread": ours.held() * (ours.lost is None), "streams": ours.open_streams}
            self._left["held back"] = int(too_much)
            nursery.cancel_scope.cancel()

    def _say(self, other: OtherEnd, data: bytes) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # it has been ended
            other.raw.say.send_nowait(data) if self._sealed else other.say_bytes(data)

    async def _serve(self, ours: Muxer, nursery: trio.Nursery) -> None:
        with contextlib.suppress(Exception):
            while True:
                nursery.start_soon(self._read, await ours.accept_stream())

    async def _read(self, stream: Any) -> None:
        with contextlib.suppress(Exception):
            while await stream.read(1000):
                await stream.write(b"answer")
        await stream.close()


@asynccontextmanager
async def _yamux_connection(sealed: bool) -> AsyncIterator[_Yamux]:
    yield _Yamux(sealed)


# --- handshakes


@dataclass(frozen=True)
class Tampered:
    """`changes` are made to writes, counted from 0, of who dials, who leaves behind the write `last`; `psks` are the
    keys of both."""

    changes: Mapping[int, Callable[[bytes], list[bytes]]]
    psks: tuple[str | None, str | None]
    last: int = 1000

    def __len__(self) -> int:
        return 1000


def _tampered(mutator: Mutator) -> Tampered:
    def change(data: bytes) -> list[bytes]:
        return mutator.split(mutator.bytes(data)) if mutator.chance(0.8) else [mutator.random.randbytes(len(data))]

    portions: Callable[[bytes], list[bytes]] = mutator.split
    changes = {mutator.random.randrange(7): change}
    if mutator.chance(0.3):
        changes = dict.fromkeys(range(7), portions) | changes
    psks = mutator.random.choice(
        ((None, None), (None, None), (_KEY, _KEY), (None, _KEY), (_KEY, None), (_KEY, "cd" * 32))
    )
    if mutator.chance(0.3):
        return Tampered({}, (psks[0], psks[0]), mutator.random.randrange(7))
    return Tampered(changes, psks)


class _Wire(MemoryRaw):
    """One end of a connection between two hosts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=path)
        self.other = self
        self.changes: Mapping[int, Callable[[bytes], list[bytes]]] = {}
        self.last = 1000
        self._writes = 0
        self._unread = b""

    def send_nowait(self, data: bytes) -> int:
        if self.closed:
            raise ConnectionResetError("the connection is gone")
        change = self.changes.get(self._writes, lambda same: [same])
        self._writes += 1
        for part in change(data):
            if part and not self.other.closed:
                with contextlib.suppress(trio.ClosedResourceError):  # it has left
                    self.other.say.send_nowait(part)
        if self._writes > self.last:
            self.other.say.close()
            self.last = 1000
        return len(data)

    async def receive(self, n: int = 1 << 18) -> bytes:
        data = self._unread or await super().receive()
        self._unread = data[n:]
        return data[:n]

    async def drain(self) -> None: ...

    async def close(self) -> None:
        await super().close()
        self.other.say.close()


class Handshakes:
    def __init__(self, dialing: Host, listening: Host) -> None:
        self._hosts = dialing, listening

    def held(self) -> Mapping[str, int]:
        return {str(number): len(network_of(host).get_connections()) for number, host in enumerate(self._hosts)}

    async def feed(self, given: Tampered) -> None:
        dialer, listener = _Wire(Path(True, None, _FROM, inbound=False)), _Wire(_DIRECT)
        dialer.other, listener.other = listener, dialer
        dialer.changes, dialer.last = given.changes, given.last
        for host, psk in zip(self._hosts, given.psks, strict=True):
            use_swarm_key(host, psk)
        conns: list[Any] = []

        async def secure(host: Host, raw: _Wire, peer_id: Any) -> None:
            try:
                with trio.fail_after(10):  # as those who listen and dial have it
                    conns.append(await network_of(host).secure(raw, peer_id))
            except Exception as error:
                reason_of(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure, self._hosts[0], dialer, network_of(self._hosts[1]).self_id)
            nursery.start_soon(secure, self._hosts[1], listener, None)
        for conn in conns:
            await conn.close()
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def handshakes() -> AsyncIterator[Handshakes]:
    options: dict[str, Any] = {"listen": (), "announce": (), "psk": None}
    async with open_host(ATTACKER, **options) as dialing, open_host(SERVER, **options) as listening:
        yield Handshakes(dialing, listening)


# --- WebSocket


def _websocket(mutator: Mutator) -> list[bytes]:
    """A request, right or wrong, and frames."""
    draw = mutator.random
    request = mutator.bytes(UPGRADE) if mutator.chance(0.3) else UPGRADE
    frames = bytearray()
    for _ in range(draw.choice((1, 5, 30))):
        kind = draw.choice((BINARY, BINARY, CONTINUATION, WEB_PING, PONG, TEXT, CLOSE, draw.randrange(16)))
        data = draw.randbytes(draw.choice((0, 1, 10, 125, 126, 1000, 70_000)))
        size = draw.choice(INTEGERS[:-1]) % (1 << 63) if mutator.chance(0.05) else None
        frames += websocket_frame(kind, data, fin=mutator.chance(0.7), masked=mutator.chance(0.97), size=size)
    said = mutator.bytes(bytes(frames)) if mutator.chance(0.2) else bytes(frames)
    return [request + b"\r\n", *mutator.split(said)]


class _WebSocket:
    """Connections whose bytes are read."""

    def __init__(self) -> None:
        self._limits = NodeLimits()

    def held(self) -> Mapping[str, int]:
        return {"connections": self._limits.connections}

    async def feed(self, given: list[bytes]) -> None:
        raw = MemoryRaw(origin="203.0.113.7")
        for part in given:
            if part:
                raw.say.send_nowait(part)
        raw.say.close()
        with contextlib.suppress(OSError):
            above = await accept(raw, ("ws",), None, self._limits)
            while await above.receive():
                pass
            await above.close()


@asynccontextmanager
async def _websockets() -> AsyncIterator[_WebSocket]:
    yield _WebSocket()


# --- streams of a host


@dataclass(frozen=True)
class Opened:
    """What is said on the streams of a connection: by stream, the portions; then `flags` of Yamux, or silence."""

    said: tuple[tuple[int, bytes], ...]
    flags: int
    path: Path

    def __len__(self) -> int:
        return sum(len(data) for _, data in self.said)


class Streams:
    """A host with the services of a node; each input comes on a connection of its own, which a peer keeps alive.

    `table` tells what the services hold; `closes` says that the peer closes the connection, where that is what ends the
    streams.
    """

    def __init__(self, host: Host, closes: bool) -> None:
        self._host = host
        self.table: Callable[[], Mapping[str, int]] = dict
        self._closes = closes
        self.failures: list[Exception] = []

    def held(self) -> Mapping[str, int]:
        connections = len(network_of(self._host).get_connections())
        return {"connections": connections, "ends": open_ends(self._host), **self.table()}

    async def feed(self, given: Opened) -> None:
        network = network_of(self._host)
        raw = MemoryRaw(path=given.path)
        session, other = noise_session(raw)
        other.say_bytes(question(YAMUX))
        ours: Any = await network.upgrader.upgrade_connection(session, session.remote_peer)
        other.plaintext()  # that it agrees
        conn = await network.add_conn(ours, direction="inbound")
        for handler in network.on_connected:
            handler(str(ours.peer_id), given.path)
        opened = set()
        for stream, data in given.said:
            if stream not in opened:
                other.open(stream)
                opened.add(stream)
            other.send(stream, data)
            await trio.testing.wait_all_tasks_blocked()
            self._react(other)
        for stream in opened if given.flags else ():
            other.say(WINDOW_UPDATE, given.flags, stream)
        while ours.open_streams and not self._closes and ours.lost is None:
            await trio.sleep(0.5)
            self._react(other)
        await conn.close()
        await trio.testing.wait_all_tasks_blocked()
        if self.failures:
            raise self.failures.pop()

    def _react(self, other: OtherEnd) -> None:
        """Shows that the peer lives, and is ready for more."""
        if other.raw.closed:
            return
        for kind, flags, stream, length, _ in other.frames():
            if kind == PING and flags & SYN:
                other.say(PING, ACK, 0, length)
            elif kind == DATA:
                other.say(WINDOW_UPDATE, 0, stream, length)


async def _refuse_to_dial(*_: Any) -> Any:
    raise OSError("nobody is dialed here")


@asynccontextmanager
async def node_host(kind: str) -> AsyncIterator[Streams]:
    async with (
        open_host(SERVER, listen=(), announce=(Multiaddr(_FROM),), psk=None) as host,
        trio.open_nursery() as nursery,
    ):
        refuse_dials(host)
        with patch.object(hole_punching, "dial_from", _refuse_to_dial):
            subject = Streams(host, closes=kind == "gossip")
            with _caught(host, subject):
                async with _services(kind, host, nursery) as table:
                    subject.table = table
                    yield subject
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def _caught(host: Host, subject: Streams) -> Iterator[None]:
    """Errors of our own handlers are noticed before libp2p's host drops them."""
    set_handler = host.set_stream_handler

    def watched(protocol: str, handler: Callable[[Any, str], Awaitable[None]], **options: Any) -> None:
        async def serve(raw: Any, peer_id: str) -> None:
            try:
                await handler(raw, peer_id)
            except Exception as error:
                subject.failures.append(error)

        set_handler(protocol, serve, **options)

    with patch.object(host, "set_stream_handler", watched):
        yield


@asynccontextmanager
async def _services(kind: str, host: Host, nursery: trio.Nursery) -> AsyncIterator[Callable[[], Mapping[str, int]]]:
    if kind == "gossip":
        async with gossip_module.open_gossip(
            host, "topic", max_bytes=1000, accept=lambda *_: True, forwards=lambda *_: True
        ):
            yield dict
        return
    if kind == "table":
        table = Dht(host, serve=True)
        yield lambda: {"values": table.kept()["values"] > 100, "peers": table.kept()["peers"] > 100}
        return
    relay = RelayService(host, RelayLimits(circuit_seconds=60))
    relay.start()
    dial_back, circuits = DialBackService(host), Circuits(host)
    DialRequests(host)
    expect_circuits(circuits)
    node: Any = SimpleNamespace(local=local_endpoints(()), reached=())
    puncher = HolePuncher(host, nursery, node)

    def held() -> Mapping[str, int]:
        return {
            "reservations": relay.stats.reservations,
            "circuits": relay.stats.circuits,
            "dial-backs": in_progress(dial_back),
            "pending circuits": in_progress(circuits),
            "punches": in_progress(puncher),
        }

    yield held


def _delimited(message: Message, mutator: Mutator, share: float) -> bytes:
    header = mutator.message(message) if mutator.chance(share) else message.SerializeToString()
    return frame(header)


def _said(mutator: Mutator, protocols: Mapping[str, tuple[Message, ...]], path: Path = _DIRECT) -> Opened:
    """Streams of some of the protocols, each negotiated and then spoken, with changes."""
    said = []
    for stream in range(1, 2 * mutator.random.choice((1, 1, 2, 6)), 2):
        protocol = mutator.random.choice(list(protocols))
        asked = question(protocol)
        if mutator.chance(0.15):
            asked = mutator.bytes(asked)
        messages = list(protocols[protocol])
        if mutator.chance(0.3):
            mutator.random.shuffle(messages)
        data = asked + b"".join(_delimited(message, mutator, 0.5) for message in messages)
        if mutator.chance(0.2):
            data = mutator.bytes(data)
        # One window of the specification is what a peer may send before it is granted more.
        said += [(stream, portion) for portion in mutator.split(data[: 64 * 1024])]
    if mutator.chance(0.3):
        mutator.random.shuffle(said)
    return Opened(tuple(said), mutator.random.choice((FIN, RST, 0)), path)


_ID: Final = peer_id_to_bytes(OTHER.peer_id)
_ADDRS: Final = [Multiaddr(addr).to_bytes() for addr in (_FROM, f"{_FROM}/p2p/{OTHER.peer_id}/p2p-circuit")]
_PEER: Final = standard.RelayPeer(id=_ID, addrs=_ADDRS)
_LIMIT: Final = standard.RelayLimit(duration=60, data=1000)
_SYNC: Final = standard.HolePunch(type=standard.HolePunch.SYNC)
_IDENTIFY: Final = identify_pb2.Identify(
    protocol_version="a/1",
    agent_version="b/1",
    public_key=b"k" * 36,
    listen_addrs=_ADDRS,
    observed_addr=_ADDRS[0],
    protocols=["/a", "/b"],
    signedPeerRecord=b"r" * 50,
)
NAT: Final[Mapping[str, tuple[Message, ...]]] = {
    HOP: (
        standard.HopMessage(type=standard.HopMessage.RESERVE),
        standard.HopMessage(type=standard.HopMessage.CONNECT, peer=_PEER, limit=_LIMIT, status=standard.OK),
    ),
    STOP: (standard.StopMessage(type=standard.StopMessage.CONNECT, peer=_PEER, limit=_LIMIT, status=standard.OK),),
    nat_traversal.AUTONAT: (
        standard.AutoNat(
            type=standard.AutoNat.DIAL,
            dial=standard.AutoNat.Dial(peer=standard.AutoNat.PeerInfo(id=_ID, addrs=_ADDRS)),
        ),
    ),
    nat_traversal.DIAL_REQUEST: (
        standard.AutoNat2(dial_request=standard.AutoNat2.DialRequest(addrs=_ADDRS, nonce=7)),
        *[standard.AutoNat2(dial_data_response=standard.AutoNat2.DialDataResponse(data=bytes(4096)))] * 8,
    ),
    nat_traversal.DIAL_BACK: (standard.AutoNat2.DialBack(nonce=7),),
    nat_traversal.PUNCH: (standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=_ADDRS), _SYNC),
    nat_traversal.IDENTIFY: (_IDENTIFY,),
    "/ipfs/id/push/1.0.0": (_IDENTIFY,),
    "/ipfs/ping/1.0.0": (_IDENTIFY, _IDENTIFY),
}


def _table_messages() -> tuple[Message, ...]:
    key = server_key(ATTACKER.peer_id).encode()
    said = corpus.announcement().SerializeToString()
    signed = wire.SignedAnnouncement(announcement=said, signature=ATTACKER.sign(DOMAIN, said))
    data = signed.SerializeToString()
    listed = wire.DirectoryRecords(records=[signed] * 2).SerializeToString()
    record = kademlia_pb2.Record(key=key, value=data, timeReceived="2026", author=b"a", signature=b"s")
    peer = kademlia_pb2.Message.Peer(id=_ID, addrs=_ADDRS, connection=1)
    more: dict[str, Any] = {
        "key": key,
        "record": record,
        "closerPeers": [peer, peer],
        "providerPeers": [peer],
        "clusterLevelRaw": 1,
        "senderRecord": b"e" * 40,
    }
    models = kademlia_pb2.Record(key=MODELS_KEY.encode(), value=listed)
    return (
        kademlia_pb2.Message(type=kademlia_pb2.Message.PUT_VALUE, key=models.key, record=models),
        *(kademlia_pb2.Message(type=kind, **more) for kind in range(6)),
    )


def _gossip_messages() -> tuple[Message, ...]:
    pruned = rpc_pb2.PeerInfo(peerID=_ID, signedPeerRecord=b"r")
    control = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID="topic", messageIDs=[b"m" * 20] * 3)],
        iwant=[rpc_pb2.ControlIWant(messageIDs=[b"m" * 20] * 3)],
        graft=[rpc_pb2.ControlGraft(topicID="topic")],
        prune=[rpc_pb2.ControlPrune(topicID="topic", peers=[pruned], backoff=9)],
        idontwant=[rpc_pb2.ControlIDontWant(messageIDs=[b"m" * 20])],
    )
    message = rpc_pb2.Message(
        from_id=_ID, data=b"d" * 50, seqno=b"12345678", topicIDs=["topic"], signature=b"s" * 64, key=b"k" * 36
    )
    ecdsa = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200") + b"\x04" * 65
    brings_keys = [
        rpc_pb2.Message(
            from_id=b"\x12\x20" + b"h" * 32,
            data=b"d",
            seqno=b"1",
            topicIDs=["topic"],
            key=crypto_pb2.PublicKey(key_type=kind, data=data).SerializeToString(),
        )
        for kind, data in ((crypto_pb2.RSA, b"r" * 40), (crypto_pb2.ECDSA, ecdsa))
    ]
    subscription = rpc_pb2.RPC.SubOpts(subscribe=True, topicid="topic")
    return (
        rpc_pb2.RPC(subscriptions=[subscription]),
        rpc_pb2.RPC(control=control),
        rpc_pb2.RPC(publish=brings_keys),
        rpc_pb2.RPC(subscriptions=[subscription], publish=[message] * 2, control=control, senderRecord=b"e" * 40),
    )


def _to_services(mutator: Mutator) -> Opened:
    return _said(mutator, NAT, _RELAYED if mutator.chance(0.2) else _DIRECT)


_KAD: Final = {"/ipfs/kad/1.0.0": _table_messages()}
_MESHSUB: Final = {"/meshsub/1.1.0": _gossip_messages()}

TARGETS: Final[tuple[Target, ...]] = (
    Target("Yamux", 6, _yamux, partial(_yamux_connection, False), peak=8 << 20),
    Target("Noise messages", 2, _noise, partial(_yamux_connection, True), peak=8 << 20),
    Target("WebSocket", 2, _websocket, _websockets),
    Target("handshakes", 2, _tampered, handshakes),
    Target("NAT, identify and relay", 3, _to_services, partial(node_host, "nat"), seconds=400.0),
    Target("Kademlia", 2, lambda mutator: _said(mutator, _KAD, _DIRECT), partial(node_host, "table"), seconds=400.0),
    Target(
        "gossipsub", 2, lambda mutator: _said(mutator, _MESHSUB, _DIRECT), partial(node_host, "gossip"), seconds=400.0
    ),
)
