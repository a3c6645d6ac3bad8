"""What was trained as a folder: peft's own format, so that peft loads it, with a note of ours beside it.

LoRA and soft prompts have equals in peft (LORA, PROMPT_TUNING). Deep prompts have none, and their folder no file by the
names that peft looks for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..client.lora import LoraTuning
from ..client.model import DistributedModel
from ..client.tuning import PromptTuning
from ..errors import BadInput
from ..models.adapter_note import AdapterNote, read_note
from ..models.cache_dir import disk_errors
from .tuned import Tuned, head_of

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
DEEP_PROMPTS: Final = "deep_prompts.safetensors"
CARD: Final = "README.md"
_LORA_BASE: Final = "base_model.model."
_BASE: Final = "base_model."
_MAX_BYTES: Final = 4 << 30


def save_adapter(folder: Path, tuned: Tuned, note: AdapterNote, card: str) -> None:
    """Writes adapter, note and model card into `folder`.

    Raises:
        MachineError: the disk is full or cannot be written.
    """
    module = tuned.module
    with disk_errors(folder, "Saving the adapter"):
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(module, LoraTuning):
            tensors = dict(module.peft_state_dict())
        else:
            tensors = {"prompt_embeddings": module.prompt_embeddings.detach()}
            if module.deep_prompts is not None:
                tensors["deep_prompts"] = module.deep_prompts.detach()
        base = _LORA_BASE if isinstance(module, LoraTuning) else _BASE
        tensors |= {f"{base}{name}": each.detach() for name, each in head_of(tuned.model).items()}
        tensors = {name: each.cpu().float().contiguous() for name, each in tensors.items()}
        deep = "deep_prompts" in tensors
        for stale in (PEFT_CONFIG, PEFT_WEIGHTS, DEEP_PROMPTS):
            (folder / stale).unlink(missing_ok=True)
        save_file(tensors, folder / (DEEP_PROMPTS if deep else PEFT_WEIGHTS), metadata={"format": "pt"})
        if not deep:
            text = json.dumps(_peft_config(tuned, note), indent=2, sort_keys=True)
            (folder / PEFT_CONFIG).write_text(text + "\n", encoding="utf-8")
        note.write(folder)
        (folder / CARD).write_text(card, encoding="utf-8")


def _peft_config(tuned: Tuned, note: AdapterNote) -> dict[str, Any]:
    """The fields of peft's LoraConfig or PromptTuningConfig that differ from what it takes by itself."""
    module = tuned.module
    classifies = note.task == "classification"
    heads = sorted({name.partition(".")[0] for name in head_of(tuned.model)})
    config: dict[str, Any] = {
        "base_model_name_or_path": note.model,
        "inference_mode": True,
        "task_type": "SEQ_CLS" if classifies else "CAUSAL_LM",
    }
    if isinstance(module, LoraTuning):
        numbers = module.block_numbers
        return config | {
            "peft_type": "LORA",
            "r": module.r,
            "lora_alpha": module.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(module.target_modules),
            "layers_to_transform": None if len(numbers) == tuned.model.num_blocks else numbers,
            "layers_pattern": None,
            "modules_to_save": heads or None,
        }
    config_of = tuned.model.config
    return config | {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": module.num_virtual_tokens,
        "token_dim": module.prompt_embeddings.shape[1],
        "num_transformer_submodules": 1,
        "num_attention_heads": getattr(config_of, "num_attention_heads", None),
        "num_layers": tuned.model.num_blocks,
        "prompt_tuning_init": "RANDOM",
        "modules_to_save": heads or None,
    }


def load_adapter(model: DistributedModel, folder: Path | str) -> PromptTuning | LoraTuning:
    """What is in an adapter folder (of `petalnode tune`, or of peft: LORA and PROMPT_TUNING), on `model`.

    What comes back generates, classifies, or is trained on. The head of a classifier is put into `model`, which must
    have been opened with as many labels.

    Raises:
        BadInput: it is no such folder, is damaged, belongs to another version of the model, or needs what is not there.
    """
    path = Path(folder)
    note = read_note(path)
    version = model.version.hex()
    if note is not None and note.model_version != version:
        raise BadInput(
            f"{path} was trained on version {note.model_version[:12]} of {note.model}, and this is version "
            f"{version[:12]} of {model.path.name}: open the model that it belongs to"
        )
    if note is not None and note.method == "deep-prompt":
        tensors = _read_tensors(path / DEEP_PROMPTS)
        module = _prompts(model, tensors, path)
        _load_head(model, tensors, _BASE, path)
        return module
    config = _read_config(path)
    kind = config.get("peft_type")
    tensors = _read_tensors(path / PEFT_WEIGHTS)
    if kind == "PROMPT_TUNING":
        module = _prompts(model, tensors, path)
        _load_head(model, tensors, _BASE, path)
        return module
    if kind != "LORA":
        raise BadInput(f"{path} is a {kind} adapter: LORA and PROMPT_TUNING can be loaded")
    tuned = _lora(model, config, tensors, path)
    _load_head(model, tensors, _LORA_BASE, path)
    return tuned


def _prompts(model: DistributedModel, tensors: dict[str, torch.Tensor], path: Path) -> PromptTuning:
    prompts = tensors.pop("prompt_embeddings", None)
    deep = tensors.pop("deep_prompts", None)
    if prompts is None or prompts.dim() != 2:
        raise BadInput(f"{path} holds no prompt_embeddings [tokens, embedding size]: save it again")
    module = PromptTuning(model, len(prompts), deep=deep is not None, init=prompts)
    if deep is not None and module.deep_prompts is not None:
        if deep.shape != module.deep_prompts.shape:
            raise BadInput(f"the deep prompts in {path} have shape {list(deep.shape)}: they are of another model")
        module.deep_prompts.data.copy_(deep)
    return module


def _lora(model: DistributedModel, config: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path) -> LoraTuning:
    wrong = [name for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if config.get(name)]
    if wrong or config.get("bias", "none") != "none":
        raise BadInput(f"{path} uses {', '.join(wrong) or 'bias'} of peft's LoRA, which the swarm does not do")
    names = [name for name in tensors if ".lora_" in name]
    pattern = re.compile(re.escape(f"{_LORA_BASE}{model.blocks_path}.") + r"(\d+)\.(.+)\.lora_[AB]\.weight")
    found = [match for name in names if (match := pattern.fullmatch(name)) is not None]
    if not found or len(found) != len(names):
        raise BadInput(f"{path} changes layers outside the blocks of this model, or none: that cannot be loaded")
    try:
        tuned = LoraTuning(
            model,
            int(config["r"]),
            lora_alpha=float(config["lora_alpha"]),
            target_modules=sorted({match[2] for match in found}),
            layers_to_transform=sorted({int(match[1]) for match in found}),
        )
        tuned.load_peft_state_dict({name: tensors.pop(name) for name in names})
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} does not fit this model: {error}") from None
    return tuned


@torch.no_grad()
def _load_head(model: DistributedModel, tensors: dict[str, torch.Tensor], base: str, path: Path) -> None:
    head = head_of(model)
    if {name.removeprefix(base) for name in tensors} != set(head):
        raise BadInput(
            f"{path} has {', '.join(sorted(tensors)) or 'no weights'} for a head, and the model wants "
            f"{', '.join(sorted(head)) or 'none'}: open it as a "
            + ("classifier" if tensors else "language model" if head else "model of that kind")
        )
    for name, weight in head.items():
        given = tensors[base + name]
        if given.shape != weight.shape:
            raise BadInput(f"{path} knows {given.shape[0]} labels: open the model with num_labels={given.shape[0]}")
        weight.copy_(given)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / PEFT_CONFIG
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} is no adapter: it has no {PEFT_CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {file}: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{file} is no configuration of an adapter")
    return config


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise BadInput(f"{file} is larger than {_MAX_BYTES >> 30} GiB: that is no adapter")
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise BadInput(f"there is no {file}: adapters are read from safetensors only, not from pickles") from None
    except (SafetensorError, OSError) as error:
        raise BadInput(f"cannot read {file}: {error}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadInput(f"{file}: {name} holds NaN or infinity")
    return tensors
