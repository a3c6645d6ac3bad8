"""A server that is not there, or takes no session, ends nobody's answer by the length that it announces."""

from __future__ import annotations

import pytest

from petalnode.node.client.session.answers import SessionSpec
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.models.folder import ModelFolder
from petalnode.node.testing.memory_network import MemoryNetwork
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.swarm.memory_pool import opened, serving
from tests.tiny_models import NUM_BLOCKS


def announce_no_length(network: MemoryNetwork, version: bytes) -> None:
    """A stranger's node, which answers pings."""
    node = network.node()
    span = Span(0, NUM_BLOCKS)
    claimed = Announcement(node.peer_id, version, "tiny", NUM_BLOCKS, span, ServerState.ONLINE, max_session_length=0)
    node.announce(claimed)


def wanted(version: bytes, length: int) -> SessionSpec:
    return SessionSpec(version, Span(0, NUM_BLOCKS), 1, length)


async def test_others_are_waited_for_where_a_stranger_remains(swarm: MemorySwarm, folder: ModelFolder) -> None:
    """While honest servers are silent, their sessions' routes find a stranger's servers alone: no person's mistake."""
    (server,) = await serving(swarm, folder.path, f"0:{NUM_BLOCKS}")
    version = bytes.fromhex(str(server.ready["model_version"]))
    announce_no_length(swarm.network, version)
    async with opened(swarm, folder.path) as (client, _):
        assert [hop.peer_id for hop in await client.route(wanted(version, 64))] == [server.peer_id]
        with pytest.raises(NoChainError):
            await client.route(wanted(version, 64), {server.peer_id})
        with pytest.raises(BadInput, match="ask for less"):
            await client.route(wanted(version, 1 << 20))
