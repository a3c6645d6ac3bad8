"""A private swarm across NATs: who has its key reaches everybody, and a stranger is told why not, at once."""

from __future__ import annotations

import pytest

from petalnode.crypto.swarm_key import load_swarm_key
from tests.nat.lab import Lab
from tests.nat.nodes import LISTEN, LabNodes, NodeRefused
from tests.swarm.processes import until


def test_only_who_has_the_key_gets_in(lab: Lab, nodes: LabNodes) -> None:
    meeting, inside, visitor, stranger = (
        lab.host("meeting"),
        lab.nat("home").host("inside"),
        lab.nat("office").host("visitor"),
        lab.host("stranger"),
    )
    key, other_key = (nodes.home(host) / "swarm.key" for host in (meeting, stranger))
    for host, file in ((meeting, key), (stranger, other_key)):
        made = nodes.run(host, "swarm-key", str(file), "--json")
        assert made.code == 0 and made.objects == [{"file": str(file)}], made
    bootstrap = nodes.command(meeting, "bootstrap", "--swarm-key", str(key))
    peer = bootstrap.address
    # What others join by has the key in it.
    command = f"petalnode serve --peer {peer} --swarm-key {key}"
    until(lambda: command in bootstrap.errors, "the command with which others join")

    server = nodes.light(inside, listen=[LISTEN], peers=[peer], psk=load_swarm_key(key), blocks=[0, 4])
    server.ask("wait_reachability", kind="relayed")
    guest = nodes.light(visitor, peers=[peer], psk=load_swarm_key(key))
    guest.ask("wait_server", peer=server.peer_id)  # hence the others know of it too
    seen = nodes.run(visitor, "status", "--peer", peer, "--swarm-key", str(key), "--json")
    assert seen.code == 0, seen
    (line,) = seen.objects
    assert [shown["peer_id"] for shown in line["servers"]] == [server.peer_id]
    assert [(shown["peer_id"], shown["reservations"]) for shown in line["relays"]] == [(bootstrap.peer_id, 1)]
    print(f"reached through two NATs in {guest.ask('reach', peer=server.peer_id):.2f} s")

    outsider = nodes.light(stranger, listen=[LISTEN])
    wrong = nodes.light(lab.host("wrong"), psk=load_swarm_key(other_key))
    for node, words in ((outsider, "private swarm, which needs its --swarm-key"), (wrong, "another swarm key")):
        assert node.ready
        with pytest.raises(NodeRefused, match=words):
            node.ask("open", peer=peer, timeout=60)
        assert node.ask("connected") == []
    # And the other way round.
    with pytest.raises(NodeRefused, match="it has no swarm key"):
        server.ask("open", peer=outsider.address, timeout=60)

    refused = nodes.run(stranger, "status", "--peer", peer, "--swarm-key", str(other_key))
    assert refused.code == 3 and "another swarm key" in refused.err and "Traceback" not in refused.err, refused
