"""Our circuits with py-libp2p's own relay, and its circuits with ours: the wire is the standard's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from libp2p.peer.envelope import unmarshal_envelope
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Voucher

from petalnode.protocols.circuit import HOP, VOUCHER_DOMAIN, ask_reservation
from petalnode.protocols.delimited import DelimitedStream
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import RelayNode, echoed, host_here, relay_here, relay_nodes
from tests.swarm.stock_node import PAYLOAD


@pytest.fixture
def start() -> Iterator[Callable[..., RelayNode]]:
    with relay_nodes() as start:
        yield start


@pytest.mark.parametrize("psk", [None, "3c" * 32], ids=["public", "private"])
async def test_we_meet_at_a_foreign_relay(start, psk):
    relay = start("stock_node", role="relay", psk=psk)
    async with host_here(psk=psk) as target, host_here(psk=psk) as client:
        for host in (target, client):
            host.remember(relay.peer_id, relay.addrs)
        reservation = await target.circuits.reserve(relay.peer_id)
        assert reservation.addrs
        client.remember(target.peer_id, [f"{addr}/p2p/{target.peer_id}" for addr in reservation.addrs])
        stream = await client.open_stream(target.peer_id, ECHO)
        assert stream.path.relay == relay.peer_id
        await echoed(stream, PAYLOAD)


async def test_our_reservations_come_with_a_voucher_that_others_can_read():
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


async def test_foreign_peers_meet_us_and_each_other_at_our_relay(start):
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
