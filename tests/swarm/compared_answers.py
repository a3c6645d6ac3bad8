"""Answers of chains that are compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from petalnode.node.testing.memory_servers import MemoryServer
from tests.inspection import call, client_of
from tests.swarm.fleet import Model
from tests.tiny_models import VOCABULARY

PROMPT = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(3))


def without_blocks(folder: Path, to: Path) -> Path:
    """What a client needs of a model folder, and no more: the file with the blocks is not there."""
    shutil.copytree(folder, to)
    (file,) = to.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        files = {name: f"{'blocks' if '.layers.' in name else 'ends'}.safetensors" for name in tensors.keys()}  # noqa: SIM118
        ends = {name: tensors.get_tensor(name) for name, file_name in files.items() if file_name == "ends.safetensors"}
    save_file(ends, to / "ends.safetensors", {"format": "pt"})
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    file.unlink()
    return to


def answer(model: Any, count: int = 8) -> list[int]:
    out = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0].tolist()
    return tokens


def set_back(model: Model, *servers: MemoryServer) -> None:
    """Makes others be preferred to these."""

    async def suspect() -> None:
        for server in servers:
            client_of(model).suspect(server.peer_id)

    call(model, suspect)


def banned(model: Model) -> set[str]:
    return {ban.peer_id for ban in client_of(model).swarm.trust.bans()}
