from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.nat.reachability import (
    NO_VERDICT,
    DialBack,
    IpVerdict,
    LocalEndpoints,
    NatStatus,
    Observation,
    Observer,
    candidates,
    carried_over,
    judge,
    whom_to_ask,
)

HOME = "192.168.1.10"
NAT = "198.51.100.7"
PUBLIC = "203.0.113.5"
NOW = 1000.0


def at(address: str, port: int = 31330) -> Endpoint:
    return Endpoint(ip_address(address), port)


def place(*addresses: str, port: int = 31330) -> LocalEndpoints:
    ends = tuple(at(address, port) for address in addresses)
    networks = tuple(ip_network((end.ip, 24 if end.ip.version == 4 else 64), strict=False) for end in ends)
    return LocalEndpoints(ends, frozenset(end.ip for end in ends), networks)


def seen(
    observer: str,
    seen_at: str | None,
    dial_back: DialBack = DialBack.NOT_TRIED,
    reached: Endpoint | None = None,
    when: float = NOW,
    name: str = "",
) -> Observation:
    end = None if seen_at is None else at(seen_at, 50123)
    return Observation(name or observer, ip_address(observer), end, dial_back, reached, when)


def reached(observer: str, endpoint: Endpoint, **more: object) -> Observation:
    return seen(observer, str(endpoint.ip), DialBack.REACHED, endpoint, **more)


def failed(observer: str, seen_at: str, **more: object) -> Observation:
    return seen(observer, seen_at, DialBack.FAILED, **more)


def test_nobody_asked() -> None:
    assert judge(4, [], place(HOME), NOW) == NO_VERDICT


def test_reached_at_the_own_address() -> None:
    verdict = judge(4, [reached("198.51.100.1", at(PUBLIC))], place(PUBLIC), NOW)
    assert verdict == IpVerdict(NatStatus.OPEN, (at(PUBLIC),), translated=False, outside=True)


@pytest.mark.parametrize("addresses", [("10.77.0.10", "10.77.0.101"), (PUBLIC, "203.0.113.9")])
def test_the_range_of_an_address_decides_nothing(addresses: tuple[str, str]) -> None:
    own, other = addresses
    assert judge(4, [reached(other, at(own))], place(own), NOW).status is NatStatus.OPEN
    assert judge(4, [failed(other, own)], place(own), NOW).status is NatStatus.CLOSED


def test_neighbour_proves_nothing_once_outsider_has_say() -> None:
    neighbour = reached("192.168.1.20", at(HOME))
    alone = judge(4, [neighbour], place(HOME), NOW)
    assert alone.status is NatStatus.OPEN and not alone.outside
    outsider = seen("203.0.113.1", NAT)
    both = judge(4, [neighbour, outsider], place(HOME), NOW)
    assert both == IpVerdict(NatStatus.CLOSED, (), translated=True, outside=True)


def test_foreign_address_proves_a_nat_early() -> None:
    assert judge(4, [seen("203.0.113.1", NAT)], place(HOME), NOW).status is NatStatus.CLOSED


def test_a_forwarded_port_opens_the_nat() -> None:
    verdict = judge(4, [reached("203.0.113.1", at(NAT)), seen("203.0.113.2", NAT)], place(HOME), NOW)
    assert verdict == IpVerdict(NatStatus.OPEN, (at(NAT),), translated=True, outside=True)


def test_observer_seeing_a_foreign_address_is_outside() -> None:
    verdict = judge(4, [seen("192.168.1.1", NAT)], place(HOME), NOW)
    assert verdict.outside and verdict.status is NatStatus.CLOSED


def test_one_liar_is_outvoted() -> None:
    honest = [reached(f"198.51.100.{n}", at(PUBLIC)) for n in (1, 2)]
    assert judge(4, [*honest, failed("198.51.100.3", PUBLIC)], place(PUBLIC), NOW).status is NatStatus.OPEN
    honest = [failed(f"198.51.100.{n}", PUBLIC) for n in (1, 2)]
    assert judge(4, [*honest, reached("198.51.100.3", at(PUBLIC))], place(PUBLIC), NOW).status is NatStatus.CLOSED


def test_lone_liar_makes_nobody_announce_addresses() -> None:
    honest = [reached(f"198.51.100.{n}", at(PUBLIC)) for n in (1, 2)]
    victim = at("192.0.2.80", 443)
    lie = reached("198.51.100.3", victim)
    verdict = judge(4, [*honest, lie], place(PUBLIC), NOW)
    assert verdict.reached == (at(PUBLIC),) and verdict.status is NatStatus.CLOSED  # at worst a relay is asked, too
    again = reached("198.51.100.3", victim, name="another key at the same address")
    assert judge(4, [*honest, lie, again], place(PUBLIC), NOW).reached == (at(PUBLIC),)


def test_second_witness_confirms_a_forwarded_port() -> None:
    overlay = "100.64.0.7"
    friends = [reached(f"100.99.0.{n}", at(overlay)) for n in (1, 2)]
    witnesses = [reached(f"203.0.113.{n}", at(NAT)) for n in (1, 2)]
    verdict = judge(4, [*friends, *witnesses], place(HOME, overlay), NOW)
    assert verdict.status is NatStatus.OPEN and set(verdict.reached) == {at(overlay), at(NAT)}


def test_private_networks_friends_are_not_the_internet() -> None:
    overlay = "100.64.0.7"
    here = place(HOME, overlay)
    friends = [reached(f"100.99.0.{n}", at(overlay)) for n in (1, 2)]
    assert judge(4, friends, here, NOW).status is NatStatus.OPEN
    verdict = judge(4, [*friends, failed("203.0.113.1", NAT)], here, NOW)
    assert verdict == IpVerdict(NatStatus.CLOSED, (at(overlay),), translated=True, outside=True)


def test_what_was_said_long_ago_does_not_count() -> None:
    assert judge(4, [failed("198.51.100.1", PUBLIC, when=NOW - 2000)], place(PUBLIC), NOW) == NO_VERDICT


def test_the_versions_of_ip_are_judged_apart() -> None:
    here = place(HOME, "2a00:77:1::10")
    said = [seen("203.0.113.1", NAT), reached("2a00:77::5", at("2a00:77:1::10"))]
    assert judge(4, said, here, NOW).status is NatStatus.CLOSED
    assert judge(6, said, here, NOW).status is NatStatus.OPEN


def test_who_listens_on_loopback_only_is_not_judged() -> None:
    assert judge(4, [reached("127.0.0.1", at("127.0.0.1"))], place("127.0.0.1"), NOW) == NO_VERDICT


def test_verdict_is_kept_while_all_are_asked_anew() -> None:
    open_before = IpVerdict(NatStatus.OPEN, (at(PUBLIC),), outside=True)
    assert carried_over(open_before, NO_VERDICT, settling=True).status is NatStatus.OPEN
    assert carried_over(open_before, NO_VERDICT, settling=False) == NO_VERDICT
    closed = IpVerdict(NatStatus.CLOSED, translated=True)
    assert carried_over(open_before, closed, settling=True) == closed


def test_peers_dial_only_the_address_they_see() -> None:
    here = place(HOME, PUBLIC)
    mapped = at(NAT, 40000)
    assert candidates(at(NAT, 50123), here, [mapped]) == (mapped, at(NAT))
    assert candidates(at(PUBLIC, 50123), here, [mapped])[0] == at(PUBLIC)
    assert {candidate.ip for candidate in candidates(at(PUBLIC, 50123), here, [mapped])} == {ip_address(PUBLIC)}
    assert candidates(None, here, [mapped]) == ()


def observers(*addresses: str) -> list[Observer]:
    return [Observer(address, ip_address(address)) for address in addresses]


def test_outsiders_are_asked_before_neighbours_and_only_few() -> None:
    peers = observers("192.168.1.20", "203.0.113.1", "203.0.113.2", "203.0.113.3")
    assert whom_to_ask(peers, {}, {}, place(HOME), NOW) == ("203.0.113.1", "203.0.113.2", "203.0.113.3")


def test_who_has_answered_is_asked_again_after_while() -> None:
    peers = observers("203.0.113.1")
    said = {"203.0.113.1": failed("203.0.113.1", NAT)}
    asked = {"203.0.113.1": NOW}
    assert whom_to_ask(peers, said, asked, place(HOME), NOW + 599) == ()
    assert whom_to_ask(peers, said, asked, place(HOME), NOW + 600) == ("203.0.113.1",)


def test_who_could_not_say_is_asked_again_soon() -> None:
    peers = observers("203.0.113.1")
    said, asked = {"203.0.113.1": seen("203.0.113.1", NAT)}, {"203.0.113.1": NOW}
    assert whom_to_ask(peers, said, asked, place(HOME), NOW + 29) == ()
    assert whom_to_ask(peers, said, asked, place(HOME), NOW + 30) == ("203.0.113.1",)


def test_nobody_is_asked_by_who_does_not_listen() -> None:
    nowhere = LocalEndpoints((), frozenset({ip_address(HOME)}), (ip_network("192.168.1.0/24"),))
    assert whom_to_ask(observers("203.0.113.1"), {}, {}, nowhere, NOW) == ()
    assert whom_to_ask(observers("127.0.0.2"), {}, {}, place("127.0.0.1"), NOW) == ()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("/ip4/203.0.113.5/tcp/31330", at(PUBLIC)),
        ("/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWPeer", at(PUBLIC)),
        ("/ip6/::ffff:203.0.113.5/tcp/31330", at(PUBLIC)),
        ("/ip6/2a00::1/tcp/1", at("2a00::1", 1)),
        ("/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWRelay/p2p-circuit", None),
        ("/ip4/203.0.113.5/udp/31330", None),
        ("/dns4/example.org/tcp/1", None),
        ("/ip4/nonsense/tcp/1", None),
        ("", None),
    ],
)
def test_endpoint_is_read_from_plain_address_only(text: str, endpoint: Endpoint | None) -> None:
    assert Endpoint.parse(text) == endpoint
