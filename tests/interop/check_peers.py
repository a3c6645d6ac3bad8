"""Nodes of js-libp2p that know nothing of petalnode, beside nodes of petalnode: `make interop`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.kad_store import server_key
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.version import __version__
from petalnode.protocols.announcement import Announcement, ServerState, sign_announcement
from petalnode.protocols.ids import DIRECTORY, Span, blocks_key, ranges_of
from tests.interop.peers import JsNodes, js
from tests.nat.lab import Kind, Lab, open_lab
from tests.nat.nodes import LISTEN, LabNodes, lab_nodes
from tests.node_inspection import table_of
from tests.swarm.announcers import Nodes as Announcers
from tests.swarm.conftest import home, node_starter
from tests.swarm.processes import LOOPBACK, Nodes, until

__all__ = ["home", "js", "node_starter"]
BLOCKS = 30
VERSION = "5f4e7440d715" + "00" * 26
KEYS = ("RSA", "secp256k1")  # of those with ECDSA js-libp2p makes no peers
PORT = 4001


def test_identify_names_the_software(node_starter: Nodes, js: JsNodes) -> None:
    ours = node_starter.bootstrap()
    theirs = js.start(peers=[ours.address])
    assert theirs.ask("connect", peer=ours.address) == ours.peer_id
    until(lambda: "agent" in theirs.ask("about", peer=ours.peer_id), "what identify says")
    assert theirs.ask("about", peer=ours.peer_id)["agent"] == f"petalnode/{__version__}"


def test_client_mode_peers_stay_out_of_tables(node_starter: Nodes, js: JsNodes) -> None:
    ours = node_starter.bootstrap()
    client = js.start(peers=[ours.address], services=["tableClient"])
    assert client.ready
    server = js.start(peers=[ours.address], services=["table"], listen=[LOOPBACK])
    asker = js.start(peers=[ours.address], services=["table"])
    until(lambda: server.peer_id in asker.ask("near", peer=server.peer_id), "the node in server mode")
    assert client.peer_id not in asker.ask("near", peer=client.peer_id)


def test_the_same_value_put_again_is_acknowledged(node_starter: Nodes, js: JsNodes) -> None:
    ours = node_starter.bootstrap()
    identity, now = Identity.generate(), time.time()
    said = Announcement(
        peer_id=identity.peer_id,
        model_version=b"m" * 32,
        model_name="made-up",
        num_blocks=BLOCKS,
        span=Span(0, BLOCKS),
        state=ServerState.ONLINE,
        sequence=int(now * 1e9),
        expires=now + 600,
        dtype="float32",
    )
    value = sign_announcement(identity, said).to_bytes()
    theirs = js.start(peers=[ours.address], services=["table"])
    put = {"key": server_key(identity.peer_id), "value": value.hex()}
    until(lambda: "stored" in theirs.ask("put", **put), "the first answer")
    assert theirs.ask("put", **put) == ["stored"]


@pytest.mark.parametrize("key", KEYS)
def test_other_keys_peers_circuit_and_learn_the_reason(node_starter: Nodes, js: JsNodes, key: str) -> None:
    ours = node_starter.bootstrap()
    target = js.start(key=key, relay=ours.address)
    until(lambda: any("p2p-circuit" in addr for addr in target.ask("addrs")), "the reservation")
    (circuit,) = (addr for addr in target.ask("addrs") if "p2p-circuit" in addr)
    dialer = js.start(key=key)
    assert dialer.ask("echo", peer=circuit, size=1 << 20) == {"back": 1 << 20, "limits": [None]}
    assert f"the one of {dialer.peer_id} is of another kind" in dialer.ask(
        "listen", peer=ours.address, protocol=DIRECTORY
    )


def test_a_relay_of_theirs_keeps_our_reservation(js: JsNodes, tmp_path: Path) -> None:
    """It is not asked for AutoNAT: js-libp2p would close the connection that the reservation hangs on."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        host, meeting = lab.host("relay"), nodes.light(lab.host("meeting"), listen=[LISTEN])
        listen = f"/ip4/{host.address}/tcp/{PORT}"
        relay = js.start(prefix=host.command(()), listen=[listen], announce=[listen], services=["relay", "autonat"])
        address = f"{listen}/p2p/{relay.peer_id}"
        given = {"listen": [LISTEN], "peers": [meeting.address], "relay": address}
        server = nodes.light(lab.nat("home").host("server"), blocks=[0, 4], **given)
        server.ask("wait_relays", relays=[relay.peer_id])
        client = nodes.light(lab.nat("office", Kind.SYMMETRIC).host("client"), peers=[meeting.address])
        client.ask("wait_announced", peer=server.peer_id, with_relays=[relay.peer_id])
        client.ask("reach", peer=server.peer_id)
        stream = client.ask("open", peer=server.peer_id)
        time.sleep(20)  # in 17 s the reservation was lost three times
        client.ask("echo", stream=stream, size=65536, times=5)
        assert server.ask("reachability")["relays"] == [relay.peer_id] and relay.ask("counts")["asked"] == 0


def test_who_reaches_us_through_relay_gets_direct_connection(js: JsNodes, tmp_path: Path) -> None:
    """We accepted the relayed connection, so we begin (DCUtR)."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        relay, server = relayed_server(lab, nodes)
        host = lab.host("theirs")
        listen = f"/ip4/{host.address}/tcp/{PORT}"
        theirs = js.start(prefix=host.command(()), listen=[listen], announce=[listen], services=["dcutr"])
        assert theirs.ask("connect", peer=f"{relay}/p2p-circuit/p2p/{server}") == server
        until(lambda: is_direct(theirs.ask("paths", peer=server)), "a direct connection")


def relayed_server(lab: Lab, nodes: LabNodes) -> tuple[str, str]:
    """The address of a relay, and the peer id of a server behind NAT that is reached through it."""
    relay = nodes.light(lab.host("relay"), listen=[LISTEN])
    server = nodes.light(lab.nat("home").host("server"), listen=[LISTEN], peers=[relay.address], blocks=[0, 4])
    server.ask("wait_relays", relays=[relay.peer_id])
    return relay.address, server.peer_id


def is_direct(paths: list[dict[str, str]]) -> bool:
    return any("p2p-circuit" not in path["addr"] for path in paths)


async def found_by(addr: str) -> tuple[set[str], list[set[str]]]:
    """The servers that a stranger finds who knows this node, and the providers that the DHT names of each range."""
    config = SwarmConfig(Identity.generate(), peers=(addr,))
    async with open_swarm(config) as swarm:
        view = await swarm.refresh(model_version=bytes.fromhex(VERSION), sample=True, timeout=20)
        servers = view.servers(bytes.fromhex(VERSION), now=time.time())
        named = []
        for number in ranges_of(Span(0, BLOCKS), BLOCKS):
            lookup = await table_of(swarm).look_up(blocks_key(VERSION, number), timeout=20)
            named.append({contact.peer_id for contact in lookup.providers(random.Random())})
        return {server.peer_id for server in servers}, named


def test_servers_are_found_through_foreign_nodes(js: JsNodes) -> None:
    """By provider records; also when the one node is gone that the servers had joined by."""
    first = js.start(listen=[LOOPBACK], services=["table"])
    address = first.ready["addrs"][0]
    _, last = (js.start(listen=[LOOPBACK], services=["table"], peers=[address]) for _ in range(2))
    with Announcers() as announcers:
        options = {"peers": [address], "num_blocks": BLOCKS, "model_version": VERSION, "ttl": 9.0}
        one, other = (announcers.start(blocks=span, **options).ready().peer_id for span in ([0, 14], [14, 30]))
        # Ranges of 4 blocks: of the fourth both have some.
        wanted = {one, other}, [{one}] * 3 + [{one, other}] + [{other}] * 4
        until(lambda: trio.run(found_by, last.ready["addrs"][0]) == wanted, "both servers", 240)
        first.kill()
        assert trio.run(found_by, last.ready["addrs"][0]) == wanted
