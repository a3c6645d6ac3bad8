"""Nodes of js-libp2p and go-libp2p that know nothing of petalnode, beside nodes of petalnode: `make interop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.kad_store import server_key
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.trust.evidence_gossip import TOPIC
from petalnode.node.trust.evidence_message import EvidenceMessage
from petalnode.node.trust.store import TrustStore
from petalnode.node.version import __version__
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState, sign_announcement
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.ids import Span
from tests.interop.go_node import PUBLIC, GoNode, GoNodes, read_varint
from tests.interop.peers import JsNode, JsNodes, found_by
from tests.nat.lab import Host, Kind, Lab, open_lab
from tests.nat.nodes import LISTEN, LabNodes, lab_nodes
from tests.swarm.announcers import Nodes as Announcers
from tests.swarm.evidence_messages import LIAR, equivocation
from tests.swarm.processes import LOOPBACK, WS, Nodes, until

BLOCKS = 30
VERSION = "5f4e7440d715" + "00" * 26
KEYS = ("RSA", "secp256k1")  # of those with ECDSA js-libp2p makes no peers
PORT = 4001


def test_identify_names_the_software(node_starter: Nodes, js: JsNodes) -> None:
    ours = node_starter.bootstrap()
    theirs = js.start(peers=[ours.address])
    assert theirs.ask("connect", peer=ours.address) == ours.peer_id
    until(lambda: theirs.ask("about", peer=ours.peer_id).get("agent"), "what identify says")
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
        "listen", peer=ours.address, protocol=DIRECTORY.id
    )


@pytest.mark.parametrize("kind", ["js", "go"])
def test_a_relay_of_theirs_keeps_our_reservation(js: JsNodes, go: GoNodes, tmp_path: Path, kind: str) -> None:
    """It is not asked for AutoNAT 1: js-libp2p would close the connection that the reservation hangs on. go-libp2p's
    lets 128 KiB through a circuit."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        meeting = nodes.light(lab.host("meeting"), listen=[LISTEN])
        relay, address = reachable(kind, js, go, lab.host("relay"), "relay", "autonat", "autonat2")
        given = {"listen": [LISTEN], "peers": [meeting.address], "relay": address}
        server = nodes.light(lab.nat("home").host("server"), blocks=[0, 4], **given)
        server.ask("wait_relays", relays=[relay.peer_id])
        client = nodes.light(lab.nat("office", Kind.SYMMETRIC).host("client"), peers=[meeting.address])
        client.ask("wait_announced", peer=server.peer_id, with_relays=[relay.peer_id])
        client.ask("reach", peer=server.peer_id)
        stream = client.ask("open", peer=server.peer_id)
        time.sleep(20)  # in 17 s the reservation was lost three times
        client.ask("echo", stream=stream, size=4096 if kind == "go" else 65536, times=5)
        assert server.ask("reachability")["relays"] == [relay.peer_id]
        assert isinstance(relay, GoNode) or relay.ask("counts")["asked"] == 0


@pytest.mark.parametrize("kind", ["js", "go"])
def test_who_reaches_us_through_relay_gets_direct_connection(
    js: JsNodes, go: GoNodes, tmp_path: Path, kind: str
) -> None:
    """We accepted the relayed connection, so we begin (DCUtR)."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        relay, server = relayed_server(lab, nodes)
        theirs, _ = reachable(kind, js, go, lab.host("theirs"), "dcutr")
        assert theirs.connect(f"{relay}/p2p-circuit/p2p/{server}")
        until(lambda: is_direct(theirs.paths(server)), "a direct connection")


@pytest.mark.parametrize("kind", ["js", "go"])
def test_autonat_of_theirs_tells_where_we_are(js: JsNodes, go: GoNodes, tmp_path: Path, kind: str) -> None:
    """The second version of js-libp2p; p2pd has the first one alone."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        _, address = reachable(kind, js, go, lab.host("theirs"), "autonat2", "table")
        given = {"listen": [LISTEN], "peers": [address], "relay": "off"}
        hidden = nodes.light(lab.nat("home").host("hidden"), **given)
        public = nodes.light(lab.host("public"), **given)
        hidden.ask("wait_reachability", kind="unreachable")
        public.ask("wait_reachability", kind="public")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["where it is seen", "elsewhere"])
def test_js_learns_from_us_that_it_is_reached(js: JsNodes, tmp_path: Path, elsewhere: bool) -> None:
    """By AutoNAT 2. At an address where it is not seen, it pays for the dial."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        ours = nodes.light(lab.host("ours"), listen=[LISTEN])
        host = lab.host("theirs")
        address = host.address
        if elsewhere:
            address = f"{address.rpartition('.')[0]}.99"
            host.ip(f"address add {address}/24 dev eth0")
        listen = f"/ip4/{address}/tcp/{PORT}"
        theirs = js.start(prefix=host.command(()), listen=[listen], services=["autonat2"])
        assert not any(addr.startswith(listen) for addr in theirs.ask("verified"))
        assert theirs.ask("connect", peer=ours.address) == ours.peer_id
        until(lambda: any(addr.startswith(listen) for addr in theirs.ask("verified")), "the dial-back")


def relayed_server(lab: Lab, nodes: LabNodes) -> tuple[str, str]:
    """The address of a relay, and the peer id of a server behind NAT that is reached through it."""
    relay = nodes.light(lab.host("relay"), listen=[LISTEN])
    server = nodes.light(lab.nat("home").host("server"), listen=[LISTEN], peers=[relay.address], blocks=[0, 4])
    server.ask("wait_relays", relays=[relay.peer_id])
    return relay.address, server.peer_id


def reachable(kind: str, js: JsNodes, go: GoNodes, host: Host, *services: str) -> tuple[JsNode | GoNode, str]:
    """A node on a machine of a lab that others reach, and its address. js-libp2p's has these services, go's has all."""
    listen = f"/ip4/{host.address}/tcp/{PORT}"
    if kind.startswith("go"):
        node = go.start(listen, *PUBLIC, prefix=host.command(()))
        return node, node.address
    other = js.start(prefix=host.command(()), listen=[listen], announce=[listen], services=services)
    return other, f"{listen}/p2p/{other.peer_id}"


def is_direct(paths: list[dict[str, str]]) -> bool:
    return any("p2p-circuit" not in path["addr"] for path in paths)


def node_of(kind: str, js: JsNodes, go: GoNodes, listen: str, *peers: str) -> tuple[JsNode | GoNode, str]:
    """A node with a table, of js-libp2p or of go-libp2p, and its address."""
    if kind == "go":
        started = go.start(listen, peers=peers)
        return started, started.address
    node = js.start(listen=[listen], services=["table"], peers=peers)
    return node, node.ready["addrs"][0]


@pytest.mark.parametrize(("kind", "listen"), [("js", LOOPBACK), ("go", LOOPBACK), ("go", WS)])
def test_servers_are_found_through_foreign_nodes(js: JsNodes, go: GoNodes, kind: str, listen: str) -> None:
    """By provider records; also when the one node is gone that the servers had joined by."""
    first, address = node_of(kind, js, go, listen)
    last = [node_of(kind, js, go, listen, address)[1] for _ in range(2)][1]
    with Announcers() as announcers:
        options = {"peers": [address], "num_blocks": BLOCKS, "model_version": VERSION, "ttl": 9.0}
        one, other = (announcers.start(blocks=span, **options).ready().peer_id for span in ([0, 14], [14, 30]))
        # Ranges of 4 blocks: of the fourth both have some.
        wanted = {one, other}, [{one}] * 3 + [{one, other}] + [{other}] * 4
        until(lambda: trio.run(found_by, last, VERSION, BLOCKS) == wanted, "both servers", 240)
        first.kill()
        assert trio.run(found_by, last, VERSION, BLOCKS) == wanted


@pytest.mark.parametrize("listen", [LOOPBACK, WS])
def test_nodes_of_go_meet_through_ours(node_starter: Nodes, go: GoNodes, listen: str) -> None:
    """Our node keeps what one of them provides, for the other; and answers on a stream of our own protocol."""
    ours = node_starter.bootstrap("--listen", listen)
    one, other = (go.start(peers=[ours.address]) for _ in range(2))
    until(lambda: one.provide("a thing"), "a peer in its table")
    until(lambda: other.providers("a thing") == {one.peer_id}, "the record")
    ping = wire.DirectoryFrame(ping=wire.Ping(payload=b"p" * 64)).SerializeToString()
    with other.open(ours.peer_id, DIRECTORY.id) as stream:
        stream.write(bytes([len(ping)]) + ping)
        stream.flush()
        assert stream.read(1 + len(ping)) == bytes([len(ping)]) + ping


@pytest.mark.parametrize("key", ["Ed25519", "ECDSA"])
def test_nodes_of_go_meet_through_our_relay(node_starter: Nodes, go: GoNodes, key: str) -> None:
    ours = node_starter.bootstrap()
    reserve = ("-autoRelay", "-relayDiscovery=false", "-trustedRelays", ours.address, "-forceReachabilityPrivate")
    hidden = go.start(LOOPBACK, *reserve, *(go.key() if key == "ECDSA" else ()))
    other = go.start(LOOPBACK, *(go.key() if key == "ECDSA" else ()))
    circuit = f"{ours.address}/p2p-circuit/p2p/{hidden.peer_id}"
    until(lambda: other.connect(circuit), "the reservation")
    assert other.paths(hidden.peer_id)  # on this machine they find a direct way as well
    if key == "ECDSA":
        with other.open(ours.peer_id, DIRECTORY.id) as stream:
            said = wire.DirectoryFrame.FromString(stream.read(read_varint(stream)))
        assert f"the one of {other.peer_id} is of another kind" in said.error.message


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (what it waits for tells nobody)
        await trio.sleep(0.05)


@contextmanager
def subscribed(node: JsNode | GoNode, topic: str) -> Iterator[Iterator[bytes]]:
    """What the node hears on a topic of gossipsub."""
    if isinstance(node, GoNode):
        with node.subscribed(topic) as messages:
            yield messages
        return
    node.ask("subscribe", topic=topic)
    yield (bytes.fromhex(node.wait_event("message")["data"]) for _ in count())


@pytest.mark.parametrize("kind", ["js", "go"])
async def test_evidence_goes_through_gossipsub_of_theirs(js: JsNodes, go: GoNodes, kind: str) -> None:
    """Between nodes of ours that are not connected."""
    theirs = go.start() if kind == "go" else js.start(listen=[LOOPBACK], services=["gossip", "table"])
    store = TrustStore()
    given = {"listen": (LOOPBACK,), "peers": (theirs.address,), "serve_dht": False, "gossip": True}
    finder, other = SwarmConfig(Identity.generate(), **given), SwarmConfig(Identity.generate(), trust=store, **given)
    with subscribed(theirs, TOPIC) as messages, trio.fail_after(600):
        async with open_swarm(finder) as one, open_swarm(other) as another:
            await until_true(lambda: all(node.gossip and node.gossip.peers() for node in (one, another)))
            await one.publish_evidence(equivocation(), recomputed=False)
            await until_true(lambda: store.is_banned(LIAR.peer_id))
            assert not one.is_connected(another.peer_id)
            assert EvidenceMessage.from_bytes(next(messages), time.time()).accused == LIAR.peer_id
