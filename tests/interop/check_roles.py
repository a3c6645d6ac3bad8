"""roles.py, in the roles of libp2p/unified-testing, with js-libp2p and go-libp2p in the others: `make interop`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.import_graph import ROOT
from tests.interop.check_peers import is_direct, node_of, reachable
from tests.interop.go_node import GoNode, GoNodes
from tests.interop.peers import JsNodes
from tests.nat.lab import Host, open_lab
from tests.swarm.processes import LOOPBACK, WS, Running, environment, until

KEY: Final = "a5b50d5e"


class Roles:
    """Programs that find each other by the values that they set."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: list[Running] = []
        self._server = ""

    def share(self, host: Host | None = None, **values: str) -> Running:
        """The server of the values, on a machine of a lab or on this one."""
        given = json.dumps({f"{KEY}_{name}": value for name, value in values.items()})
        at = "127.0.0.1" if host is None else host.address
        server = self._started("tests.interop.redis_server", host, [at, given])
        self._server = server.event("ready")["addr"]
        return server

    def start(self, host: Host | None = None, **variables: str) -> Running:
        return self._started("tests.interop.roles", host, (), REDIS_ADDR=self._server, TEST_KEY=KEY, **variables)

    def _started(self, module: str, host: Host | None, arguments: Sequence[str], **variables: str) -> Running:
        command = [sys.executable, "-m", module, *arguments]
        env = environment(self._home) | variables
        self._running.append(Running(command if host is None else host.command(command), env, ROOT))
        return self._running[-1]

    def end(self) -> None:
        for process in self._running:
            process.kill()


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    started = Roles(tmp_path)
    try:
        yield started
    finally:
        started.end()


def told(server: Running, name: str) -> str:
    """A value, once it is set."""
    while (found := server.event("set"))["key"] != f"{KEY}_{name}":
        pass
    return str(found["value"])


@pytest.mark.parametrize("kind", ["js", "go"])
@pytest.mark.parametrize(("transport", "listen"), [("tcp", LOOPBACK), ("ws", WS)])
def test_transport_dialer_and_listener(
    js: JsNodes, go: GoNodes, roles: Roles, kind: str, transport: str, listen: str
) -> None:
    theirs, address = node_of(kind, js, go, listen)
    server = roles.share(listener_multiaddr=address)
    common = {"TRANSPORT": transport, "SECURE_CHANNEL": "noise", "MUXER": "yamux"}
    dialer = roles.start(IS_DIALER="true", **common)
    assert dialer.wait(600) == 0, dialer.errors
    said = [dialer.line() for _ in range(4)]
    assert [line.partition(":")[0] for line in said] == ["latency", "  handshake_plus_one_rtt", "  ping_rtt", "  unit"]
    roles.start(IS_DIALER="false", LISTENER_IP="127.0.0.1", **common)
    ours = told(server, "listener_multiaddr")
    assert theirs.connect(ours) and (isinstance(theirs, GoNode) or theirs.ask("ping", peer=ours) >= 0)


@pytest.mark.parametrize("kind", ["js", "go"])
def test_provider_and_querier_meet_through_bootstrap(js: JsNodes, go: GoNodes, roles: Roles, kind: str) -> None:
    server = roles.share(bootstrap_addr=node_of(kind, js, go, LOOPBACK)[1])
    roles.start(ROLE="provider", LISTENER_IP="127.0.0.1")
    assert told(server, "provider_done") == "done"
    querier = roles.start(ROLE="querier", LISTENER_IP="127.0.0.1")
    assert querier.wait(600) == 0, querier.errors
    assert querier.line() == "status: pass"


@pytest.mark.parametrize("kind", ["ours", "js dialer", "js relay", "go dialer", "go relay"])
def test_hole_punching_relay_listener_and_dialer(js: JsNodes, go: GoNodes, roles: Roles, kind: str) -> None:
    """js-libp2p's relay cannot tell who is behind NAT: it has no AutoNAT."""
    with open_lab() as lab:
        relay = lab.host("relay")
        if kind.endswith("relay"):
            theirs, address = reachable(kind, js, go, relay, "relay")
            server = roles.share(lab.host("values"), relay_multiaddr=address)
            at = ""
        else:
            server = roles.share(lab.host("values"))
            roles.start(relay, IS_RELAY="true", RELAY_IP=relay.address)
            at = told(server, "relay_multiaddr")
        roles.start(lab.nat("home").host("listener"), IS_DIALER="false", PEER_IP="0.0.0.0")
        listener = told(server, "listener_peer_id")
        if not kind.endswith("dialer"):
            dialer = roles.start(lab.nat("office").host("dialer"), IS_DIALER="true", PEER_IP="0.0.0.0")
            assert dialer.wait(600) == 0, dialer.errors
            assert dialer.line().startswith("#") and dialer.line().startswith("handshakeTime: ")
            return
        theirs, _ = reachable(kind, js, go, lab.host("theirs"), "dcutr")
        circuit = f"{at}/p2p-circuit/p2p/{listener}"
        assert theirs.connect(circuit)
        until(lambda: is_direct(theirs.paths(listener)), "a direct connection")
