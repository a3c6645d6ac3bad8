"""Gossip on one topic: libp2p's own gossipsub, on a host of ours, with our limits before anything is passed on.

Traps of py-libp2p 0.8: pubsub notices only connections that are made after it was attached, so it is attached before
the node joins. A message is validated before it is seen by us or passed on, in the order of arrival. So the check must
be quick. The default mesh is made every 120 s. A reason to refuse one neighbour's copy of a message counts against the
copies of all others for 300 s. More than `per_second` messages a second from one neighbour are not passed on. A message
with a key that cannot be read ends it, and the host with it. It starts a task for each message, however many come. It
sends a message as often as its id is in one request. What it has for a peer that reads nothing may be 32 MiB.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub as libp2p_pubsub
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub, ValidationCache
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.pubsub.utils import maybe_consume_signed_record, safe_bytes_from_hex
from libp2p.tools.anyio_service import background_trio_service

from ...protocols.delimited import DelimitedStream, parse_message
from ...protocols.framing import StreamClosed, StreamTimeout
from .host import GOSSIP_PROTOCOLS, Host, quiet_logs
from .shares import Rates
from .transport.places import Places
from .transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GossipLimits:
    """What neighbours may send by gossip, and how long each part of it may take."""

    heartbeat: int = 5  # seconds
    messages_per_second: float = 1000.0  # no limit: who is honest hands on what others have made
    seen: int = 86400  # seconds in which a message that was passed on is not taken again: old ones would use up rates
    max_taken: int = 1000  # messages remembered that were taken and not passed on
    max_control: int = 8  # entries of each kind in a control message
    max_ids: int = 256  # of messages, in an entry
    max_id: int = 256  # bytes of a message's id
    max_backoff: int = 3600  # seconds
    max_backoffs: int = 4096  # peers that shall not be asked into the mesh for a while
    publishing: float = 10.0  # seconds
    max_rpc: int = 192 << 10  # Bytes of what neighbours send each other at once
    max_queued: int = 2 * max_rpc  # Bytes that wait for a neighbour to read
    max_fields: int = 4096  # Of what a neighbour sends at once
    of_peer: tuple[float, ...] = (10.0, 400.0)
    """What a neighbour may send per second, and at once: messages, and questions for them by their size. What goes
    beyond is read later."""
    of_address: tuple[float, ...] = (30.0, 1200.0)
    subscribing: int = 16
    """What a subscription counts, which is answered by what was published lately; so does a stream that fails."""
    answered: int = 4096  # Bytes of an answer that count as a message
    max_streams: int = 4  # of a peer, of which it uses one
    patience: float = 10.0  # Seconds for a message that has begun
    reading: float = 30.0  # Seconds for a neighbour to read a message


GOSSIP: Final = GossipLimits()

_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 12
_MAX_LARGE, _LARGE = 64, 4096  # messages that are read side by side, from this number of bytes on

Accept = Callable[[str, str, bytes], bool]
"""(who made it, who handed it on, data) -> whether it was acted on."""
Forward = Callable[[str, str], bool]
"""(who made it, who handed it on) -> whether it is passed on as well."""


class _NoCache(ValidationCache):
    """A message that one neighbour may not hand on may come from another."""

    def put(self, msg_id: bytes, result: object) -> None:
        return


class BoundedQueue(RpcQueue):
    """libp2p's, which holds 32 MiB for a neighbour; nor does it split what neighbours refuse to read."""

    def __init__(self) -> None:
        super().__init__(max_message_size=GOSSIP.max_rpc)
        self._bytes = 0

    def push(self, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        size = rpc.ByteSize()
        if self._bytes + size > GOSSIP.max_queued or not super().push(rpc, priority):
            return False
        self._bytes += size
        return True

    async def pop(self) -> rpc_pb2.RPC | None:
        rpc: rpc_pb2.RPC | None = await super().pop()
        self._bytes -= 0 if rpc is None else rpc.ByteSize()
        return rpc


libp2p_pubsub.RpcQueue = BoundedQueue


class _Pubsub(Pubsub):
    """libp2p's, which takes whatever comes as quickly as it comes, and ends with the first message that it cannot read:
    one whose key is none, for example."""

    router: _GossipRouter

    def __init__(self, host: Host, router: _GossipRouter) -> None:
        self._origin_of = host.origin_of
        self._of_peer, self._of_address = Rates(*GOSSIP.of_peer), Rates(*GOSSIP.of_address)
        self._streams: dict[ID, list[trio.CancelScope]] = {}
        self._large = Places(_MAX_LARGE)
        super().__init__(
            host.libp2p,
            router,
            strict_signing=True,
            allowed_topics={router.topic},
            max_inbound_rpc_size=GOSSIP.max_rpc,
            seen_ttl=GOSSIP.seen,
        )
        self.validation_cache = _NoCache()

    async def stream_handler(self, stream: INetStream) -> None:
        peer = stream.muxed_conn.peer_id
        raw = StreamBytes(cast(NetStream, stream))
        with self._place(peer):
            try:
                await self._read(raw, peer)
            except StreamClosed:
                await raw.close()
                return
            except Exception as error:  # whatever libp2p makes of a stranger's bytes
                log.debug("gossip of %s ends: %r", peer, error)
                await self._wait(peer, GOSSIP.subscribing)
                self._handle_dead_peer(peer)
        await raw.reset()

    @contextlib.contextmanager
    def _place(self, peer: ID) -> Iterator[None]:
        """For the length of the block, one of the peer's streams is read. Of too many, the oldest is not any more."""
        scopes = self._streams.setdefault(peer, [])
        if len(scopes) == GOSSIP.max_streams:
            scopes.pop(0).cancel()
        with trio.CancelScope() as scope:
            scopes.append(scope)
            try:
                yield
            finally:
                if scope in scopes:
                    scopes.remove(scope)
                if not scopes and self._streams.get(peer) is scopes:
                    del self._streams[peer]

    async def _read(self, raw: StreamBytes, peer: ID) -> None:
        """Acts on what a neighbour sends, one thing after the other. Raises at the stream's end."""
        messages = DelimitedStream(raw, str(peer), max_message=GOSSIP.max_rpc)
        while True:
            rpc = parse_message(rpc_pb2.RPC, await self._receive(messages), most=GOSSIP.max_fields)
            await self._wait(peer, 1)
            await raw.turn()
            if maybe_consume_signed_record(rpc, self.host, peer):
                await self._take(peer, rpc)

    async def _receive(self, messages: DelimitedStream) -> bytes:
        size = await messages.receive_size()
        if size < _LARGE:
            return await messages.receive_body(size, timeout=GOSSIP.patience)
        with self._large.take(messages.peer_id, self._origin_of(messages.peer_id)) as place:
            if place is not None:
                return await messages.receive_body(size, timeout=GOSSIP.patience)
        raise StreamTimeout(f"{messages.peer_id} sends too slowly, or too much at once", messages.peer_id)

    async def _take(self, peer: ID, rpc: rpc_pb2.RPC) -> None:
        for subscription in rpc.subscriptions:
            await self._wait(peer, GOSSIP.subscribing)
            self.handle_subscription(peer, subscription)
        for message in rpc.publish:
            await self._wait(peer, 1)
            if self._is_subscribed_to_msg(message):
                await self.push_msg(peer, message)
        if rpc.HasField("control"):
            control = bounded_control(rpc.control, self.router.topic)
            await self._wait(peer, self.router.cost_of(control))
            await self.router.handle_rpc(rpc_pb2.RPC(control=control), peer)

    async def _wait(self, peer: ID, cost: int) -> None:
        """Waits until the peer may send so much, then until its address may."""
        await self._of_peer.wait(str(peer), cost)
        await self._of_address.wait(self._origin_of(str(peer)), cost)

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        try:
            await super().push_msg(msg_forwarder, msg)
        except Exception as error:  # whatever it makes of a stranger's message
            log.debug("a message that %s handed on was dropped: %r", msg_forwarder, error)

    async def write_msg(self, stream: INetStream, rpc_msg: rpc_pb2.RPC) -> bool:
        with trio.move_on_after(GOSSIP.reading) as scope:
            sent: bool = await super().write_msg(stream, rpc_msg)
        if not scope.cancelled_caught:
            return sent
        await stream.reset()
        self._handle_dead_peer(stream.muxed_conn.peer_id)
        return False


def _ids(lists: Iterable[rpc_pb2.ControlIHave] | Iterable[rpc_pb2.ControlIWant]) -> list[bytes]:
    """The ids of messages that these name, each once."""
    ids = (name for entry in lists for name in entry.messageIDs[: GOSSIP.max_ids] if len(name) <= GOSSIP.max_id)
    return list(dict.fromkeys(ids))[: GOSSIP.max_ids]


def bounded_control(control: rpc_pb2.ControlMessage, topic: str) -> rpc_pb2.ControlMessage:
    """What counts of a neighbour's control message: libp2p keeps a time for each topic that a PRUNE, GRAFT or IHAVE
    names. It dials the peers that a PRUNE names, and sends a message as often as an IWANT names it."""
    has = _ids(have for have in control.ihave[: GOSSIP.max_control] if have.topicID == topic)
    wanted = _ids(control.iwant[: GOSSIP.max_control])
    return rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=has)] if has else [],
        iwant=[rpc_pb2.ControlIWant(messageIDs=wanted)] if wanted else [],
        graft=[graft for graft in control.graft if graft.topicID == topic][:1],
        prune=[
            rpc_pb2.ControlPrune(topicID=topic, backoff=min(prune.backoff, GOSSIP.max_backoff))
            for prune in control.prune
            if prune.topicID == topic
        ][:1],
    )


class _GossipRouter(GossipSub):
    """libp2p's, of one topic."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            protocols=[TProtocol(protocol) for protocol in GOSSIP_PROTOCOLS],
            degree=_DEGREE,
            degree_low=_DEGREE_LOW,
            degree_high=_DEGREE_HIGH,
            heartbeat_interval=GOSSIP.heartbeat,
            max_messages_per_topic_per_second=GOSSIP.messages_per_second,
        )
        self.topic = topic

    def cost_of(self, control: rpc_pb2.ControlMessage) -> int:
        """What a control message counts: by the bytes that answer it."""
        wanted = (safe_bytes_from_hex(name) for entry in control.iwant for name in entry.messageIDs)
        found = [self.mcache.get(name) for name in wanted if name is not None]
        return sum(1 + message.ByteSize() // GOSSIP.answered for message in found if message is not None)

    def _add_back_off(self, peer: ID, topic: str, is_unsubscribe: bool, backoff_duration: int = 0) -> None:
        super()._add_back_off(peer, topic, is_unsubscribe, backoff_duration)
        while len(self.back_off[topic]) > GOSSIP.max_backoffs:  # libp2p forgets none of a peer that has gone
            del self.back_off[topic][next(iter(self.back_off[topic]))]


class Gossip:
    """A topic that this node listens to. Made by `open_gossip`."""

    def __init__(self, pubsub: Pubsub, topic: str, own: str) -> None:
        self._pubsub = pubsub
        self._topic = topic
        self._own = own
        self.peers = lambda: [str(peer) for peer in pubsub.peer_topics.get(topic, ())]

    async def publish(self, data: bytes) -> None:
        """Hands `data` to all who listen, as far as they can be reached."""
        try:
            with trio.move_on_after(GOSSIP.publishing):
                await self._pubsub.publish(self._topic, data)
        except Exception as error:  # whatever libp2p makes of peers that have just gone
            log.info("could not gossip: %r", error)


@contextlib.asynccontextmanager
async def open_gossip(
    host: Host, topic: str, *, max_bytes: int, accept: Accept, forwards: Forward
) -> AsyncIterator[Gossip]:
    """Takes part in `topic` for the length of the block.

    `accept` and `forwards` must be quick and not raise; they get no messages that this node published itself. A message
    that was accepted and not passed on is accepted no second time. It is passed on if another neighbour that hands it
    on may have that.
    """
    router = _GossipRouter(topic)
    pubsub = _Pubsub(host, router)
    taken: OrderedDict[bytes, None] = OrderedDict()

    def validate(forwarder: ID, message: rpc_pb2.Message) -> bool:
        try:
            maker = str(ID(message.from_id))
            if maker == host.peer_id:
                return True
            name = message.from_id + message.seqno
            if name not in taken:
                if len(message.data) > max_bytes or not accept(maker, str(forwarder), message.data):
                    return False
                taken[name] = None
                while len(taken) > GOSSIP.max_taken:
                    taken.popitem(last=False)
            passes = forwards(maker, str(forwarder))
            if passes:
                del taken[name]
            return passes
        except Exception as error:  # whatever a stranger's message may raise
            log.debug("a message on %s was dropped: %r", topic, error)
            return False

    pubsub.set_topic_validator(topic, validate, False)
    quiet_logs()
    # The nursery ends first: an error of the block would be lost if the services were stopped while cancelled.
    async with background_trio_service(pubsub), background_trio_service(router), trio.open_nursery() as nursery:
        await pubsub.wait_until_ready()
        subscription = await pubsub.subscribe(topic)

        async def drain() -> None:
            # What counts was delivered by the validator; the subscription's queue must not fill up.
            while True:
                await subscription.get()

        nursery.start_soon(drain)
        try:
            yield Gossip(pubsub, topic, host.peer_id)
        finally:
            nursery.cancel_scope.cancel()
