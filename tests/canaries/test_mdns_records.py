"""py-libp2p's mDNS: only the first address has the key `dnsaddr` of the specification, and 0.0.0.0 is announced."""

from __future__ import annotations

from libp2p.discovery.mdns.broadcaster import PeerBroadcaster

CURED = "py-libp2p has cured it: docs/decisions/mdns.md says what can be thrown away"
PEER = "12D3KooWGRUVh7NcDMyPTBNDC2yLMZxwZQNJkYfkZ5xkzkvB1Yhv"


def txt(*addrs: str) -> dict[bytes, bytes]:
    broadcaster = PeerBroadcaster.__new__(PeerBroadcaster)  # the record needs no network
    return broadcaster._build_txt_properties(list(addrs), ["192.168.1.7"], 4001, PEER)


def test_second_address_has_key_that_nobody_else_reads() -> None:
    keys = list(txt("/ip4/192.168.1.7/tcp/4001", "/ip4/10.0.0.7/tcp/4001"))
    assert keys == [b"dnsaddr", b"dnsaddr2"], CURED


def test_an_address_that_nobody_can_dial_is_announced() -> None:
    assert txt("/ip4/0.0.0.0/tcp/4001") == {b"dnsaddr": f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}".encode()}, CURED
