from __future__ import annotations

from ipaddress import ip_address, ip_network

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.nat.hole_punching import after_failure, dialed_of, may_punch, own_endpoints, targets
from petalnode.node.network.nat.reachability import LocalEndpoints

CASE = frozenset({"198.51.100.7", "203.0.113.5"})


def at(address: str, port: int = 31330) -> Endpoint:
    return Endpoint(ip_address(address), port)


SERVER = LocalEndpoints((at("192.168.1.10"),), frozenset({ip_address("192.168.1.10")}), (ip_network("192.168.1.0/24"),))
CLIENT = LocalEndpoints((), SERVER.own_ips, SERVER.networks)


def test_failures_make_longer_and_longer_pauses() -> None:
    assert may_punch(None, CASE, 0.0)
    record, now = None, 0.0
    for pause in (60, 120, 240):
        record = after_failure(record, CASE, now)
        assert not may_punch(record, CASE, now + pause - 1)
        assert may_punch(record, CASE, now + pause)
        now += pause
    for _ in range(30):
        record = after_failure(record, CASE, now)
    assert may_punch(record, CASE, now + 3600)


def test_new_address_of_either_side_is_new_case() -> None:
    record = after_failure(after_failure(None, CASE, 0.0), CASE, 1.0)
    moved = CASE | {"203.0.113.99"}
    assert may_punch(record, moved, 2.0)
    assert after_failure(record, moved, 2.0).failures == 1
    assert not may_punch(record, frozenset({"203.0.113.5"}), 2.0)  # less than before is nothing new


def test_nat_is_expected_to_keep_our_port() -> None:
    seen = [at("198.51.100.7", 50123)]
    assert own_endpoints(seen, SERVER, [], {4: 31330}) == (at("198.51.100.7"), at("192.168.1.10"))
    assert own_endpoints(seen, CLIENT, [], {4: 40404}) == (at("198.51.100.7", 40404),)
    reached = at("198.51.100.7", 9000)
    assert own_endpoints(seen, SERVER, [reached], {4: 31330})[0] == reached
    assert own_endpoints(seen, SERVER, [], {6: 1}) == ()


def test_nobody_dials_himself_or_nowhere() -> None:
    theirs = [at("192.168.1.10"), at("203.0.113.5"), None, at("0.0.0.0"), at("224.0.0.1"), at("203.0.113.5"), at("::1")]
    assert [*targets(theirs, SERVER, {4: 31330}).values()] == [at("203.0.113.5")]
    assert not targets([at("192.168.1.10", 40404)], CLIENT, {4: 40404})
    assert [*targets([at("192.168.1.10", 31330)], CLIENT, {4: 40404}).values()] == [at("192.168.1.10")]


def test_no_more_than_a_few_are_dialed() -> None:
    found = targets([at("203.0.113.5", port) for port in range(1, 100)], SERVER, {4: 31330})
    assert len(dialed_of(found, list(found))) == 8
    assert dialed_of(found, list(found)[90:92]) == (at("203.0.113.5", 91), at("203.0.113.5", 92))
