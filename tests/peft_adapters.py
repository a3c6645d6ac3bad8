"""Random adapters as plain peft makes and saves them, and plain peft to compare with."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch

from petalnode.node.blocks.quantisation.matrix import bitsandbytes
from tests.tiny_models import load_whole

bitsandbytes()  # peft imports it as well, and torch's compiler with it: two seconds
peft: Any = importlib.import_module("peft")
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "bloom": ["query_key_value", "dense_4h_to_h"],
    "mixtral": ["q_proj", "o_proj"],
    "gemma3": ["q_proj", "v_proj", "gate_proj"],
    "falcon": ["query_key_value", "dense"],
}


def save_lora(model: Path, folder: Path, targets: list[str] | str, seed: int = 0, **options: Any) -> Path:
    """A LoRA adapter of rank 4 for the model in `model`, with random weights, saved by peft in `folder`."""
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out
        tuned = peft.get_peft_model(load_whole(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(folder)
    return folder


def save_prompt(model: Path, folder: Path, tokens: int = 5, seed: int = 0) -> Path:
    """A soft prompt for the model in `model`, with random embeddings, saved by peft in `folder`."""
    config = peft.PromptTuningConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(load_whole(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.prompt_encoder.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(folder)
    return folder


def load_with(model: Path, adapter: Path) -> Any:
    """The whole model in plain transformers, changed by plain peft."""
    return peft.PeftModel.from_pretrained(load_whole(model), str(adapter)).eval()
