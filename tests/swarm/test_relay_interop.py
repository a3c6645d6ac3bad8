"""Our circuits with py-libp2p's own relay, and its circuits with ours: the wire is the standard's."""

from __future__ import annotations

import time

import pytest
import trio
from libp2p.peer.envelope import unmarshal_envelope
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Voucher

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.circuit import HOP, VOUCHER_DOMAIN, ask_connection, ask_reservation
from petalnode.protocols.delimited import DelimitedStream
from tests.swarm.processes import LOOPBACK
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here
from tests.swarm.stock_node import PAYLOAD


async def test_we_meet_at_a_foreign_relay(start):
    relay = start("stock_node", role="relay")
    async with host_here() as target, host_here() as client:
        for host in (target, client):
            host.remember(relay.peer_id, relay.addrs)
        reservation = await target.circuits.reserve(relay.peer_id)
        assert reservation.addrs
        client.remember(target.peer_id, [f"{addr}/p2p/{target.peer_id}" for addr in reservation.addrs])
        stream = await client.open_stream(target.peer_id, ECHO)
        assert stream.path.relay == relay.peer_id
        await echoed(stream, PAYLOAD)


async def test_our_vouchers_can_be_read_by_others():
    async with relay_here() as (relay, _), host_here() as target:
        target.remember(relay.peer_id, relay.addrs())
        await target.connect(relay.peer_id)
        stream = DelimitedStream(await target.open_stream(relay.peer_id, HOP), relay.peer_id)
        terms = await ask_reservation(stream, timeout=60)
        envelope = unmarshal_envelope(terms.voucher)
        envelope.validate(VOUCHER_DOMAIN)
        voucher = Voucher.FromString(envelope.raw_payload)
        assert (ID(voucher.relay), ID(voucher.peer)) == tuple(map(ID.from_string, (relay.peer_id, target.peer_id)))
        assert voucher.expiration == terms.expires > time.time()


async def test_foreign_peers_meet_at_our_relay(start):
    relay = start()
    theirs, ours = start("stock_node", role="target", relay=relay.addrs[0]), start(relay=relay.addrs[0])
    clients = [
        start("stock_node", role="client", relay=relay.addrs[0], target=target.peer_id) for target in (ours, theirs)
    ]
    async with host_here() as client:
        client.remember(theirs.peer_id, theirs.addrs)
        stream = await client.open_stream(theirs.peer_id, ECHO)
        await echoed(stream, PAYLOAD)
    for foreign in clients:
        assert foreign.ready["echoed"] == len(PAYLOAD)


@pytest.mark.parametrize("kind", ["rsa", "secp256k1"])
async def test_other_keys_peers_reserve_and_learn_the_reason(start, kind):
    relay = start()
    target = start("stock_node", role="target", relay=relay.addrs[0], key=kind).peer_id
    async with host_here() as client:
        client.remember(relay.peer_id, relay.addrs)
        stream = DelimitedStream(await client.open_stream(relay.peer_id, HOP), relay.peer_id)
        await ask_connection(stream, target, timeout=60)
    async with open_swarm(SwarmConfig(Identity.generate(), listen=(LOOPBACK,))) as swarm:
        told = start("stock_node", role="asker", peer=swarm.addrs[0], key=kind)
        ready = await trio.to_thread.run_sync(told.event, "ready")
        assert "Ed25519" in ready["said"]
