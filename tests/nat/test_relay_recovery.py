"""What holds a node behind NAT in reach breaks, and it is back in reach by itself."""

from __future__ import annotations

import time

from tests.nat.lab import Host, Lab, Nat
from tests.nat.nodes import LISTEN, LabNodes, LightNode

SEED = "5e" * 32


def start_relay(nodes: LabNodes, host: Host, *peers: LightNode, **options: object) -> LightNode:
    return nodes.light(host, listen=[LISTEN], peers=[peer.address for peer in peers], **options)


def start_server(lab: Lab, nodes: LabNodes, *relays: LightNode) -> tuple[LightNode, Nat, Host]:
    nat = lab.nat("home")
    host = nat.host("server")
    peers = [relay.address for relay in relays]
    server = nodes.light(host, listen=[LISTEN], peers=peers, blocks=[0, 4])
    server.ask("wait_relays", relays=[relay.peer_id for relay in relays])
    return server, nat, host


def start_client(lab: Lab, nodes: LabNodes, relay: LightNode, server: LightNode) -> LightNode:
    client = nodes.light(lab.host("client"), peers=[relay.address])
    client.ask("wait_server", peer=server.peer_id)
    client.ask("reach", peer=server.peer_id)
    return client


def test_relay_is_killed_returns_and_is_cut_off(lab: Lab, nodes: LabNodes) -> None:
    host = lab.host("relay")
    relay = start_relay(nodes, host, seed=SEED)
    server, _, _ = start_server(lab, nodes, relay)
    relay.kill()
    print(f"killed: noticed and announced after {server.ask('wait_relays', relays=[]):.1f} s")
    relay = start_relay(nodes, host, seed=SEED)
    assert relay.ready
    print(f"killed: the place is back {server.ask('wait_relays', relays=[relay.peer_id]):.2f} s after the relay")
    with host.plug.pulled():
        print(f"cut off: noticed and announced after {server.ask('wait_relays', relays=[]):.1f} s")
    print(f"cut off: the place is back {server.ask('wait_relays', relays=[relay.peer_id]):.2f} s after the line")
    client = start_client(lab, nodes, relay, server)
    client.ask("wait_direct", peer=server.peer_id)


def test_another_relay_takes_its_place(lab: Lab, nodes: LabNodes) -> None:
    """The third relay is no peer to join by: it offers itself, by its announcement."""
    first = start_relay(nodes, lab.host("first"))
    second = start_relay(nodes, lab.host("second"), first)
    server, _, _ = start_server(lab, nodes, first, second)
    third = start_relay(nodes, lab.host("third"), second, blocks=[4, 8])
    third.ask("wait_reachability", kind="public")
    server.ask("wait_server", peer=third.peer_id)
    first.kill()
    begun = time.perf_counter()
    server.ask("wait_relays", relays=[second.peer_id, third.peer_id])
    print(f"a place at another relay {time.perf_counter() - begun:.1f} s after the first one's death")
    client = nodes.light(lab.host("client"), peers=[second.address])
    client.ask("wait_announced", peer=server.peer_id, with_relays=[second.peer_id, third.peer_id])
    client.ask("reach", peer=server.peer_id)


def test_the_nat_forgets_its_mappings(lab: Lab, nodes: LabNodes) -> None:
    relay = start_relay(nodes, lab.host("relay"))
    server, nat, _ = start_server(lab, nodes, relay)
    nat.forget_mappings()
    begun = time.perf_counter()
    client = nodes.light(lab.nat("office").host("client"), peers=[relay.address])
    client.ask("wait_server", peer=server.peer_id)
    client.ask("reach", peer=server.peer_id)
    print(f"reached again {time.perf_counter() - begun:.1f} s after the NAT forgot (the client's start included)")


def test_the_server_gets_another_address(lab: Lab, nodes: LabNodes) -> None:
    relay = start_relay(nodes, lab.host("relay"))
    server, _, host = start_server(lab, nodes, relay)
    client = start_client(lab, nodes, relay, server)
    client.ask("wait_direct", peer=server.peer_id)
    lost = client.tell("wait_lost", peer=server.peer_id)
    assert client.ask("is_direct", peer=server.peer_id)  # hence it waits by now
    host.change_address()
    begun = time.perf_counter()
    client.answer(lost)
    noticed = time.perf_counter() - begun
    client.ask("reach", peer=server.peer_id)
    print(f"lost after {noticed:.1f} s, reached again {time.perf_counter() - begun:.1f} s after the change")
    assert server.ask("addrs")[-1].startswith(f"/ip4/{host.address}/tcp/31330/")
