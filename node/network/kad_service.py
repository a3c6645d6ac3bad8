"""What this node answers to Kademlia's requests of others, and how much of its time each of them gets.

libp2p's own handler takes whatever comes as quickly as it comes. One peer can hold all places that it has for streams.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ...protocols.announcement import BadAnnouncement
from ...protocols.delimited import DelimitedStream
from ...protocols.framing import PeerError, StreamClosed
from ...protocols.nat_traversal import read_addr
from .addresses import without_peer
from .host import Host
from .kad_messages import KAD, MAX_KEY, MAX_REQUEST, MAX_REQUEST_FIELDS, BadMessage, parse, record_of
from .kad_store import MAX_VALUE, FairProviderStore, ValueStore, open_value
from .routing_table import RoutingTable
from .shares import Rates
from .transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)

MAX_STREAMS: Final = 128
"""Open at once. Whoever has the most of them loses one to who comes next."""
PATIENCE: Final = 5.0
"""Seconds for a request to come on an open stream, for its turn, and for its answer to be read."""
OF_PEER: Final = (20.0, 200.0)
"""Requests of a peer per second, and at once. A value counts as one more for each `VALUE_STEP` bytes that it has."""
OF_ADDRESS: Final = (60.0, 600.0)
VALUE_STEP: Final = 512


@dataclass(eq=False)
class TableStream:
    """An open stream of a peer. `waiting` is whether the peer's next request has not come."""

    peer_id: str
    origin: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    waiting: bool = True


def to_drop(places: Iterable[TableStream]) -> TableStream:
    """Of too many open streams, the oldest first, the one that has to go: of the address that has most, there of the
    peer that has most. One that is waited for, and of these the oldest."""
    places = list(places)
    of_origin = Counter(place.origin for place in places)
    of_peer = Counter((place.origin, place.peer_id) for place in places)
    return max(
        places,
        key=lambda place: (of_origin[place.origin], of_peer[place.origin, place.peer_id], place.waiting),
    )


class KadService:
    """Answers the requests of others, from the peers, providers and values that this node knows."""

    def __init__(self, host: Host, table: RoutingTable, providers: FairProviderStore, values: ValueStore) -> None:
        self._host = host
        self._table = table
        self._providers = providers
        self._values = values
        self._places: dict[TableStream, None] = {}
        self._of_peer, self._of_address = Rates(*OF_PEER), Rates(*OF_ADDRESS)

    def start(self) -> None:
        self._host.set_stream_handler(KAD, self._serve)

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        with self._place(peer_id) as place:
            try:
                await self._answer_all(raw, place)
            except StreamClosed:
                await raw.close()
                return
            except (PeerError, BadMessage) as error:
                log.debug("a stream of Kademlia of %s: %s", peer_id, error)
        await raw.reset()

    @contextlib.contextmanager
    def _place(self, peer_id: str) -> Iterator[TableStream]:
        place = TableStream(peer_id, self._host.origin_of(peer_id))
        self._places[place] = None
        if len(self._places) > MAX_STREAMS:
            dropped = to_drop(self._places)
            dropped.scope.cancel()
            del self._places[dropped]
        try:
            with place.scope:
                yield place
        finally:
            self._places.pop(place, None)

    async def _answer_all(self, raw: StreamBytes, place: TableStream) -> None:
        """Answers a stream's requests one after the other. Raises PeerError or BadMessage at its end."""
        stream = DelimitedStream(raw, place.peer_id, max_message=MAX_REQUEST)
        while True:
            place.waiting = True
            data = await stream.receive_bytes(timeout=PATIENCE)
            place.waiting = False
            request = parse(data, max_fields=MAX_REQUEST_FIELDS)
            await self._turn(raw, request, place)
            self._table.add(place.peer_id)
            await stream.send(await self._answer(request, place), timeout=PATIENCE)

    async def _turn(self, raw: StreamBytes, request: Message, place: TableStream) -> None:
        """Waits until the peer and its address may ask for so much, and the address has its turn."""
        cost = 1 + len(request.record.value) // VALUE_STEP
        delay = 0.0
        for bucket in (self._of_peer.of(place.peer_id), self._of_address.of(place.origin)):
            delay = max(delay, bucket.delay(cost))
            if delay > PATIENCE:
                raise BadMessage("too many requests")
            bucket.take_ahead(cost)
        await trio.sleep(delay)
        with trio.move_on_after(PATIENCE) as scope:
            await raw.turn()
        if scope.cancelled_caught:
            raise BadMessage("too many requests of all")

    async def _answer(self, request: Message, place: TableStream) -> Message:
        """Raises BadMessage for a request that has no answer."""
        if request.type == Message.PING:
            return Message(type=Message.PING)
        if not 0 < len(request.key) <= MAX_KEY:
            raise BadMessage(f"a key of {len(request.key)} bytes")
        answer = Message(type=request.type, key=request.key)
        if request.type == Message.PUT_VALUE:
            answer.record.CopyFrom(await self._keep(request, place))
            return answer
        if request.type == Message.ADD_PROVIDER:
            self._add_provider(request, place.peer_id)
            return answer
        if request.type == Message.FIND_NODE:
            self._name_target(answer)
        elif request.type == Message.GET_PROVIDERS:
            for known in self._providers.providers(request.key):
                answer.providerPeers.append(self._named(known.peer_id, known.addrs))
        elif request.type == Message.GET_VALUE:
            held = self._values.get(request.key.decode("utf-8", "replace"))
            if held is not None:
                answer.record.CopyFrom(record_of(request.key, held[0].value, held[1]))
        else:
            raise BadMessage(f"a request of type {request.type}")
        there = {ID.from_string(place.peer_id).to_bytes(), *(peer.id for peer in answer.closerPeers)}
        near = (self._named(peer.contact.peer_id, peer.addrs) for peer in self._table.nearest(request.key))
        answer.closerPeers.extend(peer for peer in near if peer.id not in there)
        return answer

    def _add_provider(self, request: Message, peer_id: str) -> None:
        """Nobody else can leave a record for a peer."""
        own = ID.from_string(peer_id).to_bytes()
        for provider in request.providerPeers:
            if provider.id != own:
                continue
            if addrs := [addr for addr in provider.addrs if read_addr(addr) is not None]:
                self._providers.add(request.key, peer_id, addrs)

    async def _keep(self, request: Message, place: TableStream) -> Record:
        """The record that is kept, which is the answer (as the specification has it)."""
        key, value = request.key, request.record.value
        if request.record.key != key or not 0 < len(value) <= MAX_VALUE:
            raise BadMessage("a value without its key, of no length, or too long")
        try:
            opened = await open_value(key.decode(), value, time.time())
        except (BadAnnouncement, UnicodeDecodeError) as error:
            raise BadMessage(str(error)) from error
        if not self._values.put(key.decode(), opened, place.origin):
            raise BadMessage("there is a better value, or no room")
        return record_of(key, value, time.time())

    def _name_target(self, answer: Message) -> None:
        """Who looks for a peer is told where it is, even if it is this node or none of the table."""
        try:
            peer_id = str(ID(answer.key))
            addrs = self._table.contact(peer_id).addrs
        except Exception:  # of many kinds: the key is no peer's id
            return
        if peer_id == self._host.peer_id:
            addrs = tuple(str(without_peer(addr)) for addr in self._host.libp2p.get_addrs())
        if addrs:
            answer.closerPeers.append(self._named(peer_id, [Multiaddr(addr).to_bytes() for addr in addrs]))

    def _named(self, peer_id: str, addrs: Iterable[bytes]) -> Message.Peer:
        is_here = self._host.is_connected(peer_id)
        state = Message.ConnectionType.CONNECTED if is_here else Message.ConnectionType.CAN_CONNECT
        return Message.Peer(id=ID.from_string(peer_id).to_bytes(), addrs=list(addrs), connection=state)
