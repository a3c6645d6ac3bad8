"""Nodes that find out by themselves whether others reach them, and see to it that they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nat.lab import Host, Lab, Nat
from tests.nat.nodes import LISTEN, LISTEN6, LabNodes, LightNode

_ROUTER = Path(__file__).with_name("router.py")


def run(machine: Host | Nat, *command: str) -> None:
    subprocess.run(machine.command(list(command)), check=True, capture_output=True, timeout=30)


def start(nodes: LabNodes, host: Host, *peers: LightNode, **options: object) -> LightNode:
    """A server without a model."""
    given = {"listen": [LISTEN], "peers": [peer.address for peer in peers], "blocks": [0, 4]}
    return nodes.light(host, **given | options)


def test_server_behind_nat_is_reached_through_relay(lab: Lab, nodes: LabNodes) -> None:
    relay = nodes.light(lab.host("relay"), listen=[LISTEN])
    assert relay.ready and relay.ask("reachability")["kind"] == "unknown"
    server = start(nodes, lab.nat("home").host("server"), relay)
    assert server.ready
    state = server.ask("wait_reachability", kind="relayed")
    assert state["relays"] == [relay.peer_id]
    assert state["text"] == f"behind NAT, reachable through relay …{relay.peer_id[-8:]}"
    client = nodes.light(lab.host("client"), peers=[relay.address])
    client.ask("wait_announced", peer=server.peer_id, with_relays=[relay.peer_id])
    print(f"reached after {client.ask('reach', peer=server.peer_id):.3f} s")
    print(f"direct {client.ask('wait_direct', peer=server.peer_id):.3f} s later")
    # Now that somebody could ask, the relay knows what it is, and says so.
    assert relay.ask("wait_reachability", kind="public")["text"].startswith("public at 11.77.0.")
    about = client.ask("about", peer=relay.peer_id)
    assert about["role"] == "bootstrap" and about["reachability"].startswith("public at 11.77.0.")
    assert about["relay"]["reservations"] == 1 and about["relay"]["free"] > 0
    assert client.ask("about", peer=server.peer_id)["relay"] is None


def test_a_forwarded_port_is_found_and_announced(lab: Lab, nodes: LabNodes) -> None:
    relay, nat = start(nodes, lab.host("relay")), lab.nat("home")
    host = nat.host("server")
    run(nat, "iptables", "-t", "nat", "-A", "PREROUTING", "-i", "wan", "-p", "tcp", "--dport", "31330", "-j", "DNAT",
        "--to-destination", host.address)  # fmt: skip
    run(nat, "iptables", "-I", "FORWARD", "-i", "wan", "-m", "conntrack", "--ctstate", "DNAT", "-j", "ACCEPT")
    server = start(nodes, host, relay)
    state = server.ask("wait_reachability", kind="public")
    assert state["text"] == f"public at {nat.address}:31330 (forwarded by a router)"
    assert f"/ip4/{nat.address}/tcp/31330/p2p/{server.peer_id}" in server.ask("addrs")


def test_router_with_upnp_is_asked_for_port(lab: Lab, nodes: LabNodes) -> None:
    relay, nat = start(nodes, lab.host("relay")), lab.nat("home")
    router = nodes.program(nat, [sys.executable, "-S", str(_ROUTER), nat.address])
    assert router.line() == "ready"
    server = start(nodes, nat.host("server"), relay)
    assert server.ready
    state = server.ask("wait_reachability", kind="upnp")
    assert state["text"] == f"mapped by UPnP at {nat.address}:31330"
    assert router.line() == "mapped 31330 for 3600 s"
    client = nodes.light(lab.nat("office").host("client"), peers=[relay.address])
    client.ask("wait_announced", peer=server.peer_id, with_relays=[])
    client.ask("reach", peer=server.peer_id)
    assert client.ask("is_direct", peer=server.peer_id)
    server.close_stdin()
    assert router.line() == "unmapped 31330"


def test_what_was_said_about_relays_is_kept_to(lab: Lab, nodes: LabNodes) -> None:
    bootstrap, named = start(nodes, lab.host("bootstrap")), start(nodes, lab.host("named"))
    home = lab.nat("home")
    some = start(nodes, home.host("some"), bootstrap, relay=named.address)
    none = start(nodes, home.host("none"), bootstrap, relay="off")
    assert some.ask("wait_reachability", kind="relayed")["relays"] == [named.peer_id]
    state = none.ask("wait_reachability", kind="unreachable")
    assert state["text"] == "not reachable: behind NAT, and relays are off (--relay)"
    # Neighbours need no relay.
    none.ask("wait_server", peer=some.peer_id)
    none.ask("reach", peer=some.peer_id)
    assert none.ask("is_direct", peer=some.peer_id)


def test_ipv6_behind_a_firewall(lab6: Lab, nodes: LabNodes) -> None:
    relay_host = lab6.host("relay")
    relay = start(nodes, relay_host, listen=[LISTEN6])
    address = f"/ip6/{relay_host.address6}/tcp/31330/p2p/{relay.peer_id}"
    server = start(nodes, lab6.nat("home").host("server"), listen=[LISTEN6], peers=[address])
    state = server.ask("wait_reachability", kind="relayed")
    assert state["text"].startswith("behind a firewall, reachable through relay ")
    client = nodes.light(lab6.nat("office").host("client"), peers=[address])
    client.ask("wait_announced", peer=server.peer_id, with_relays=[relay.peer_id])
    print(f"reached after {client.ask('reach', peer=server.peer_id):.3f} s")
    print(f"direct after {client.ask('wait_direct', peer=server.peer_id):.3f} s")
    paths = client.ask("paths", peer=server.peer_id)
    assert paths[0]["remote_addr"].startswith("/ip6/")
