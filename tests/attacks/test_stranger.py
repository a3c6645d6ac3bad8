"""Every attack of the catalogue is carried out as it is meant, and a node serves others all the while."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from tests.attacks.stranger.catalogue import ATTACKS
from tests.attacks.stranger.keys import Key, Victim, keep_up, open_keys
from tests.swarm.processes import LOOPBACK

TIMEOUT = 300.0
KEYS = 2
SOURCE = "127.0.0.2" if sys.platform == "linux" else None
"""Another address than that of who is honest: shares and turns are those of addresses."""
LEAST = 2000
"""Bytes that an attack has sent when it counts as carried out: more than the handshakes of its keys' connections."""

PER_DIAL = 100
"""Bytes that a connection counts for on which no handshake need follow."""


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_is_carried_out_and_others_are_served(name: str) -> None:
    config = SwarmConfig(Identity.generate(), listen=(LOOPBACK,))
    async with (
        open_swarm(config) as node,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as honest,
        open_keys(KEYS, (SOURCE,), seed=1) as keys,
        trio.open_nursery() as nursery,
    ):
        victim = Victim(node.addrs[0])
        for key in keys:
            for attack in ATTACKS[name]:
                nursery.start_soon(keep_up, attack, key, victim)
        with trio.fail_after(TIMEOUT):
            while sum(key.host.socket_bytes.sent + PER_DIAL * key.dials for key in keys) < LEAST:  # noqa: ASYNC110  (nobody tells)
                await trio.sleep(0.01)
            for _ in range(3):
                assert await honest.measure_rtt(node.peer_id, timeout=TIMEOUT) < TIMEOUT
        nursery.cancel_scope.cancel()


async def test_keys_take_their_addresses_in_turns() -> None:
    async with open_keys(5, ("127.0.0.2", "127.0.0.3"), seed=1) as keys:
        found = [key.source for key in keys]
    assert Counter(found) == {"127.0.0.2": 3, "127.0.0.3": 2}


async def test_attack_begins_again_when_it_is_broken_off() -> None:
    """What a victim does about it ends one try; a mistake in the attack itself is no victim's doing."""
    tries = 0

    async def broken_off(_: Key, __: Victim) -> None:
        nonlocal tries
        tries += 1
        raise TypeError if tries == 3 else ConnectionResetError

    with pytest.RaisesGroup(TypeError, flatten_subgroups=True, allow_unwrapped=True):
        async with open_keys(1, (None,), seed=1) as (key,):
            await keep_up(broken_off, key, Victim("/ip4/127.0.0.1/tcp/1"))
    assert tries == 3
