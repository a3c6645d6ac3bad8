"""Multiaddrs: direct ones, circuits, and what is of no use."""

from __future__ import annotations

import pytest
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.errors import BadInput
from petalnode.node.network.addresses import (
    Endpoint,
    circuit_address,
    circuit_of,
    concrete,
    dialable,
    ip_of,
    is_circuit,
    is_public,
    own_networks,
    parse_own,
    parse_peer,
    without_peer,
)

PEER, RELAY = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))  # the same in every process
CIRCUIT = f"/ip4/203.0.113.7/tcp/31330/p2p/{RELAY}/p2p-circuit"


@pytest.mark.parametrize(
    "bare",
    [
        "/ip4/203.0.113.7/tcp/31330",
        "/ip6/2001:db8::7/tcp/1",
        "/dns4/a.example/tcp/2",
        CIRCUIT,
        "/ip4/203.0.113.7/tcp/1/ws",
        "/dns4/a.example/tcp/443/wss",
        "/dns/a.example/tcp/443/tls/ws",
        "/ip6/2001:db8::7/tcp/1/tls/sni/a.example/ws",
        CIRCUIT.replace("/p2p/", "/tls/sni/a.example/ws/p2p/", 1),
    ],
)
def test_peers_address_is_split_into_id_and_rest(bare):
    assert parse_peer(f" {bare}/p2p/{PEER}") == (PEER, bare)
    assert str(without_peer(Multiaddr(f"{bare}/p2p/{PEER}"))) == bare
    assert str(without_peer(Multiaddr(bare))) == bare
    assert dialable(f"{bare}/p2p/{PEER}") == dialable(bare) == Multiaddr(bare)


def test_a_circuit_address_tells_its_relay():
    circuit = circuit_of(Multiaddr(f"{CIRCUIT}/p2p/{PEER}"))
    assert circuit == circuit_of(Multiaddr(CIRCUIT))
    assert circuit is not None
    assert (circuit.relay_id, str(circuit.relay_addr)) == (RELAY, "/ip4/203.0.113.7/tcp/31330")
    assert str(circuit_address(circuit.relay_addr, RELAY)) == CIRCUIT
    assert str(circuit_address(Multiaddr(f"{circuit.relay_addr}/p2p/{RELAY}"), RELAY)) == CIRCUIT
    assert is_circuit(Multiaddr(CIRCUIT))
    assert circuit_of(Multiaddr(f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}")) is None
    over = circuit_of(Multiaddr(f"/dns4/a.example/tcp/443/tls/ws/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"))
    assert over is not None and str(over.relay_addr) == "/dns4/a.example/tcp/443/tls/ws"


def test_sockets_are_the_same_whatever_is_spoken_there():
    for text in ("/ip4/203.0.113.7/tcp/1/ws", "/ip4/203.0.113.7/tcp/1/tls/sni/a.example/ws"):
        assert Endpoint.of_socket(text) == Endpoint.parse("/ip4/203.0.113.7/tcp/1")
        assert Endpoint.parse(text) is None  # no hole is punched there
    assert str(concrete([Multiaddr("/ip4/127.0.0.1/tcp/1/ws")])[0]) == "/ip4/127.0.0.1/tcp/1/ws"
    assert all(str(addr).endswith("/tcp/1/tls/ws") for addr in concrete([Multiaddr("/ip4/0.0.0.0/tcp/1/tls/ws")]))


@pytest.mark.parametrize(
    "addr",
    [
        "nonsense",
        "",
        "/",
        f"/p2p/{PEER}",
        "/ip4/0.0.0.0/tcp/1",
        "/ip6/::/tcp/1",
        "/ip4/203.0.113.7/tcp/0",
        "/ip4/203.0.113.7/udp/1/quic-v1",
        "/ip4/203.0.113.7/tcp/0/ws",
        "/ip4/203.0.113.7/tcp/1/ws/ws",
        "/ip4/203.0.113.7/tcp/1/tls",
        "/ip4/203.0.113.7/ws",
        f"/ip4/203.0.113.7/tcp/1/tls/p2p/{RELAY}/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/1/p2p/{RELAY}/ws/p2p-circuit",
        "/p2p-circuit",
        f"/p2p/{RELAY}/p2p-circuit",
        f"/ip4/0.0.0.0/tcp/1/p2p/{RELAY}/p2p-circuit",
        "/ip4/203.0.113.7/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N/p2p-circuit",  # an RSA key's
        f"{CIRCUIT}/p2p/{PEER}/p2p-circuit",
    ],
)
def test_what_cannot_be_dialed_is_left_out(addr):
    assert dialable(addr) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "is no multiaddr"),
        ("/ip4/203.0.113.7/tcp/1", "lacks the peer's id"),
        (CIRCUIT, "lacks the peer's id"),
        (f"/p2p/{PEER}", "only TCP"),
        (f"/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "only TCP"),
    ],
)
def test_unusable_peer_address_is_told_with_its_fault(text, says):
    with pytest.raises(BadInput, match=says):
        parse_peer(text)


def test_a_node_listens_and_announces_directly_only():
    assert str(parse_own("/ip4/203.0.113.7/tcp/1", "announce")) == "/ip4/203.0.113.7/tcp/1"
    for what in ("listen", "announce"):
        with pytest.raises(BadInput):
            parse_own(CIRCUIT, what)
    assert str(parse_own("/dns4/a.example/tcp/443/wss", "announce")) == "/dns4/a.example/tcp/443/wss"
    assert str(parse_own("/ip4/0.0.0.0/tcp/1/tls/ws", "listen")) == "/ip4/0.0.0.0/tcp/1/tls/ws"
    with pytest.raises(BadInput, match="no name"):
        parse_own("/ip4/0.0.0.0/tcp/1/tls/sni/a.example/ws", "listen")


def test_what_is_public_and_what_is_near():
    public, private = Multiaddr("/ip4/8.8.8.8/tcp/1"), Multiaddr("/ip4/192.168.1.7/tcp/1")
    assert is_public(public) and is_public(Multiaddr("/dns4/a.example/tcp/1")) and not is_public(private)
    assert not is_public(Multiaddr("/ip4/100.64.0.1/tcp/1"))  # behind a provider's NAT
    assert not is_public(Multiaddr("/ip6/fe80::1/tcp/1"))
    loopback = ip_of(Multiaddr("/ip4/127.0.0.1/tcp/1"))
    assert any(loopback in network for network in own_networks())
