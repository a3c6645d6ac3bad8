"""Attacks on the standard services of a node (relay, AutoNAT, hole punching, identify), on gossip and on evidence."""

from __future__ import annotations

import time
from typing import Final

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.network.host import GOSSIP_PROTOCOLS
from petalnode.node.trust.evidence_gossip import TOPIC
from petalnode.node.trust.evidence_message import EVIDENCE_LIMITS, EvidenceMessage
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.circuit import HOP
from petalnode.protocols.credits import CREDITS
from petalnode.protocols.directory import TRANSFER
from petalnode.protocols.evidence import EVIDENCE, RECEIPTS
from petalnode.protocols.nat_traversal import AUTONAT, DIAL_BACK, DIAL_REQUEST, PUNCH
from petalnode.protocols.weights import WEIGHTS

from .keys import PATIENCE, Key, Victim, delimited, until_reset

IDENTIFY_PUSH: Final = "/ipfs/id/push/1.0.0"
PING: Final = "/ipfs/ping/1.0.0"
ADDRS: Final = [Multiaddr(f"/ip4/203.0.113.{n}/tcp/{1000 + n}").to_bytes() for n in range(1, 200)]


async def _say(key: Key, victim: Victim, protocol: str, data: bytes) -> None:
    """Says something on a stream of its own and waits for a word."""
    async with until_reset(key.open(victim, protocol)) as stream:
        with trio.move_on_after(2.0):
            await stream.write(data)
            await stream.read(1 << 16)


async def reservations(key: Key, victim: Victim) -> None:
    """Places at the relay, again and again."""
    await _say(key, victim, HOP, delimited(standard.HopMessage(type=standard.HopMessage.RESERVE)))


async def circuits(key: Key, victim: Victim) -> None:
    """Circuits to other keys of its own, and to nobody."""
    for target in (key.identity.peer_id, Identity.from_seed(key.random.randbytes(32)).peer_id):
        peer = standard.RelayPeer(id=peer_id_to_bytes(target), addrs=ADDRS)
        await _say(key, victim, HOP, delimited(standard.HopMessage(type=standard.HopMessage.CONNECT, peer=peer)))


async def dial_backs(key: Key, victim: Victim) -> None:
    """Requests to be dialed at many addresses, few of them its own."""
    own = Multiaddr(f"/ip4/{key.source or '127.0.0.1'}/tcp/{key.random.randrange(1024, 60_000)}").to_bytes()
    peer = standard.AutoNat.PeerInfo(id=peer_id_to_bytes(key.identity.peer_id), addrs=[own, *ADDRS])
    message = standard.AutoNat(type=standard.AutoNat.DIAL, dial=standard.AutoNat.Dial(peer=peer))
    await _say(key, victim, AUTONAT, delimited(message))
    for addr in (own, *ADDRS):
        request = standard.AutoNat2.DialRequest(addrs=[addr], nonce=key.random.getrandbits(64))
        await _say(key, victim, DIAL_REQUEST, delimited(standard.AutoNat2(dial_request=request)))
    await _say(key, victim, DIAL_BACK, delimited(standard.AutoNat2.DialBack(nonce=key.random.getrandbits(64))))


async def punches(key: Key, victim: Victim) -> None:
    """Hole punches to many addresses."""
    connect = standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=ADDRS)
    sync = standard.HolePunch(type=standard.HolePunch.SYNC)
    await _say(key, victim, PUNCH, delimited(connect) + delimited(sync))


async def identify_pushes(key: Key, victim: Victim) -> None:
    """Large words about itself."""
    told = Identify(
        protocol_version="x" * 1000,
        public_key=key.random.randbytes(1000),
        listen_addrs=ADDRS * 20,
        protocols=[f"/{n}/{'x' * 200}" for n in range(500)],
    )
    await _say(key, victim, IDENTIFY_PUSH, delimited(told))


async def pings(key: Key, victim: Victim) -> None:
    """Pings whose answers are not read."""
    async with until_reset(key.open(victim, PING)) as stream:
        with trio.move_on_after(5.0):
            while True:
                await stream.write(bytes(32 << 10))


# --- gossip


def gossiped(seed: bytes, number: int, data: bytes) -> rpc_pb2.Message:
    """A message of the topic, as its maker signs it."""
    pair = create_new_key_pair(seed)
    message = rpc_pb2.Message(
        from_id=ID.from_pubkey(pair.public_key).to_bytes(), seqno=number.to_bytes(8, "big"), data=data, topicIDs=[TOPIC]
    )
    message.signature = pair.private_key.sign(PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString())
    return message


async def gossip_flood(key: Key, victim: Victim) -> None:
    """Notices of evidence that is nowhere, of a maker each, as fast as they can be signed."""
    subscribe = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC)])
    async with until_reset(key.open(victim, GOSSIP_PROTOCOLS[0])) as stream:
        await stream.write(delimited(subscribe))
        for number in range(1000):
            accused = Identity.from_seed(key.random.randbytes(32)).peer_id
            notice = EvidenceMessage(key.random.randbytes(32), accused, round(time.time() * 1000)).to_bytes()
            await stream.write(delimited(rpc_pb2.RPC(publish=[gossiped(key.random.randbytes(32), number, notice)])))
            await trio.lowlevel.checkpoint()


async def large_gossip(key: Key, victim: Victim) -> None:
    """Messages as long as may be, with no sense in them, and words about thousands that were never seen."""
    names = [key.random.randbytes(40) for _ in range(1000)]
    control = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=names)],
        iwant=[rpc_pb2.ControlIWant(messageIDs=names)],
        graft=[rpc_pb2.ControlGraft(topicID=TOPIC)] * 100,
        idontwant=[rpc_pb2.ControlIDontWant(messageIDs=names)],
    )
    async with until_reset(key.open(victim, GOSSIP_PROTOCOLS[0])) as stream:
        await stream.write(delimited(rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC)])))
        for number in range(200):
            data = wire.EvidenceNotice(
                id=bytes(32), bundle=bytes(EVIDENCE_LIMITS.max_message - 100)
            ).SerializeToString()
            await stream.write(delimited(rpc_pb2.RPC(publish=[gossiped(key.random.randbytes(32), number, data)])))
            await stream.write(delimited(rpc_pb2.RPC(control=control)))


async def evidence_fetches(key: Key, victim: Victim) -> None:
    """Questions for evidence that is not there."""
    async with until_reset(key.messages(victim, EVIDENCE)) as stream:
        for _ in range(20):
            await stream.send(wire.EvidenceFrame(fetch=wire.Fetch(id=key.random.randbytes(32))), timeout=PATIENCE)


async def receipts_and_orders(key: Key, victim: Victim) -> None:
    """Offers and orders to whoever audits, or keeps points."""
    offers = await key.messages(victim, RECEIPTS)
    orders = await key.messages(victim, CREDITS)
    await offers.send(wire.EvidenceFrame(offer=wire.Offer()), timeout=PATIENCE)
    await orders.send(wire.CreditsFrame(query=wire.CreditQuery()), timeout=PATIENCE)
    await trio.sleep(1.0)
    await offers.reset()
    await orders.reset()


async def transfers(key: Key, victim: Victim) -> None:
    """The test of a line, for as many bytes as it gives, unread."""
    async with until_reset(key.messages(victim, TRANSFER)) as stream:
        frame = wire.TransferFrame(wanted=1 << 20, tensors=[wire.Tensor(nbytes=1 << 20)])
        for _ in range(20):
            await stream.send(frame, [bytes(1 << 20)], timeout=PATIENCE)


async def weights(key: Key, victim: Victim) -> None:
    """Offers, trees and pieces of the weights again and again, unread."""
    version = bytes.fromhex(victim.served.get("model_version", "11" * 32))
    async with until_reset(key.messages(victim, WEIGHTS)) as stream:
        for number in range(300):
            query, tree = (
                wire.WeightsQuery(model_version=version),
                wire.TreeQuery(model_version=version, part=number % 8),
            )
            piece = wire.PieceQuery(model_version=version, part=number % 8)
            for frame in (
                wire.WeightsFrame(query=query),
                wire.WeightsFrame(tree_query=tree),
                wire.WeightsFrame(piece_query=piece),
            ):
                await stream.send(frame, timeout=PATIENCE)
        await trio.sleep(1.0)
