from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address, ip_network
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.nat import autonat
from petalnode.node.network.nat.manager import NatManager
from petalnode.node.network.nat.reachability import (
    IpVerdict,
    LocalEndpoints,
    NatStatus,
    ReachabilityInputs,
    extra_addrs,
    is_public,
    needs_relays,
    reachability,
)
from petalnode.node.network.transport.raw_connection import Path
from petalnode.protocols.nat_traversal import AUTONAT, DialAnswer, DialStatus, Identified

pytestmark = pytest.mark.virtual_time

OWN = Endpoint(ip_address("192.168.1.10"), 31330)
OWN6 = Endpoint(ip_address("2a00:77::10"), 31330)
OUTER = Endpoint(ip_address("11.77.0.101"), 31330)
HERE = LocalEndpoints((OWN,), frozenset({OWN.ip}), (ip_network("192.168.1.0/24"),))
BOTH = LocalEndpoints((OWN, OWN6), frozenset({OWN.ip, OWN6.ip}), HERE.networks)
SEEN = Identified(OUTER.multiaddr, (), ())
NAT = IpVerdict(NatStatus.CLOSED, (), translated=True, outside=True)
FIREWALL = IpVerdict(NatStatus.CLOSED, (), translated=False, outside=True)
RELAY, OTHER = "12D3KooWRelayOne1234", "12D3KooWRelayTwo5678"
CIRCUITS = {
    RELAY: ("/ip4/11.77.0.10/tcp/31330/p2p/R/p2p-circuit",),
    OTHER: ("/ip4/11.77.0.11/tcp/1/p2p/O/p2p-circuit",),
}


def open_at(*endpoints: Endpoint, outside: bool = True) -> IpVerdict:
    return IpVerdict(NatStatus.OPEN, endpoints, translated=False, outside=outside)


def test_unknown_announces_the_interfaces_as_ever() -> None:
    inputs = ReachabilityInputs(HERE)
    assert reachability(inputs).kind == "unknown"
    assert extra_addrs(inputs) == () and not needs_relays(inputs) and not is_public(inputs)


def test_public() -> None:
    inputs = ReachabilityInputs(HERE, open_at(OWN))
    assert reachability(inputs).text == "public at 192.168.1.10:31330"
    assert is_public(inputs) and extra_addrs(inputs) == ()


def test_a_neighbours_word_is_told_as_such() -> None:
    inputs = ReachabilityInputs(HERE, open_at(OWN, outside=False))
    assert reachability(inputs).text == ("reachable at 192.168.1.10:31330, as far as nodes of its own network can tell")


def test_forwarded_by_hand_or_by_upnp() -> None:
    inputs = ReachabilityInputs(HERE, open_at(OUTER))
    assert reachability(inputs).text == "public at 11.77.0.101:31330 (forwarded by a router)"
    assert extra_addrs(inputs) == ("/ip4/11.77.0.101/tcp/31330",)
    mapped = replace(inputs, mapped=(OUTER,))
    assert reachability(mapped).kind == "upnp"
    assert reachability(mapped).text == "mapped by UPnP at 11.77.0.101:31330"


def test_behind_nat_with_relays() -> None:
    inputs = ReachabilityInputs(HERE, NAT, circuits=CIRCUITS)
    state = reachability(inputs)
    assert state.kind == "relayed" and state.relays == (RELAY, OTHER)
    assert state.text == "behind NAT, reachable through relays …yOne1234 and …yTwo5678"
    assert extra_addrs(inputs) == (*CIRCUITS[RELAY], *CIRCUITS[OTHER])


def test_no_relays_are_told_with_why_and_advice() -> None:
    texts = [
        reachability(ReachabilityInputs(HERE, verdict, relays_allowed=allowed, relays_known=known))
        for verdict, allowed, known in [(NAT, False, 3), (NAT, True, 0), (FIREWALL, True, 1), (NAT, True, 3)]
    ]
    assert {state.kind for state in texts} == {"unreachable"}
    assert [state.text for state in texts] == [
        "not reachable: behind NAT, and relays are off (--relay)",
        "not reachable: behind NAT, and no relay is known; join by a public peer (--peer), or forward the port",
        "not reachable: behind a firewall, and the relay has not taken it yet",
        "not reachable: behind NAT, and none of 3 relays has taken it yet",
    ]


def test_public_ipv6_alone_is_announced_and_relayed() -> None:
    inputs = ReachabilityInputs(BOTH, NAT, open_at(OWN6), circuits={RELAY: CIRCUITS[RELAY]})
    assert needs_relays(inputs) and not is_public(inputs)
    assert reachability(inputs).text == (
        "public over IPv6 at [2a00:77::10]:31330, else behind NAT, reachable through relay …yOne1234"
    )


def test_ipv6_firewall_is_harmless_beside_open_ipv4() -> None:
    inputs = ReachabilityInputs(BOTH, open_at(OWN), FIREWALL, circuits={})
    assert not needs_relays(inputs) and is_public(inputs)


def test_who_does_not_listen_says_so() -> None:
    assert "does not listen" in reachability(ReachabilityInputs(LocalEndpoints((), frozenset(), ()))).text
    loop = Endpoint(ip_address("127.0.0.1"), 1)
    local = ReachabilityInputs(LocalEndpoints((loop,), frozenset({loop.ip}), ()))
    assert reachability(local).text == "reachable on this machine only, where it listens"


def test_circuits_are_announced_only_while_they_are_needed() -> None:
    assert extra_addrs(ReachabilityInputs(HERE, open_at(OWN), circuits=CIRCUITS)) == ()


@contextmanager
def observing(monkeypatch: pytest.MonkeyPatch, identified: Any, autonat_of: str | None) -> Iterator[Any]:
    """What a node makes of a peer that says by `identified` where it comes from, and fails to dial back if it can."""

    async def dial_back(*_: object) -> DialAnswer:
        return DialAnswer(DialStatus.DIAL_ERROR, "no answer")

    path = Path(direct=True, relay=None, remote_addr="/ip4/11.77.0.10/tcp/31330", inbound=False)
    host: Any = SimpleNamespace(
        libp2p=SimpleNamespace(get_transport_addrs=list),
        paths=lambda peer_id: [path],
        set_stream_handler=lambda protocol, handler: None,
    )
    node: Any = SimpleNamespace(
        observers=lambda: [RELAY], extra_endpoints=tuple, update=lambda: None, autonat_of=lambda *_: autonat_of
    )
    with monkeypatch.context() as patched:
        patched.setattr(autonat, "identified", identified)
        patched.setattr(autonat, "request_dial_back", dial_back)
        patched.setattr(autonat, "local_endpoints", lambda listened: HERE)
        yield autonat.ObservedAddresses(host, node)


async def test_unanswering_peer_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the only one, and this node out of reach until it says where it is; the same after a first failure to
    dial back, which may be its own."""
    asked: list[float] = []

    async def identified(*_: object, timeout: float) -> Identified:
        asked.append(trio.current_time())
        if len(asked) < 7:
            raise ConnectionError("lost on its way")
        answered.set()
        return SEEN

    answered = trio.Event()
    with observing(monkeypatch, identified, AUTONAT) as observed:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observed.run)
            await answered.wait()
            await trio.sleep(1000)
            nursery.cancel_scope.cancel()
    silent, failed, failed_again = [2, 4, 8, 16, 30, 30], [30], [600]
    pauses = [later - sooner for sooner, later in pairwise(asked)]
    assert pauses == pytest.approx([*silent, *failed, *failed_again], abs=1.1)  # it looks every second


async def test_who_only_sees_us_proves_nat(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a relay of other software, which is not asked to dial back, and may be the only peer."""

    async def identified(*_: object, timeout: float) -> Identified:
        return SEEN

    with observing(monkeypatch, identified, None) as observed:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observed.run)
            await trio.sleep(4000)
            verdict = observed.verdict(4)
            nursery.cancel_scope.cancel()
    assert verdict.status is NatStatus.CLOSED and verdict.translated


async def test_peers_asked_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys are free: who comes and goes under more and more of them leaves nothing behind."""

    async def identified(*_: object, timeout: float) -> Identified:
        raise ConnectionError("gone")

    with observing(monkeypatch, identified, AUTONAT) as observed:
        observed._node.observers = lambda: [str(next(keys))]
        keys = count()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observed.run)
            await trio.sleep(1000)
            nursery.cancel_scope.cancel()
    assert next(keys) > 500 and len(observed._asked) < 50


async def test_move_spares_connections_of_loopback() -> None:
    """Loopback is no interface that goes away, and is none of the addresses that others may dial."""
    closed, doubted = [], []

    def connection(local: str | None) -> Any:
        async def close() -> None:
            closed.append(local)

        return SimpleNamespace(local_host=local, close=close, suspect=lambda: doubted.append(local))

    here = ["127.0.0.1", "::1", "::ffff:127.0.0.1", "fe80::1%eth0", str(OWN.ip), None]
    gone = ["10.9.9.9", "::ffff:10.9.9.9"]
    host = SimpleNamespace(connected=lambda: [RELAY], connections=lambda *_, **__: map(connection, [*here, *gone]))
    reservations = SimpleNamespace(check=lambda: None)
    async with trio.open_nursery() as nursery:
        node: Any = SimpleNamespace(
            _observed=SimpleNamespace(local=HERE), _host=host, _nursery=nursery, _reservations=reservations
        )
        await NatManager._drop_stranded(node)
    assert doubted == here and sorted(closed) == gone
