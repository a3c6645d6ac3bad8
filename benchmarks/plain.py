"""Plain transformers over a model folder, to compare with; the weights of a GGUF file are opened to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from petalnode.node.blocks.architecture import open_skeleton
from petalnode.node.blocks.skeleton import fill
from petalnode.node.models import Checkpoint


def plain_model(folder: Path | str, dtype: str = "auto") -> Any:
    """The whole model, as `AutoModelForCausalLM.from_pretrained` gives it."""
    path = Path(folder)
    skeleton = open_skeleton(path, dtype)
    with Checkpoint(path, skeleton.num_blocks) as weights:
        fill(skeleton, weights, lambda block: True, torch.device("cpu"))
    if (path / "generation_config.json").is_file():
        skeleton.model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return skeleton.model.eval()
