"""Heads for the token after the next one, put behind tiny models as checkpoints have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny

_BEHIND: Final = (f"model.layers.{NUM_BLOCKS}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "")
_APART: Final = ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.")
_NAMES: Final = {
    "deepseek_v3": _BEHIND,
    "glm4_moe": _BEHIND,
    "qwen3_next": _APART,
    "qwen3_5": _APART,
    "mimo_v2_flash": ("model.mtp.layers.0.", ("enorm", "hnorm", "eh_proj", "final_layernorm"), ""),
}
"""What stands before a head's tensors, what its own four layers are called, and what stands before its block's."""
HEADS: Final = tuple(_NAMES)
_LIKE: Final = {"mimo_v2_flash": 1}
"""The block of the model whose shapes the head's has; else the last one."""


def save_with_head(architecture: str, folder: Path, *, forgets: bool = False, **fields: Any) -> Path:
    """A tiny model with a random head; `forgets`: each token follows from the one before alone, as the head says."""
    kinds = {"num_nextn_predict_layers": 1} if _NAMES[architecture] is _BEHIND else {}
    file = save_tiny(architecture, folder, **kinds, **fields) / "model.safetensors"
    tensors = load_file(file)
    place, (enorm, hnorm, project, norm), inner = _NAMES[architecture]
    like = f"model.layers.{_LIKE.get(architecture, NUM_BLOCKS - 1)}."
    made = torch.Generator().manual_seed(1)
    head = {inner + key.removeprefix(like): tensors[key].roll(1, 0) for key in tensors if key.startswith(like)}
    for name in (enorm, hnorm, norm):
        head[f"{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=made)
    head[f"{project}.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=made)
    if forgets:
        head[f"{project}.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
        head[f"{enorm}.weight"] = torch.full((HIDDEN,), 0.0 if "qwen3" in architecture else 1.0)
        head[f"{norm}.weight"] = tensors["model.norm.weight"].clone()
    tensors |= {place + name: tensor for name, tensor in head.items()}
    if forgets:
        for key in tensors:
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                tensors[key] = torch.zeros_like(tensors[key])
    save_file(tensors, file, {"format": "pt"})
    return folder
