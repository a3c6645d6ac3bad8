"""Makers with many keys, and neighbours that hand on what they may not: no honest node is cut off for them."""

from __future__ import annotations

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.network.gossip import open_gossip
from petalnode.node.network.host import open_host
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.node.trust.evidence_message import (
    EVIDENCE_LIMITS,
    EvidenceMessage,
    ForwardingShares,
    KnownMakers,
    TrustedValidators,
)
from petalnode.node.trust.store import TrustStore
from tests.node_inspection import held, pubsub_of
from tests.swarm.processes import LOOPBACK

ACCUSED = Identity.generate().peer_id


class Node:
    """An honest node, without a network; `clock` is what it reads."""

    def __init__(self, name: str, trusted: TrustedValidators | None = None) -> None:
        self.name = name
        self.now = 1e9
        self.store = TrustStore(trusted=trusted or TrustedValidators({}), clock=lambda: self.now)
        self.gossip = EvidenceGossip(Identity.generate(), self.store, clock=lambda: self.now)
        self._number = 0

    def message(self) -> bytes:
        self._number += 1
        return EvidenceMessage(self._number.to_bytes(32, "big"), ACCUSED, round(self.now * 1000)).to_bytes()

    def hears(self, maker: str, neighbour: str, data: bytes) -> bool:
        """Whether the node acts on the message."""
        return self.gossip.accept(maker, neighbour, data)

    def passes(self, maker: str, neighbour: str, data: bytes) -> bool:
        """Whether it is passed on, too."""
        return self.hears(maker, neighbour, data) and self.gossip.forwards(maker, neighbour)


def test_forwarder_is_not_cut_off_for_many_makers() -> None:
    """They flood an honest node from several connections; the node behind it takes all that it hands on."""
    forwarder, receiver = Node("forwarder"), Node("receiver")
    for minute in range(5):
        for number in range(300):
            maker, data = f"key {minute} {number}", forwarder.message()
            if forwarder.passes(maker, f"attacker {number % 5}", data):
                assert receiver.hears(maker, "forwarder", data)
        for honest in ("neighbour 1", "neighbour 2"):
            data = forwarder.message()
            assert forwarder.passes(honest, honest, data), "an honest neighbour of the forwarder"
            assert receiver.hears(honest, "forwarder", data)
        for _ in range(EVIDENCE_LIMITS.rate):
            assert receiver.hears("forwarder", "forwarder", forwarder.message()), "what it made itself"
        forwarder.now += 61
        receiver.now += 61


def test_oversized_message_is_held_against_nobody() -> None:
    """A neighbour that has used up what it may hand on cannot use up the rate of an honest maker as well."""
    receiver = Node("receiver")
    for number in range(EVIDENCE_LIMITS.relayed):
        assert receiver.hears(f"key {number}", "attacker", receiver.message())
    for _ in range(50):
        assert not receiver.hears("honest", "attacker", receiver.message())
    for _ in range(EVIDENCE_LIMITS.rate):
        assert receiver.hears("honest", "another neighbour", receiver.message())
    assert not receiver.store.bans()


def test_known_makers_have_a_share_new_keys_lack() -> None:
    node = Node("node", TrustedValidators({"trusted": "ann"}))
    assert node.passes("old", "neighbour", node.message())
    node.now += EVIDENCE_LIMITS.key_age + 1
    for number in range(1000):
        node.passes(f"key {number}", f"attacker {number % 20}", node.message())
    assert not node.passes("new", "neighbour", node.message())
    assert node.passes("old", "neighbour", node.message())
    assert node.passes("trusted", "neighbour", node.message())


def test_who_was_banned_here_is_not_heard() -> None:
    node = Node("node")
    node.store.ban("liar", "its evidence was refuted", "evidence")
    assert not node.hears("liar", "neighbour", node.message())


def test_what_is_passed_on_is_bounded_whatever_comes() -> None:
    shares = ForwardingShares()
    passed = sum(
        shares.allows(f"maker {number}", f"neighbour {number % 100}", 0.1 * (number % 600), known=number % 2 == 0)
        for number in range(600)
    )
    assert passed <= EVIDENCE_LIMITS.forwarded < EVIDENCE_LIMITS.relayed


def test_new_keys_make_no_older_one_unknown() -> None:
    makers = KnownMakers()
    makers.note("old", 0.0)
    for number in range(3 * EVIDENCE_LIMITS.max_senders):
        makers.note(f"{number}", 10.0 + number)
    assert makers.is_known("old", EVIDENCE_LIMITS.key_age)
    assert held(makers) <= EVIDENCE_LIMITS.max_senders


def signed_by(maker: Identity, data: bytes) -> rpc_pb2.Message:
    """A message as gossipsub's StrictSign policy wants it."""
    keys = create_new_key_pair(maker.seed)
    message = rpc_pb2.Message(data=data, topicIDs=["topic"], from_id=peer_id_to_bytes(maker.peer_id), seqno=b"\1" * 8)
    message.signature = keys.private_key.sign(PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString())
    message.key = keys.public_key.serialize()
    return message


async def test_message_one_neighbour_withholds_comes_from_another() -> None:
    """Refused from the attacker, which was quicker; taken once from the others, and passed on for one that may."""
    attacker, small, honest = (Identity.generate() for _ in range(3))
    message = signed_by(Identity.generate(), b"evidence")
    long, longest = (signed_by(Identity.generate(), bytes(size)) for size in (101, 100))
    heard: list[bytes] = []
    asked: list[str] = []

    def accept(_maker: str, forwarder: str, data: bytes) -> bool:
        if forwarder != attacker.peer_id:
            heard.append(data)
        return forwarder != attacker.peer_id

    def forwards(_maker: str, forwarder: str) -> bool:
        asked.append(forwarder)
        return forwarder == honest.peer_id

    identity = Identity.generate()
    async with (
        open_host(identity, listen=[Multiaddr(LOOPBACK)], announce=[], psk=None) as host,
        open_gossip(
            host,
            "topic",
            max_bytes=100,
            accept=accept,
            forwards=forwards,
        ) as gossip,
    ):
        for forwarder in (attacker, small, honest, honest, small):
            await pubsub_of(gossip).push_msg(ID.from_string(forwarder.peer_id), message)
        for sized in (long, longest):
            await pubsub_of(gossip).push_msg(ID.from_string(honest.peer_id), sized)
    assert heard == [b"evidence", bytes(100)]
    assert asked == [small.peer_id, honest.peer_id, honest.peer_id]
