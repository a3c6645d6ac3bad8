"""Many keys at few addresses take a relay's places and a node's dial-backs: others still get some."""

from __future__ import annotations

import dataclasses
from collections import Counter
from ipaddress import ip_address

from petalnode.node.network.host import Host
from petalnode.node.network.nat.dial_back import Budget
from petalnode.node.network.nat.relay import RelayLimits, RelayLoad, admit_circuit, admit_reservation
from petalnode.node.network.transport.raw_connection import Path
from petalnode.protocols import standard_pb2 as pb

ADDRESSES = range(5)
KEYS = 500


def reserved(own: int, total: int) -> bool:
    load = RelayLoad(reservations=total, reservations_of_address=own)
    return admit_reservation(load, RelayLimits(), renews=False) == pb.OK


def test_five_addresses_leave_reservations_to_a_sixth() -> None:
    held: Counter[int] = Counter()
    for _ in range(KEYS):
        for address in ADDRESSES:
            held[address] += reserved(held[address], held.total())
    assert held.total() > RelayLimits().reservations // 2, "who is there may use what nobody else wants"
    assert reserved(0, held.total())


def test_five_addresses_leave_circuits_to_everybody() -> None:
    for target_is_one in (True, False):
        held: Counter[int] = Counter()

        def admitted(address: int, one: bool = target_is_one, held: Counter[int] = held) -> bool:
            load = RelayLoad(circuits=held.total(), circuits_of_address=held[address])
            if one:
                load = dataclasses.replace(
                    load, circuits_to_peer=held.total(), circuits_of_address_to_peer=held[address]
                )
            return admit_circuit(load, RelayLimits()) == pb.OK

        for _ in range(KEYS):
            for address in ADDRESSES:
                held[address] += admitted(address)
        assert all(held.values())
        assert admitted(len(ADDRESSES))


def test_five_addresses_leave_dial_backs_to_a_sixth() -> None:
    budget = Budget()
    for number in range(KEYS):
        budget.take(ip_address(f"203.0.113.{number % len(ADDRESSES)}"), now=0.0)
    assert budget.take(ip_address("198.51.100.7"), now=0.0), "while all of theirs still run"


def test_one_networks_line_has_one_addresss_dial_backs() -> None:
    budget = Budget()
    taken = 0
    for number in range(KEYS):
        own = ip_address(f"2001:db8:1:2::{number + 1:x}")
        if budget.take(own, now=0.0):
            taken += 1
            budget.give_back(own)
    assert taken == 6
    assert budget.take(ip_address("2001:db8:1:3::1"), now=0.0)


class EachThroughTheOther(Host):
    """Of two relays, of whom each has come through the other one, and has just closed its direct connection."""

    def __init__(self) -> None:
        pass

    def paths(self, peer_id: str) -> list[Path]:
        other = {"one": "two", "two": "one"}[peer_id]
        return [Path(direct=False, relay=other, remote_addr=None, inbound=True)]


def test_relays_through_each_other_are_nowhere() -> None:
    assert EachThroughTheOther().origin_of("one") == "two"
