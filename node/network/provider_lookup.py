"""Look-ups of provider records in Kademlia: whom to ask next, and what comes of it.

Iterative look-ups as of Maymounkov and Mazieres 2002 (section 2.3), but going around addresses. Ids near a key cost
nothing. So the nearest peer of each address comes before the second nearest one of any. In a network in which each peer
has an address of its own that is Kademlia's order. `Lookup` decides; `look_up` asks over a host.

py-libp2p's own look-up keeps what strangers answer as if it were known here. It waits for the slowest peer of each
three, and ends at the first twenty providers that anybody names.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ...protocols.delimited import DelimitedStream
from ...protocols.framing import PeerError
from .addresses import dialable, dialable_among, host_of, is_public
from .host import Host
from .kad_messages import KAD, MAX_ANSWER, MAX_ANSWER_FIELDS, BadMessage, parse
from .shares import origin_of_ip
from .transport.bandwidth import ByteCount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LookupPolicy:
    """Whom a look-up asks, and what it takes of an answer."""

    closest: int = 10  # Peers nearest to a key at which its records are kept, and that are asked for them
    max_asked: int = 24  # Peers of one look-up
    at_once: int = 4
    ask_deadline: float = 4.0  # seconds, with the dial
    max_closer: int = 20  # taken of one answer, and
    max_providers: int = 32
    max_addrs: int = 8  # of one peer in an answer
    max_known_addrs: int = 16
    max_id: int = 64  # bytes
    failures: int = 4  # of the peers that one address has named, after which the others come last
    confirmed: float = 3.0  # seconds for a peer to end the stream of a record


LOOKUP: Final = LookupPolicy()


@dataclass(frozen=True)
class Contact:
    """A peer, and where others say that it is (multiaddrs without /p2p)."""

    peer_id: str
    addrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LookupAnswer:
    """What a peer says of a key: who has what it stands for, its value, and which peers are nearer to it."""

    providers: tuple[Contact, ...] = ()
    closer: tuple[Contact, ...] = ()
    value: bytes | None = None


def distance(peer_id: str, key: bytes) -> int:
    """Kademlia's, as libp2p's implementations count it: of the SHA-256 of both."""
    return _key_of(peer_id) ^ int.from_bytes(hashlib.sha256(key).digest(), "big")


@lru_cache(maxsize=4096)
def _key_of(peer_id: str) -> int:
    return int.from_bytes(hashlib.sha256(ID.from_string(peer_id).to_bytes()).digest(), "big")


@dataclass
class _NamedPeer:
    """A peer that may be asked: where it is said to be, or, once it has `answered`, where it is."""

    contact: Contact
    distance: int
    origins: set[str]
    named_by: set[str]
    asked: bool = False
    answered: bool = False


@dataclass
class _Source:
    """How it went with the peers that one address has named; elsewhere than it said counts as not there."""

    answered: int = 0
    failed: int = 0

    @property
    def misleads(self) -> bool:
        return self.failed >= LOOKUP.failures and self.failed > 3 * self.answered


_Ranked = tuple[int, int, _NamedPeer]  # how many nearer ones there are at its address; its distance


def _would_be_among(nearest: Sequence[_Ranked], known: _NamedPeer) -> bool:
    """Whether a peer, if it answers, is one of the nearest, of which `nearest` are those that have answered."""
    if len(nearest) < LOOKUP.closest:
        return True
    nearer = Counter(
        origin for _, far, peer in nearest if far < known.distance for origin in peer.origins & known.origins
    )
    return (max(nearer.values(), default=0), known.distance) < nearest[-1][:2]


class Lookup:
    """One look-up of a key. `next` says whom to ask; whoever asks tells `answered` or `failed`.

    Args:
        start: peers that are known.
        own: this node's peer id, which is not asked.
        origin_of: the address at which a connected peer is, None for any other: addresses count, ids do not.
        providers: those that this node knows of itself.
    """

    def __init__(
        self,
        key: bytes,
        start: Iterable[Contact],
        own: str,
        origin_of: Callable[[str], str | None] = lambda peer_id: None,
        providers: Iterable[Contact] = (),
    ) -> None:
        self._key = key
        self._own = own
        self._origin_of = origin_of
        self._known: dict[str, _NamedPeer] = {}
        self._gone: set[str] = set()
        self._sources: dict[str, _Source] = {"": _Source()}
        self._asked_at: Counter[str] = Counter()
        # Providers, by the address of who named them.
        self._named: dict[str, list[Contact]] = {own: list(providers)}
        self.asked = 0
        for contact in start:
            self._learn(contact, "")

    def _learn(self, contact: Contact, source: str) -> None:
        if contact.peer_id == self._own or contact.peer_id in self._gone:
            return
        held = self._known.get(contact.peer_id)
        if held is None:
            here = self._origin_of(contact.peer_id)
            origins = claimed_origins(contact) if here is None else {here}
            far = distance(contact.peer_id, self._key)
            self._known[contact.peer_id] = _NamedPeer(contact, far, origins, {source})
            return
        held.named_by.add(source)
        if not held.asked:
            addrs = tuple(dict.fromkeys((*held.contact.addrs, *contact.addrs)))[: LOOKUP.max_known_addrs]
            held.contact = Contact(contact.peer_id, addrs)

    def next(self) -> Contact | None:
        """Whom to ask now; None if there is nobody, as long as no further answer comes.

        Somebody who would be among the nearest: at an address of which fewest were asked, and there the nearest. Peers
        that only those have named whose peers were not there come last.
        """
        if self.asked >= LOOKUP.max_asked:
            return None
        nearest = self._ranked()[: LOOKUP.closest]
        wanted = [known for known in self._known.values() if not known.asked and _would_be_among(nearest, known)]
        if not wanted:
            return None
        known = min(wanted, key=self._turn)
        known.asked = True
        self.asked += 1
        self._asked_at.update(known.origins)
        return known.contact

    def _turn(self, known: _NamedPeer) -> tuple[bool, int, int]:
        doubtful = all(self._sources[source].misleads for source in known.named_by)
        return doubtful, max(self._asked_at[origin] for origin in known.origins), known.distance

    def _ranked(self) -> list[_Ranked]:
        """Who has answered: the nearest of each address, then the second nearest of each, and so on."""
        turns: Counter[str] = Counter()
        ranked = []
        there = [known for known in self._known.values() if known.answered]
        for known in sorted(there, key=lambda known: known.distance):
            (origin,) = known.origins
            ranked.append((turns[origin], known.distance, known))
            turns[origin] += 1
        return sorted(ranked, key=lambda entry: entry[:2])

    def answered(self, peer_id: str, answer: LookupAnswer) -> None:
        """The peer that `next` gave has said this."""
        known = self._known[peer_id]
        origin = self._origin_of(peer_id) or min(known.origins)
        as_said = origin in known.origins or known.origins == {peer_id}
        for source in known.named_by:
            self._sources[source].answered += as_said
            self._sources[source].failed += not as_said
        self._asked_at.subtract(known.origins)
        self._asked_at[origin] += 1
        known.answered, known.origins = True, {origin}
        self._sources.setdefault(origin, _Source())
        self._named.setdefault(origin, []).extend(answer.providers[: LOOKUP.max_providers])
        for contact in sorted(answer.closer, key=lambda contact: distance(contact.peer_id, self._key))[
            : LOOKUP.max_closer
        ]:
            self._learn(contact, origin)

    def failed(self, peer_id: str) -> None:
        """The peer that `next` gave does not answer, or does not speak Kademlia."""
        known = self._known.pop(peer_id)
        self._gone.add(peer_id)
        self._asked_at.subtract(known.origins)
        for source in known.named_by:
            self._sources[source].failed += 1

    def nearest(self) -> list[Contact]:
        """The peers nearest to the key that have answered, ten at most: as `next` counts, around addresses."""
        return [known.contact for _, _, known in self._ranked()[: LOOKUP.closest]]

    def providers(self, rng: random.Random) -> Iterator[Contact]:
        """Who was named, in random order but going around the addresses of those who named them. Who names thousands
        is heard as often as who names one."""
        of_source = [rng.sample(named, len(named)) for named in self._named.values() if named]
        addrs: dict[str, tuple[str, ...]] = {}
        for named in of_source:
            for contact in named:
                joined = dict.fromkeys((*addrs.get(contact.peer_id, ()), *contact.addrs))
                addrs[contact.peer_id] = tuple(joined)[: LOOKUP.max_known_addrs]
        given = {self._own}
        while of_source:
            rng.shuffle(of_source)
            for named in of_source:
                while named and named[-1].peer_id in given:
                    named.pop()
                if named:
                    given.add(named[-1].peer_id)
                    yield Contact(named[-1].peer_id, addrs[named.pop().peer_id])
            of_source = [named for named in of_source if named]


def claimed_origins(contact: Contact) -> set[str]:
    """The addresses at which a peer is said to be, those of the internet if there are any; its id if it is nowhere."""
    addrs = [addr for addr in map(dialable, contact.addrs) if addr is not None]
    chosen = [addr for addr in addrs if is_public(addr)] or addrs
    return {origin_of_ip(host_of(addr)) for addr in chosen} or {contact.peer_id}


def nearest_around(key: bytes, peers: Iterable[tuple[str, Iterable[str]]], count: int) -> list[str]:
    """Of these peers, each with its possible addresses, `count` to name to who asks for a key: the nearest at each
    address, then the second nearest, and so on."""
    turns: Counter[str] = Counter()
    ranked = []
    for far, peer_id, origins in sorted((distance(peer_id, key), peer_id, list(origins)) for peer_id, origins in peers):
        ranked.append((max(turns[origin] for origin in origins), far, peer_id))
        turns.update(origins)
    return [peer_id for _, _, peer_id in sorted(ranked)[:count]]


# --- asking


def answer_of(message: Message) -> LookupAnswer:
    """What a stranger's message says, as far as it can be of use."""
    return LookupAnswer(
        _contacts(message.providerPeers, 4 * LOOKUP.max_providers),
        _contacts(message.closerPeers, 4 * LOOKUP.max_closer),
        message.record.value or None,
    )


def _contacts(peers: Sequence[Message.Peer], limit: int) -> tuple[Contact, ...]:
    found: dict[str, Contact] = {}
    for peer in random.sample(list(peers), min(limit, len(peers))):
        if not 2 <= len(peer.id) <= LOOKUP.max_id:
            continue
        contact = Contact(str(ID(peer.id)), tuple(map(str, dialable_among(peer.addrs[: LOOKUP.max_addrs]))))
        found[contact.peer_id] = contact
    return tuple(found.values())


async def ask(host: Host, contact: Contact, question: Message, traffic: ByteCount) -> LookupAnswer | None:
    """What a peer answers; None if it does not do so within some seconds, or speaks no Kademlia.

    Counts the bytes of the messages, without what carries them.
    """
    host.learn(contact.peer_id, contact.addrs)
    with trio.move_on_after(LOOKUP.ask_deadline):
        try:
            stream = DelimitedStream(
                await host.open_stream(contact.peer_id, KAD), contact.peer_id, max_message=MAX_ANSWER
            )
        except ConnectionError:
            return None
        try:
            traffic.sent += question.ByteSize()
            await stream.send(question, timeout=LOOKUP.ask_deadline)
            data = await stream.receive_bytes(timeout=LOOKUP.ask_deadline)
            traffic.received += len(data)
            reply = parse(data, max_fields=MAX_ANSWER_FIELDS)
        except (PeerError, BadMessage) as error:
            log.debug("%s: %s", contact.peer_id, error)
            return None
        finally:
            await stream.reset()
        return answer_of(reply) if reply.type == question.type else None
    return None


async def add(host: Host, contact: Contact, key: bytes, addrs: Sequence[str], traffic: ByteCount) -> bool:
    """Leaves a record at a peer: this node provides the key, and is at `addrs`. Whether the peer took the message;
    nobody says whether it keeps the record."""
    provider = Message.Peer(
        id=ID.from_string(host.peer_id).to_bytes(), addrs=[Multiaddr(addr).to_bytes() for addr in addrs]
    )
    record = Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[provider])
    host.learn(contact.peer_id, contact.addrs)
    with trio.move_on_after(LOOKUP.ask_deadline):
        try:
            raw = await host.open_stream(contact.peer_id, KAD)
        except ConnectionError:
            return False
        try:
            traffic.sent += record.ByteSize()
            await DelimitedStream(raw, contact.peer_id).send(record, timeout=LOOKUP.ask_deadline)
            await raw.close_write()
            with trio.move_on_after(LOOKUP.confirmed):
                await raw.read(1024)  # an echo, as py-libp2p has it, or the end of the stream
                return True
        except (PeerError, OSError) as error:
            log.debug("%s did not take a provider record: %s", contact.peer_id, error)
        finally:
            await raw.reset()
    return False


async def look_up(
    lookup: Lookup, question: Callable[[Contact], Awaitable[LookupAnswer | None]], *, timeout: float
) -> None:
    """Asks whom `lookup` names, some side by side, until it names nobody, for `timeout` seconds at most."""
    changed = trio.Event()
    running = 0

    async def put(contact: Contact) -> None:
        nonlocal changed, running
        answer = await question(contact)
        if answer is None:
            lookup.failed(contact.peer_id)
        else:
            lookup.answered(contact.peer_id, answer)
        running -= 1
        changed.set()
        changed = trio.Event()

    with trio.move_on_after(timeout):
        async with trio.open_nursery() as nursery:
            while True:
                contact = lookup.next() if running < LOOKUP.at_once else None
                if contact is not None:
                    running += 1
                    nursery.start_soon(put, contact)
                elif running:
                    await changed.wait()
                else:
                    return
