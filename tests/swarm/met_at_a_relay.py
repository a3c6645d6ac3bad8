"""Two hosts that have met through a relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host
from petalnode.node.network.nat.autonat import local_endpoints
from petalnode.node.network.nat.hole_punching import HolePuncher
from tests.swarm.relays import host_here, relay_here, reserve


def punches(host: Host, nursery: trio.Nursery) -> HolePuncher:
    node: Any = SimpleNamespace(local=local_endpoints(host.libp2p.get_transport_addrs()), reached=())
    return HolePuncher(host, nursery, node)


@asynccontextmanager
async def met_at_a_relay(
    *, listens: bool = False, dialer_punches: bool = False, meet: bool = True, lower_target: bool | None = None
) -> AsyncIterator[tuple[Host, Host, HolePuncher]]:
    """A host that was reached through a relay and the one that reached it; one of them punches, the other need not.

    Without `meet` the second has yet to connect; `lower_target` says whether the first has the lower peer id."""
    one, other = sorted((Identity.generate(), Identity.generate()), key=lambda identity: identity.peer_id)
    if lower_target is False:
        one, other = other, one
    async with (
        relay_here() as (relay, _),
        host_here(identity=one) as target,
        host_here(listens=listens, identity=other) as client,
        trio.open_nursery() as nursery,
    ):
        puncher = punches(client if dialer_punches else target, nursery)
        client.remember(target.peer_id, await reserve(target, relay))
        if meet:
            await client.connect(target.peer_id)
        yield target, client, puncher
        nursery.cancel_scope.cancel()
