"""py-libp2p's Kademlia: reads are answered from the node's own store, stale or not, without the validator."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p import new_host
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator, Validator

CURED = "py-libp2p has cured it: docs/decisions/kademlia.md says what can be thrown away"
KEY = "/canary/key"


class NothingIsValid(Validator):
    def validate(self, key: str, value: bytes) -> None:
        raise ValueError("expired")

    def select(self, key: str, values: list[bytes]) -> int:
        return 0


def table() -> KadDHT:
    validator = NamespacedValidator({"canary": NothingIsValid()}, strict_validation=True)
    kad = KadDHT(new_host(), DHTMode.CLIENT, validator=validator, validator_changed=True, strict_validation=True)

    async def asked(_: Any) -> list[Any]:
        pytest.fail(CURED)

    kad.peer_routing.find_closest_peers_network = asked  # type: ignore[method-assign, assignment]
    return kad


async def test_value_of_the_own_store_is_taken_directly() -> None:
    kad = table()
    kad.value_store.put(KEY.encode(), b"stale")
    assert await kad.get_value(KEY, quorum=2) == b"stale", CURED


async def test_providers_of_the_own_store_are_taken_directly() -> None:
    kad = table()
    kad.provider_store.add_provider(KEY.encode(), PeerInfo(kad.host.get_id(), []))
    assert len(await kad.provider_store.find_providers(KEY.encode())) == 1, CURED
