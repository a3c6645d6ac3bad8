"""Whom a relay takes, and whom it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from petalnode.node.network.nat.relay import RelayLimits, RelayLoad, admit_circuit, admit_reservation, origin_of
from petalnode.protocols import standard_pb2 as pb

LIMITS = RelayLimits(
    reservations=4,
    reservations_per_address=2,
    circuits=8,
    circuits_per_peer=2,
    circuits_to_peer=3,
    circuits_per_address=4,
)


@pytest.mark.parametrize(("field", "limit"), [("reservations", 4), ("reservations_of_address", 2)])
def test_reservations_end_by_limits_but_for_holders(field, limit):
    def load(count):
        return dataclasses.replace(RelayLoad(), **{field: count})

    assert admit_reservation(load(limit - 1), LIMITS, renews=False) == pb.OK
    assert admit_reservation(load(limit), LIMITS, renews=False) == pb.RESERVATION_REFUSED
    assert admit_reservation(load(limit), LIMITS, renews=True) == pb.OK


@pytest.mark.parametrize(
    ("field", "limit"),
    [("circuits", 8), ("circuits_of_peer", 2), ("circuits_to_peer", 3), ("circuits_of_address", 4)],
)
def test_circuits_end_where_the_limits_say(field, limit):
    assert admit_circuit(dataclasses.replace(RelayLoad(), **{field: limit - 1}), LIMITS) == pb.OK
    assert admit_circuit(dataclasses.replace(RelayLoad(), **{field: limit}), LIMITS) == pb.RESOURCE_LIMIT_EXCEEDED


def test_a_household_counts_as_one_address():
    assert origin_of("/ip4/203.0.113.7/tcp/1") == origin_of("/ip4/203.0.113.7/tcp/2") == "203.0.113.7"
    assert origin_of("/ip6/2001:db8:1:2203::7/tcp/1") == origin_of("/ip6/2001:db8:1:22ff::9/tcp/2")
    assert origin_of("/ip6/2001:db8:1:2203::7/tcp/1") != origin_of("/ip6/2001:db8:1:2303::7/tcp/1")
