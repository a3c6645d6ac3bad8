from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.network.mdns import announceable, read_txt, service_name, txt_record
from petalnode.node.swarm.discovery import is_local, pause_before

A, B = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
NEAR, FAR = "/ip4/192.168.1.10/tcp/31330", "/ip4/11.77.0.10/tcp/31330"


def test_a_record_tells_all_addresses() -> None:
    record = txt_record([f"{NEAR}/p2p/{A}", f"{FAR}/p2p/{A}"])
    assert record[1:9] == b"dnsaddr=" and record[0] == len(f"dnsaddr={NEAR}/p2p/{A}")
    assert read_txt(record) == {A: [NEAR, FAR]}


def test_what_is_of_no_use_is_left_out() -> None:
    useless = ["/ip4/127.0.0.1/tcp/1/p2p/" + A, "/ip4/192.168.1.10/udp/1/quic-v1/p2p/" + A, NEAR, "nonsense"]
    assert read_txt(txt_record([*useless, f"{NEAR}/p2p/{B}"])) == {B: [NEAR]}
    assert read_txt(b"\x04true\x08name=any\x09dnsaddr=\xff" + txt_record([f"{NEAR}/p2p/{A}"])) == {A: [NEAR]}


def test_a_record_is_bounded() -> None:
    many = [f"/ip4/192.168.1.10/tcp/{port}/p2p/{A}" for port in range(1, 100)]
    assert len(read_txt(txt_record(many))[A]) == 8


@given(st.binary(max_size=600))
def test_no_record_is_too_strange(record: bytes) -> None:
    for addrs in read_txt(record).values():
        assert addrs


def test_a_private_swarm_has_a_name_of_its_own() -> None:
    names = {service_name(psk) for psk in (None, "ab" * 32, "cd" * 32)}
    assert len(names) == 3
    for name in names:
        # RFC 6763: at most 15 characters after the underscore.
        assert len(name.split(".")[0]) <= 16 and name.endswith("._udp.local.")


def test_only_addresses_of_own_networks_are_told() -> None:
    relayed = f"{FAR}/p2p/{B}/p2p-circuit/p2p/{A}"
    assert announceable([f"/ip4/127.0.0.1/tcp/1/p2p/{A}", f"/dns4/example.org/tcp/1/p2p/{A}", relayed]) == []


def test_a_node_on_loopback_is_for_this_machine() -> None:
    assert is_local(["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"])
    assert not is_local(["/ip4/0.0.0.0/tcp/0"])
    assert not is_local(["/ip4/127.0.0.1/tcp/0", "/ip4/192.168.1.2/tcp/0"])
    assert not is_local([])


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    pauses = [pause_before(attempt) for attempt in range(1, 2000)]
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == 60
    assert sum(pauses[:4]) < 5
