"""A client of a swarm in memory, and steps of its sessions."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.client.chunks import from_chunks, to_chunks
from petalnode.node.client.core import open_client
from petalnode.node.client.session.session import ClientSession
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models import resolve
from petalnode.node.swarm.config import SwarmConfig
from tests.swarm.memory_pool import MemoryPool
from tests.tiny_models import HIDDEN


@asynccontextmanager
async def a_client(pool: MemoryPool, models: Path, identity: Identity | None) -> Any:
    folder, config = resolve(str(models / "tiny-llama")), SwarmConfig(identity or Identity.generate())
    with trio.fail_after(100):
        async with pool.swarm.network.open_swarm(config) as node:
            model = await identify_model(node, folder)
            async with open_client(node, model) as client:
                yield client


def hidden(tokens: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


async def step(session: ClientSession, states: torch.Tensor, reorder: tuple[int, ...] = (), size: int = 64) -> Any:
    return from_chunks(await session.step(to_chunks(states, "none", size), reorder))
