"""Two nodes behind NATs get a direct connection where the NATs allow it, and do without where they do not."""

from __future__ import annotations

import pytest

from tests.nat.lab import Kind, Lab
from tests.nat.nodes import LISTEN, LabNodes, LightNode


def connect_through_relay(
    lab: Lab, nodes: LabNodes, kind: Kind, delay: float = 0.0, **client_options: object
) -> tuple[LightNode, LightNode, LightNode]:
    """A relay, a server behind a NAT, and a client behind another one that reaches it."""
    relay = nodes.light(lab.host("relay"), listen=[LISTEN])
    homes = lab.nat("home", kind, delay=delay), lab.nat("office", kind, delay=delay)
    given = {"listen": [LISTEN], "peers": [relay.address], "blocks": [0, 4], "log_level": "INFO"}
    server = nodes.light(homes[0].host("server"), **given)
    server.ask("wait_reachability", kind="relayed")
    client = nodes.light(homes[1].host("client"), peers=[relay.address], **client_options)
    client.ask("wait_announced", peer=server.peer_id, with_relays=[relay.peer_id])
    print(f"reached after {client.ask('reach', peer=server.peer_id):.3f} s")
    return relay, server, client


def test_ports_are_kept(lab: Lab, nodes: LabNodes) -> None:
    _, server, client = connect_through_relay(lab, nodes, Kind.DROPS)
    print(f"direct {client.ask('wait_direct', peer=server.peer_id):.3f} s later")
    stream = client.ask("open", peer=server.peer_id)
    took = sorted(client.ask("echo", stream=stream, size=16384, times=100))
    print(f"16 KiB there and back over the direct connection: {took[50] * 1000:.2f} ms")
    client.ask("wait_paths", peer=server.peer_id, number=1)
    client.ask("echo", stream=stream)


@pytest.mark.parametrize("kind", [Kind.REJECTS, Kind.RESETS])
def test_over_distance(kind: Kind, lab: Lab, nodes: LabNodes, delays: None) -> None:
    """Where the NATs answer who knocks uninvited, the first packets have to cross on the way."""
    _, server, client = connect_through_relay(lab, nodes, kind, delay=0.025)
    print(f"{kind.name}: direct {client.ask('wait_direct', peer=server.peer_id):.3f} s later, at 100 ms there and back")


def test_between_two_servers(lab: Lab, nodes: LabNodes) -> None:
    """Both listen, and dial from the port that they listen on."""
    _, server, other = connect_through_relay(lab, nodes, Kind.DROPS, listen=[LISTEN], blocks=[4, 8])
    print(f"direct {other.ask('wait_direct', peer=server.peer_id):.3f} s later")
    server.ask("wait_direct", peer=other.peer_id)  # it may learn of it a moment later


def test_random_ports_stay_on_the_relay(lab: Lab, nodes: LabNodes) -> None:
    relay, server, client = connect_through_relay(lab, nodes, Kind.SYMMETRIC)
    stream = client.ask("open", peer=server.peer_id)
    server.wait_log("no way to punch through")
    took = sorted(client.ask("echo", stream=stream, size=16384, times=100))
    print(f"16 KiB there and back through the relay: {took[50] * 1000:.2f} ms")
    assert [path["relay"] for path in client.ask("paths", peer=server.peer_id)] == [relay.peer_id]
