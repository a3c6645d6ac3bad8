"""Swarms with a server under suspicion, and rounds of a validator over them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.chat import Text
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm
from petalnode.node.validator import prober
from petalnode.node.validator.history import History
from petalnode.node.validator.probe_inputs import ProbeModel
from petalnode.node.validator.service import Validator, ValidatorOptions
from petalnode.node.verification.verdicts import Judge, Verdict
from tests.swarm.false_blocks import load_now
from tests.swarm.faulty_server import ordered
from tests.swarm.server_pool import PooledServer


@dataclass(frozen=True)
class SuspectSwarm:
    """tiny-llama over an honest server and one that does what `control` says."""

    folder: Path
    control: Path
    honest: PooledServer | MemoryServer
    suspect: PooledServer | MemoryServer
    peer: str = ""
    memory: MemorySwarm | None = None


def validated(swarm: SuspectSwarm, file: Path, seed: int = 4, evidence: Path | None = None) -> dict[str, Verdict]:
    """One round, by peer id."""
    memory = swarm.memory
    assert memory is not None
    load_now(swarm.control, ordered(swarm.control).get("blocks", ""))

    async def run() -> list[Verdict]:
        folder = resolve(str(swarm.folder), need="all")
        config = SwarmConfig(identity=Identity.generate())
        async with memory.network.open_swarm(config) as own_node:
            model = await identify_model(own_node, folder)
            probe_model = ProbeModel(model, load_client(folder.path, device="cpu"), Text(folder))
            with History(file) as history:
                validator = Validator(
                    own_node,
                    ValidatorOptions(
                        config=config,
                        model=probe_model,
                        judge=Judge(folder.path),
                        history=history,
                        on_verdict=lambda verdict: None,
                        evidence_dir=evidence,
                        accuser=Identity.generate(),
                        random=Random(seed),
                    ),
                )
                return await validator.once()

    with patch.object(prober, "open_swarm", memory.network.open_swarm):
        return {verdict.peer_id: verdict for verdict in memory.call(run)}
