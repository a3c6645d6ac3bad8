"""A DHT of which a test says who provides what."""

from __future__ import annotations

import random
from collections.abc import Sequence

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.provider_lookup import (
    Contact,
    Lookup,
    LookupAnswer,
    claimed_origins,
    distance,
    look_up,
    nearest_around,
)
from petalnode.node.testing.memory_network import run_autojumping
from petalnode.protocols.ids import blocks_key

KEY = blocks_key("5f4e7440d715", 3)
OWN = Identity.from_seed(b"o" * 32).peer_id
PROVIDER = Contact(Identity.from_seed(b"p" * 32).peer_id, ("/ip4/11.9.9.9/tcp/1",))


def peer(number: int, host: str | None = None) -> Contact:
    """A peer with an address of its own, or at `host`."""
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    return Contact(
        identity.peer_id, (f"/ip4/{host or f'11.0.{number // 250}.{number % 250 + 1}'}/tcp/{number % 60_000 + 1}",)
    )


class Table:
    """A network of peers, each of which has heard of some of all and of those next to it in the order of their ids; it
    names the 20 nearest to the key of these."""

    def __init__(self, peers: Sequence[Contact]) -> None:
        rng = random.Random(1)
        self.peers = {one.peer_id: one for one in peers}
        order = sorted(peers, key=lambda one: distance(one.peer_id, KEY))
        self.knows = {
            one.peer_id: [*rng.sample(order, min(40, len(order))), *order[max(0, at - 20) : at + 20]]
            for at, one in enumerate(order)
        }
        self.records: dict[str, list[Contact]] = {}
        self.dead: set[str] = set()
        self.asked: list[str] = []

    async def ask(self, contact: Contact) -> LookupAnswer | None:
        await trio.sleep(0.1)
        self.asked.append(contact.peer_id)
        if contact.peer_id in self.dead or contact.peer_id not in self.peers:
            return None
        there = ((one.peer_id, claimed_origins(one)) for one in self.knows[contact.peer_id])
        nearest = nearest_around(KEY, there, 20)
        return LookupAnswer(tuple(self.records.get(contact.peer_id, ())), tuple(map(self.peers.__getitem__, nearest)))

    def look_up(self, start: Sequence[Contact], timeout: float = 60.0) -> Lookup:
        lookup = Lookup(KEY, start, OWN)
        run_autojumping(lambda: look_up(lookup, self.ask, timeout=timeout))
        return lookup

    def keep(self, provider: Contact, start: Sequence[Contact]) -> list[Contact]:
        """As a server does: leaves a record at the nearest."""
        nearest = self.look_up(start).nearest()
        for contact in nearest:
            self.records.setdefault(contact.peer_id, []).append(provider)
        return nearest

    def found(self, start: Sequence[Contact]) -> list[Contact]:
        return list(self.look_up(start).providers(random.Random(1)))


PEERS = [peer(number) for number in range(300)]
