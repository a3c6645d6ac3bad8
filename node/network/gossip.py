"""Gossip on one topic: libp2p's own gossipsub, on a host of ours, with our limits before anything is passed on.

Traps of py-libp2p 0.8: pubsub notices only connections that are made after it was attached, so it is attached before
the node joins; a message is validated before it is seen by us or passed on, in the order of arrival, so the check must
be quick; the default mesh is made every 120 s; what one neighbour's copy of a message was refused for is held against
the copies of all others for 300 s; more than so many messages a second from one neighbour are not passed on; a message
with a key that cannot be read ends it, and the host with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Final

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub, ValidationCache
from libp2p.tools.anyio_service import background_trio_service

from .host import GOSSIP_PROTOCOLS, Host, quiet_logs

log = logging.getLogger(__name__)

HEARTBEAT: Final = 5  # seconds
_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 12
_MESSAGES_PER_SECOND: Final = 1000.0  # no limit: who is honest hands on what others have made
_SEEN: Final = 86400  # seconds in which a message that was passed on is not taken again: old ones would use up rates
_MAX_TAKEN: Final = 1000  # messages remembered that were taken and not passed on
_MAX_CONTROL: Final = 8  # entries of each kind in a control message
_MAX_IDS: Final = 256  # of messages, in an entry
_MAX_BACKOFF: Final = 3600  # seconds
_PUBLISHING: Final = 10.0  # seconds

Accept = Callable[[str, str, bytes], bool]
"""(who made it, who handed it on, data) -> whether it is acted on."""
Forward = Callable[[str, str], bool]
"""(who made it, who handed it on) -> whether it is passed on as well."""


class _NoCache(ValidationCache):
    """A message that one neighbour may not hand on may come from another."""

    def put(self, msg_id: bytes, result: object) -> None:
        return


class _Pubsub(Pubsub):
    """libp2p's, which ends with the first message that it cannot read: one whose key is none, for example."""

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        try:
            await super().push_msg(msg_forwarder, msg)
        except Exception as error:  # whatever it makes of a stranger's message
            log.debug("a message that %s handed on was dropped: %r", msg_forwarder, error)


def bounded_control(control: rpc_pb2.ControlMessage, topic: str) -> rpc_pb2.ControlMessage:
    """What counts of a neighbour's control message: libp2p keeps a time for each topic that a PRUNE, GRAFT or IHAVE
    names, and dials the peers that a PRUNE names."""
    return rpc_pb2.ControlMessage(
        ihave=[
            rpc_pb2.ControlIHave(topicID=topic, messageIDs=have.messageIDs[:_MAX_IDS])
            for have in control.ihave[:_MAX_CONTROL]
            if have.topicID == topic
        ],
        iwant=[rpc_pb2.ControlIWant(messageIDs=want.messageIDs[:_MAX_IDS]) for want in control.iwant[:_MAX_CONTROL]],
        graft=[graft for graft in control.graft[:_MAX_CONTROL] if graft.topicID == topic],
        prune=[
            rpc_pb2.ControlPrune(topicID=topic, backoff=min(prune.backoff, _MAX_BACKOFF))
            for prune in control.prune[:_MAX_CONTROL]
            if prune.topicID == topic
        ],
    )


class _Router(GossipSub):
    """libp2p's, of one topic."""

    topic = ""

    async def handle_rpc(self, rpc: rpc_pb2.RPC, sender_peer_id: ID) -> None:
        await super().handle_rpc(rpc_pb2.RPC(control=bounded_control(rpc.control, self.topic)), sender_peer_id)


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
            with trio.move_on_after(_PUBLISHING):
                await self._pubsub.publish(self._topic, data)
        except Exception as error:  # whatever libp2p makes of peers that have just gone
            log.info("could not gossip: %r", error)


@contextlib.asynccontextmanager
async def open_gossip(
    host: Host,
    topic: str,
    *,
    max_bytes: int,
    accept: Accept,
    forwards: Forward,
    deliver: Callable[[str, bytes], None],
) -> AsyncIterator[Gossip]:
    """Takes part in `topic` for the length of the block.

    `accept` and `forwards` must be quick and not raise; `deliver(who made it, data)` gets what was accepted, but for
    what this node published itself. A message that was accepted and not passed on is accepted no second time: it is
    passed on if another neighbour that hands it on may have that.
    """
    router = _Router(
        protocols=[TProtocol(protocol) for protocol in GOSSIP_PROTOCOLS],
        degree=_DEGREE,
        degree_low=_DEGREE_LOW,
        degree_high=_DEGREE_HIGH,
        heartbeat_interval=HEARTBEAT,
        max_messages_per_topic_per_second=_MESSAGES_PER_SECOND,
    )
    router.topic = topic
    pubsub = _Pubsub(
        host.libp2p,
        router,
        strict_signing=True,
        allowed_topics={topic},
        max_inbound_rpc_size=4 * max_bytes,
        seen_ttl=_SEEN,
    )
    pubsub.validation_cache = _NoCache()
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
                while len(taken) > _MAX_TAKEN:
                    taken.popitem(last=False)
                deliver(maker, message.data)
            passes = forwards(maker, str(forwarder))
            if passes:
                del taken[name]
            return passes
        except Exception as error:  # whatever a stranger's message may raise
            log.debug("a message on %s was dropped: %r", topic, error)
            return False

    pubsub.set_topic_validator(topic, validate, False)
    quiet_logs()
    async with trio.open_nursery() as nursery, background_trio_service(pubsub), background_trio_service(router):
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
