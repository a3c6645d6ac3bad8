"""Which peers a link names: real nodes on loopback, in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import SwarmError
from petalnode.node.links.format import Invite, read_link
from petalnode.node.links.making import LinkWishes, link_now, living_addrs, near_addrs, near_link
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.patience import eventually
from tests.swarm.processes import LOOPBACK

VERSION, OTHER = bytes([1]) * 32, bytes([2]) * 32


@asynccontextmanager
async def node(*peers: Swarm, listens: bool = True) -> AsyncIterator[Swarm]:
    listen = (LOOPBACK,) if listens else ()
    addrs = tuple(addr for peer in peers for addr in peer.addrs)
    async with open_swarm(SwarmConfig(Identity.generate(), listen=listen, peers=addrs, relay="off")) as swarm:
        yield swarm


async def serves(swarm: Swarm, by: Swarm, version: bytes = VERSION, state: ServerState = ServerState.ONLINE) -> None:
    """`by` knows of it when this returns."""
    swarm.announce(Announcement(swarm.peer_id, version, "m", 4, Span(0, 4), state))
    await eventually(
        lambda: swarm.peer_id in {said.peer_id for said in by.view.servers(version, now=time.time())},
        "the announcement",
    )


def read(link: str) -> Invite:
    return read_link(link, time.time())


async def test_link_leads_through_both_peers() -> None:
    identity = Identity.generate()
    async with node() as first, node(first) as second, node(first, listens=False) as guest:
        assert near_addrs(first) == {first.peer_id: first.addrs}  # those that dialed it may be anywhere
        assert near_addrs(second) == {second.peer_id: second.addrs, first.peer_id: first.addrs}
        assert near_addrs(guest) == {first.peer_id: first.addrs}
        wishes = LinkWishes("org/model", VERSION, lifetime=1000.0)
        assert read(near_link(guest, wishes)).addrs == tuple(first.addrs)
        assert near_link(guest, wishes, without=(first.peer_id,)) == ""
        assert read(near_link(second, wishes, without=(first.peer_id,))).addrs == tuple(second.addrs)
        link, said = await link_now(guest, wishes, identity)
        assert read(link) == said and said.addrs == tuple(first.addrs)
        assert said.maker == identity.peer_id and said.model_argument == f"org/model@{VERSION[:16].hex()}"
        assert abs(said.expires - time.time() - 1000.0) < 900.0
        assert read(near_link(guest, LinkWishes())).model_argument is None


async def test_who_does_not_answer_is_in_no_link() -> None:
    async with node(listens=False) as alone, trio.open_nursery() as nursery:
        async with node() as first, node(first, listens=False) as guest:
            first.host.libp2p.multiselect.handlers.clear()  # connected, and silent
            with pytest.raises(SwarmError, match="no peer of this swarm answers"):
                await link_now(guest, LinkWishes(), Identity.generate())
        with pytest.raises(SwarmError, match="no peer of this swarm answers"):
            await link_now(alone, LinkWishes(), Identity.generate())
        assert near_link(alone, LinkWishes()) == ""
        nursery.cancel_scope.cancel()


async def test_servers_of_the_model_are_named_dialably() -> None:
    async with node() as first, node(first) as one, node(first) as other, node(first) as banned, node(first) as leaving:
        await serves(one, first)
        await serves(other, first, OTHER)
        await serves(banned, first)
        await serves(leaving, first, VERSION, ServerState.DRAINING)
        first.trust.ban(banned.peer_id, "wrong tokens", "own")
        found = await living_addrs(first, VERSION)
        assert next(iter(found)) == first.peer_id
        assert found == {swarm.peer_id: swarm.addrs for swarm in (first, one)}
        found = await living_addrs(first, None)
        assert found == {swarm.peer_id: swarm.addrs for swarm in (first, one, other)}
