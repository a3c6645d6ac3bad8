"""Ten servers in memory that start at once and choose and change their blocks by themselves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.server.lifecycle import rebalancing
from petalnode.node.server.lifecycle.rebalancing import PlacementState
from petalnode.node.testing import MemoryNode
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.directory_node import DirectoryNode
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.swarm.processes import until
from tests.tiny_models import NUM_BLOCKS

DEADLINE = 150.0


def _held(spans: list[Span]) -> list[int]:
    return [sum(block in span for span in spans) for block in range(NUM_BLOCKS)]


class Ten:
    """Servers of two blocks each in memory, ten of them started at once, that look at the plan every second.

    Attributes:
        told: what is logged, with the peer id of the server that says it.
        checks: how often a server has asked who is still there, by peer id.
    """

    def __init__(self, pool: MemoryPool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self.told: list[tuple[str, str]] = []
        self.checks: Counter[str] = Counter()
        self.meeting_point = self._node()

    def _node(self) -> MemoryNode:
        async def start() -> MemoryNode:
            node = self.pool.swarm.network.node()
            await node.start(node.network.nursery)
            return node

        node: MemoryNode = self.pool.swarm.call(start)
        return node

    def announce(self, span: Span, num_blocks: int, step_seconds: float = 0.01) -> str:
        """Announces blocks that nobody serves; the peer id of the node that does."""
        node = self._node()
        version = bytes.fromhex(self.pool.servers[0].ready["model_version"])
        made_up = Announcement(
            node.peer_id, version, self.folder.name, num_blocks, span, ServerState.ONLINE, step_seconds=step_seconds
        )
        self.pool.swarm.change(lambda network: node.announce(made_up))
        return node.peer_id

    def held(self) -> list[int]:
        """By how many servers each block is held."""
        return _held([where_now(server) for server in self.pool.alive])

    def known(self) -> list[int]:
        """What who comes now is told."""
        return _held([server.span for server in self.meeting_point.view.servers(now=time.time())])

    def moves(self) -> list[dict[str, Any]]:
        return [event for server in self.pool.servers for event in server.events if event["event"] == "moving"]


def where_now(server: MemoryServer) -> Span:
    return Span(*[event["blocks"] for event in server.events if event["event"] in ("ready", "moved")][-1])


_speaker: ContextVar[str] = ContextVar("speaker", default="")
"""The server whose task this is."""


@pytest.fixture(scope="module")
def ten(models: Path) -> Iterator[Ten]:
    with memory_pool(models / "tiny-llama", DirectoryNode) as pool, pytest.MonkeyPatch.context() as patched:
        ten = Ten(pool, models / "tiny-llama")
        probe = PlacementState.probe

        async def counted(self: PlacementState) -> None:
            await probe(self)
            ten.checks[self.peer_id] += 1

        def heard(record: logging.LogRecord) -> bool:
            ten.told.append((_speaker.get(), record.getMessage()))
            return True

        patched.setattr(PlacementState, "probe", counted)
        patched.setenv("PETALNODE_CHECK_INTERVAL", "1")
        # Nobody is gone because this machine is busy.
        patient = dict.fromkeys(("refresh_timeout", "exchange_timeout", "probe_timeout"), DEADLINE)
        patched.setattr(rebalancing, "OBSERVING", replace(rebalancing.OBSERVING, **patient))
        patched.setattr(rebalancing, "REBALANCING", replace(rebalancing.REBALANCING, max_negotiation=DEADLINE))
        rebalancing.log.addFilter(heard)
        for _ in range(10):
            pool.start(None, num_blocks=2, throughput=5.0, prepare=lambda node: _speaker.set(node.peer_id))
        yield ten
        rebalancing.log.removeFilter(heard)


def test_ten_servers_started_at_once_cover_model_evenly(ten: Ten) -> None:
    at_first = _held([Span(*server.ready["blocks"]) for server in ten.pool.servers])
    assert sorted(at_first) == [3, 3, 3, 3, 4, 4], at_first


def test_joining_fast_and_absurd_servers_move_nobody(ten: Ten) -> None:
    until(lambda: min(ten.held()) >= 3, "the blocks are covered evenly")
    before = len(ten.moves())
    absurd = [ten.announce(Span(0, 4000), 4096), ten.announce(Span(2, 3), 6, step_seconds=1e-6)]
    servers = [server.peer_id for server in ten.pool.alive]
    fast = ten.pool.start(None, num_blocks=6, throughput=50.0)
    assert fast.ready["blocks"] == [0, 6] and fast.ready["blocks_reason"]

    def told_of(peer_id: str) -> list[str]:
        return [speaker for speaker, text in ten.told if speaker in servers and peer_id in text]

    for peer_id in absurd:
        until(lambda peer_id=peer_id: set(told_of(peer_id)) == set(servers), "all have told of it")
    seen = {server: ten.checks[server] for server in servers}
    until(lambda: all(ten.checks[server] >= seen[server] + 3 for server in servers), "several checks")
    for peer_id in absurd:
        assert sorted(told_of(peer_id)) == sorted(servers)
    assert ten.moves()[before:] == []
    fast.kill()


def test_lost_blocks_gap_closes(ten: Ten) -> None:
    # All holders of block 0 at once, without a goodbye.
    for server in [server for server in ten.pool.alive if 0 in where_now(server)]:
        server.kill()
    assert ten.pool.alive
    until(lambda: min(ten.held()) > 0, "the gap is closed")
    assert all(move["reason"] for move in ten.moves())
    until(lambda: min(ten.known()) > 0, "newcomers are told of it")
    with ten.pool.swarm.open_model(AutoDistributedModelForCausalLM, ten.folder) as model:
        ids = torch.tensor([[3, 4, 5]])
        assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4).shape == (1, 7)
