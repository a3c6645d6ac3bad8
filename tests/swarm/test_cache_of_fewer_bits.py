"""Servers that hold keys and values in eight bits: what they say of themselves, and a session that loses one."""

from __future__ import annotations

from pathlib import Path

import torch

from petalnode.node.blocks.span import load_span
from petalnode.node.client.session.stream import SessionSpec
from petalnode.protocols.ids import Span
from tests.swarm.memory_client import a_client, hidden, step
from tests.swarm.memory_pool import MemoryPool, serving
from tests.tiny_models import NUM_BLOCKS

SPEC = SessionSpec(b"", Span(0, NUM_BLOCKS), batch=1, max_length=64)


async def test_session_goes_on_at_another_server_of_kind(pool: MemoryPool, models: Path, folder: Path) -> None:
    prompt, asked = hidden(20), [hidden(1, seed) for seed in range(1, 5)]
    computed = {}
    for quantisation in ("none", "none/cache=int8"):
        blocks = load_span(folder, SPEC.span, dtype="float32", device="cpu", quantisation=quantisation)
        cache = blocks.make_cache(1, 64)
        outputs = [blocks.forward(states, cache) for states in (prompt, *asked)]
        computed[quantisation] = torch.cat(outputs, dim=1)
        per_token = blocks.cache_bytes_per_token
    exact, expected = computed.values()
    servers = await serving(pool.swarm, folder, "0:6", "0:6", dtype="float32", cache_dtype="int8")
    for server in servers:
        assert server.ready["quantisation"] == "none/cache=int8"
        assert (server.ready["cache_dtype"], server.ready["cache_bytes_per_token"]) == ("int8", per_token)
    answered = []
    async with a_client(pool, models, None) as client:
        assert {server.quantisation for server in client.servers()} == {"none/cache=int8"}
        async with client.session(SPEC) as session:
            for states in (prompt, *asked[:2]):
                answered.append(await step(session, states))
            used = {hop.peer_id for hop in session.route}
            next(server for server in servers if server.peer_id in used).kill()
            for states in asked[2:]:
                answered.append(await step(session, states))
            assert not used & {hop.peer_id for hop in session.route}
    # The other server has computed what came before as one prompt: a last bit may have rounded a value otherwise.
    wrong, rounding = torch.cat(answered, dim=1) - expected, expected - exact
    assert float(wrong.norm()) < 0.3 * float(rounding.norm())
