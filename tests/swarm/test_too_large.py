"""Servers that were asked for more than the machine's memory: refused with what would fit, before weights are read."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from petalnode.node.errors import BadInput, MachineError, unwrapped
from petalnode.node.models.cache_dir import cache_dir
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from tests.swarm.processes import environment, petalnode, run_to_end
from tests.tiny_gguf import write_sparse_gguf, write_tiny_gguf
from tests.tiny_models import save_tiny

BLOCKS = 80
TIB = 1 << 40


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with memory_swarm() as opened:
        yield opened


def save_sparse(folder: Path, intermediate_size: int, hidden_size: int = 16384, blocks: int = BLOCKS) -> Path:
    """A model whose weights are a hole in a file: its size is that of a real one, and nothing is written."""
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=blocks,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128, dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    entries, end = {}, 0
    for name, weight in model.state_dict().items():
        start, end = end, end + 4 * math.prod(weight.shape)
        entries[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    return folder


def test_more_blocks_than_memory_are_refused_early(swarm: MemorySwarm, tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "model", 131072)
    assert os.stat(folder / "model.safetensors").st_size > 2 * TIB
    for blocks, options in (("0:80", {}), (None, {"num_blocks": 80}), ("0:80", {"quant": "nf4"})):
        server = swarm.start(folder, blocks, **options | {"cache_tokens": None})
        says = r"80 blocks of this model take .* are free: (at most|not even)"
        with pytest.raises(MachineError, match=says), unwrapped(MachineError):
            assert server.ready
    assert not (cache_dir() / "hashes").exists() or not any(
        str(folder) in file.read_text() for file in (cache_dir() / "hashes").glob("*")
    )


@pytest.mark.parametrize("blocks", ["0:6", None])
def test_a_cache_larger_than_memory_is_refused(swarm: MemorySwarm, tmp_path: Path, blocks: str | None) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    server = swarm.start(folder, blocks, cache_tokens=10**12)
    says = r"cache-tokens \d+ (takes .* at most \d+ tokens fit|is the most that fits)"
    with pytest.raises(MachineError, match=says), unwrapped(MachineError):
        assert server.ready


def test_a_gguf_file_is_refused_by_its_header(
    swarm: MemorySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its blocks, or by the cache that was asked for; its weights are not read."""
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf")
    large = write_sparse_gguf(tmp_path / "large.gguf", BLOCKS, 16384, 131072)
    assert os.stat(large).st_size > TIB
    for file, cache_tokens, says in (
        (tiny, 10**12, "cache-tokens .* at most"),
        (large, None, "80 blocks of this model take"),
    ):
        server = swarm.start(file, "0:3" if file == tiny else "0:80", cache_tokens=cache_tokens)
        with pytest.raises(MachineError, match=says), unwrapped(MachineError):
            assert server.ready
        assert not (cache_dir() / "hashes").exists()
    server = swarm.start(large, "0:81")
    with pytest.raises(BadInput, match="large has 80 blocks"), unwrapped(BadInput):
        assert server.ready


def test_the_command_says_it_in_a_line(home: Path, tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "model", 131072)
    outcome = petalnode(
        "serve", str(folder), "--blocks", "0:80", "--new-swarm", "--listen", "/ip4/127.0.0.1/tcp/0",
        env=environment(home),
    )  # fmt: skip
    assert outcome.code == 4, outcome
    assert "Traceback" not in outcome.err, outcome
    assert [line for line in outcome.err.splitlines() if line.startswith("petalnode: 80 blocks of this model take")]


_LOAD = """
import resource, sys
from pathlib import Path
import psutil
from petalnode.node.blocks.span import load_span
from petalnode.node.errors import MachineError
from petalnode.protocols.ids import Span
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30),) * 2)
try:
    load_span(Path(sys.argv[1]), Span(0, 2), device="cpu", dtype=sys.argv[2])
except MachineError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_failures_while_loading_are_said_too(home: Path, tmp_path: Path, dtype: str) -> None:
    """Mapped as they are, or converted: other programs may have taken the memory meanwhile."""
    folder = save_sparse(tmp_path / "model", 65536, blocks=2)
    outcome = run_to_end([sys.executable, "-c", _LOAD, str(folder), dtype], environment(home))
    assert outcome.code == 0, outcome
    assert "takes more memory than can be had" in outcome.out, outcome
