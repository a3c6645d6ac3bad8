"""Servers found through a Kademlia whose nodes are no directories: py-libp2p's own, in processes of their own."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import SwarmError
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span, blocks_key
from tests.node_inspection import table_of
from tests.patience import eventually
from tests.slowness import Slowness
from tests.swarm.processes import LOOPBACK

VERSION, BLOCKS = b"\x5f" * 32, 30
FIRST, LAST = (blocks_key(VERSION.hex(), number) for number in (0, 7))


def config(*peers: str, **options) -> SwarmConfig:
    return SwarmConfig(identity=Identity.generate(), peers=peers, **options)


def announce(swarm: Swarm, span: Span) -> None:
    swarm.announce(
        Announcement(
            peer_id=swarm.peer_id,
            model_version=VERSION,
            model_name="made-up",
            num_blocks=BLOCKS,
            span=span,
            state=ServerState.ONLINE,
            dtype="float32",
        )
    )


def known(swarm: Swarm) -> set[str]:
    return {server.peer_id for server in swarm.view.servers(VERSION, now=time.time())}


async def test_stranger_finds_servers_that_met_a_foreign_node(start, slowness: Slowness) -> None:
    """All know one node of Kademlia; the one of the servers goes, and the stranger's has the records."""
    theirs = start("stock_node", role="table", peers=[])
    ours = start("stock_node", role="table", peers=theirs.addrs)
    options = {"listen": (LOOPBACK,), "announcement_ttl": 6 * slowness()}
    async with (
        open_swarm(config(theirs.addrs[0], **options)) as one,
        open_swarm(config(theirs.addrs[0], **options)) as other,
    ):
        announce(one, Span(0, 15))
        announce(other, Span(15, 30))
        wanted = {one.peer_id, other.peer_id}
        async with open_swarm(config(ours.addrs[0])) as looking:

            async def listed() -> bool:
                await trio.sleep(0.5)
                lookups = [await table_of(looking).look_up(key, timeout=30) for key in (FIRST, LAST)]
                named = [{found.peer_id for found in lookup.providers(random.Random())} for lookup in lookups]
                return named == [{one.peer_id}, {other.peer_id}]

            await eventually(listed, "both servers have left their records")
        theirs.kill()

        async def found() -> bool:
            # A new one each time: what was looked for a moment ago is not looked for again.
            with suppress(SwarmError):
                async with open_swarm(config(ours.addrs[0], bootstrap_deadline=60)) as stranger:
                    await stranger.refresh(model_version=VERSION, sample=True, timeout=60)
                    return known(stranger) == wanted
            return False

        await eventually(found, "a stranger finds both servers")
