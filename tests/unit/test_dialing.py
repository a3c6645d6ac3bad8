"""In which order a peer's addresses are tried, and which are left alone."""

from __future__ import annotations

from ipaddress import ip_network

from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport.dialing import FailedAddress, failed, kept, one_per_relay, pause_ends, plan

RELAY = Identity.generate().peer_id
NEAR = Multiaddr("/ip4/192.168.1.7/tcp/1")
FOREIGN = Multiaddr("/ip4/10.9.9.9/tcp/1")
PUBLIC = Multiaddr("/ip4/8.8.8.8/tcp/1")
CIRCUIT = Multiaddr(f"/ip4/8.8.4.4/tcp/1/p2p/{RELAY}/p2p-circuit")
OTHER_CIRCUIT = Multiaddr(f"/ip4/8.8.4.5/tcp/1/p2p/{RELAY}/p2p-circuit")
NETWORKS = [ip_network("192.168.1.0/24"), ip_network("127.0.0.0/8")]


def order(attempts):
    return [attempt.addr for attempt in attempts]


def test_near_addresses_come_first_and_foreign_private_last():
    first, last = plan([FOREIGN, PUBLIC, NEAR], NETWORKS, {}, 0.0)
    assert order(first) == [NEAR, PUBLIC, FOREIGN]
    assert not last


def test_circuits_start_soon_beside_many_direct_addresses():
    dead = [Multiaddr(f"/ip4/10.0.{n}.1/tcp/1") for n in range(10)]
    first, _ = plan([*dead, CIRCUIT, OTHER_CIRCUIT], NETWORKS, {}, 0.0)
    starts = {attempt.addr: attempt.after for attempt in first}
    assert 0 < starts[CIRCUIT] < starts[OTHER_CIRCUIT] < 0.5
    assert starts[dead[0]] == 0.0
    assert [attempt.after for attempt in first] == sorted(attempt.after for attempt in first)
    alone, _ = plan([CIRCUIT], NETWORKS, {}, 0.0)
    assert alone[0].after == 0.0


def test_failed_address_waits_until_all_else_failed():
    failing = {PUBLIC: failed(None, 100.0)}
    first, last = plan([PUBLIC, CIRCUIT], NETWORKS, failing, 101.0)
    assert (order(first), order(last)) == ([CIRCUIT], [PUBLIC])
    assert first[0].after == 0.0
    first, last = plan([PUBLIC, CIRCUIT], NETWORKS, failing, pause_ends(failing[PUBLIC]))
    assert order(first) == [PUBLIC, CIRCUIT]


def test_failed_addresses_are_tried_without_others():
    failing = {PUBLIC: failed(None, 100.0), NEAR: failed(failed(None, 99.0), 100.0)}
    first, last = plan([NEAR, PUBLIC], NETWORKS, failing, 100.0)
    assert set(order(first)) == {PUBLIC, NEAR}
    assert not last


def test_pause_grows_with_failures_and_fades():
    known, pauses = None, []
    for at in range(12):
        known = failed(known, float(at))
        pauses.append(pause_ends(known) - at)
    assert pauses == sorted(pauses)
    assert pauses[0] < 10 < 100 < pauses[-1] <= 300
    long_ago = failed(known, 12 + 24 * 3600.0)
    assert pause_ends(long_ago) - long_ago.at < 10


def test_relay_is_asked_once_beside_many_addresses():
    other_relay = Multiaddr(f"/ip4/8.8.4.6/tcp/1/p2p/{Identity.generate().peer_id}/p2p-circuit")
    addrs = [PUBLIC, CIRCUIT, OTHER_CIRCUIT, other_relay]
    assert one_per_relay(addrs, {}) == [PUBLIC, CIRCUIT, other_relay]
    failing = {CIRCUIT: failed(None, 0.0)}
    assert one_per_relay(addrs, failing) == [PUBLIC, OTHER_CIRCUIT, other_relay]
    failing[OTHER_CIRCUIT] = failed(None, 0.0)
    assert one_per_relay(addrs, failing) == [PUBLIC, CIRCUIT, other_relay]


def test_neither_kind_of_address_crowds_out_the_other():
    many = [Multiaddr(f"/ip4/8.8.{n}.8/tcp/1") for n in range(100)]
    assert CIRCUIT in kept([*many, CIRCUIT])
    assert many[0] in kept([CIRCUIT] * 50 + many)


@given(
    st.lists(st.sampled_from([NEAR, FOREIGN, PUBLIC, CIRCUIT, OTHER_CIRCUIT]), unique=True),
    st.dictionaries(
        st.sampled_from([NEAR, FOREIGN, PUBLIC, CIRCUIT]),
        st.builds(FailedAddress, st.floats(1, 20), st.floats(0, 1000)),
    ),
    st.floats(0, 2000),
)
def test_every_address_is_tried_once_at_once(addrs, failing, now):
    first, last = plan(addrs, NETWORKS, failing, now)
    assert sorted(map(str, order(first) + order(last))) == sorted(map(str, addrs))
    if addrs:
        assert first[0].after == 0.0
