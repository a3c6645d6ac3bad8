"""A server of a mixture that memory is too small for: it leaves experts on the disk, says so, and answers alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.blocks.kernels.library import library
from petalnode.node.errors import MachineError, unwrapped
from petalnode.node.models import resolve
from petalnode.node.server.lifecycle import devices, memory
from petalnode.node.server.lifecycle.memory import MEMORY_SHARES, Memory
from petalnode.node.testing.memory_servers import memory_swarm
from tests.greedy import generate, prompt
from tests.tiny_gguf import BLOCKS, write_model_gguf

needs_kernels = pytest.mark.skipif(
    library() is None, reason="the kernels are not built (make setup, with a C compiler)"
)
OPTIONS = {"dtype": "float32", "kernels": "native", "cache_tokens": 512}


def tokens_of(file: Path, **served: object) -> tuple[torch.Tensor, list[dict[str, object]], tuple[int, int]]:
    """What a server of the whole model says, the events it told, and how many experts it has used and read."""
    with memory_swarm() as swarm:
        server = swarm.start(file, f"0:{BLOCKS}", **OPTIONS | served)
        assert server.ready
        with swarm.open_model(AutoDistributedModelForCausalLM, file) as model:
            found = generate(model, prompt(1, 40), max_new_tokens=6)
        serving = server.tallies.serving
        assert serving is not None
        return found, list(server.events), serving().experts


@needs_kernels
def test_server_with_memory_for_part_of_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    file = write_model_gguf(tmp_path / "mixture.gguf", "qwen3_moe")
    expected, events, (used, read) = tokens_of(file)
    assert used > 0 == read
    assert [event["experts_on_disk"] for event in events if event["event"] == "ready"] == [False]

    folder = resolve(file)
    sizes = block_sizes(folder.path, "float32", "none", "native")
    cache = memory.cache_bytes_per_block(folder.config, 4, 1) * 512 * BLOCKS
    computing = memory.STEP_TOKENS * folder.hidden_size * 4 * MEMORY_SHARES.copies
    for part, fits in ((0.5, True), (0.1, False)):
        free = sum(sizes.held) - int((1 - part) * sum(sizes.experts)) + computing + cache
        monkeypatch.setattr(devices, "device_memory", lambda device, free=free: Memory(free, free))
        if not fits:
            with pytest.raises(MachineError, match="3 blocks of this model take"), unwrapped(MachineError):
                tokens_of(file)
            continue
        found, events, (used, _) = tokens_of(file)
        assert torch.equal(found, expected) and used > 0
        said = [event for event in events if event["event"] == "ready"]
        assert [event["experts_on_disk"] for event in said] == [True]
        assert "stay on the disk, and about 50 % of them in memory" in str(said[0]["count_reason"])
