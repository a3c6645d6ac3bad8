"""Plain transformers for benchmarks: without its messages, and over a model folder, to compare with. The weights of a
GGUF file are opened to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from petalnode.node.blocks.architecture import open_skeleton
from petalnode.node.blocks.skeleton import fill
from petalnode.node.models import Checkpoint


def quiet_torch(threads: int | None = 1) -> None:
    """transformers says nothing, and torch computes with so many threads; None leaves them."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def plain_model(folder: Path | str, dtype: str = "auto") -> Any:
    """The whole model, as `AutoModelForCausalLM.from_pretrained` gives it."""
    path = Path(folder)
    skeleton = open_skeleton(path, dtype)
    with Checkpoint(path, skeleton.num_blocks) as weights:
        fill(skeleton, weights, lambda block: True, torch.device("cpu"))
    if (path / "generation_config.json").is_file():
        skeleton.model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return skeleton.model.eval()
