"""What a server counts while it serves a session."""

from __future__ import annotations

from pathlib import Path

import torch

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.testing.memory_servers import memory_swarm


def test_a_server_counts_what_it_computes(models: Path) -> None:
    with memory_swarm() as swarm:
        server = swarm.start(models / "tiny-llama", "0:6", cache_tokens=1000)
        assert server.ready
        tallies = server.tallies
        model = swarm.open_model(AutoDistributedModelForCausalLM, models / "tiny-llama")
        prompt = torch.arange(1, 8)[None]
        with model.inference_session(max_length=50) as session:
            model.generate(prompt, session=session, max_new_tokens=5, do_sample=False)
            assert tallies.serving is not None
            now = tallies.serving()
            assert (now.state, now.sessions, now.cache_free, str(now.span)) == ("online", 1, 950, "0:6")
        assert (tallies.prefill.steps, tallies.prefill.tokens) == (1, 7)
        assert (tallies.decode.steps, tallies.decode.tokens) == (4, 4)
        assert sum(tallies.decode.compute.buckets) == sum(tallies.decode.queue.buckets) == 4
        assert sum(tallies.batch_rows.buckets) == tallies.batch_rows.total == 4
        assert (tallies.sessions_opened, sum(tallies.refusals.values())) == (1, 0)
        model.close()
