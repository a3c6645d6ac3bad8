"""What a command says of how others reach its node, and that they do by the words it prints."""

from __future__ import annotations

import re
import shlex

from tests.nat.lab import Lab
from tests.nat.nodes import LabNodes
from tests.swarm.processes import Node, until


def reached(node: Node, kind: str) -> dict[str, object]:
    """The event that says so; others may come before."""
    assert node.ready
    while (event := node.event("reachability", timeout=60))["kind"] != kind:
        pass
    return event


def test_node_says_how_it_is_reached(lab: Lab, nodes: LabNodes) -> None:
    public = nodes.command(lab.host("public"), "bootstrap")
    hidden = nodes.command(lab.nat("home").host("hidden"), "bootstrap", "--peer", public.address)
    event = reached(hidden, "relayed")
    assert event["relays"] == [public.peer_id]
    assert "behind NAT, reachable through relay" in str(event["text"])
    assert event["addrs"][0].startswith(f"{public.address}/p2p-circuit/p2p/")  # type: ignore[index]
    assert reached(public, "public")["addrs"] == [public.address]
    for node, words in ((public, "public at 11.77.0.10"), (hidden, "behind NAT")):
        until(lambda node=node, words=words: f"reachability: {words}" in node.errors, words)  # type: ignore[misc]

    # The public node's command was right from the first, the other one's is from now on.
    pattern = "to join it from anywhere:  petalnode (serve --peer .*)"
    until(lambda: re.search(pattern, hidden.errors) is not None, "the command is printed")
    assert not re.search(pattern, public.errors)
    _, *join = shlex.split(re.findall(pattern, hidden.errors)[-1])
    guest = nodes.command(lab.nat("office").host("guest"), "bootstrap", *join)
    assert guest.ready["joined"] == {"way": "peers", "peer_id": hidden.peer_id}


def test_node_that_wants_no_relay_says_so(lab: Lab, nodes: LabNodes) -> None:
    public = nodes.command(lab.host("public"), "bootstrap")
    hidden = nodes.command(lab.nat("home").host("hidden"), "bootstrap", "--peer", public.address, "--relay", "off")
    event = reached(hidden, "unreachable")
    assert event["relays"] == [] and "relays are off" in str(event["text"])
