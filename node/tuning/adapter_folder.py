"""An adapter as a folder: peft's format, so that peft loads it, with a note of petalnode's and a model card.

LoRA and soft prompts have equals in peft (LORA, PROMPT_TUNING). Deep prompts have none, so their folder has no file by
the names that peft looks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from ...protocols.ids import Span
from ...protocols.training import LORA_PARTS, PROMPTS, LoraName
from ..client.api.model import DistributedModel
from ..client.api.tuning import LoraTuning, PromptTuning
from ..errors import BadInput
from ..models.adapter import CONFIG, DEEP_PROMPTS, WEIGHTS, Adapter, read_adapter
from ..models.adapter_note import NOTE, AdapterNote
from ..models.cache_dir import disk_errors
from .adapter_files import WRITE_ADVICE, write_files
from .tuned import Tuned, head_of

CARD: Final = "README.md"
_LORA_BASE: Final = "base_model.model."
_BASE: Final = "base_model."
_METHODS: Final = {"prompt": "soft prompts", "deep-prompt": "deep prompts", "lora": "LoRA inside the blocks"}


def save_adapter(folder: Path, tuned: Tuned, note: AdapterNote, card: str) -> None:
    """Writes adapter, note and model card into `folder`; if that fails, what was there before is unchanged.

    Raises:
        MachineError: the disk is full or cannot be written.
    """
    module = tuned.module
    if isinstance(module, LoraTuning):
        tensors = dict(module.peft_state_dict())
    else:
        tensors = {"prompt_embeddings": module.prompt_embeddings.detach()}
        if module.deep_prompts is not None:
            tensors["deep_prompts"] = module.deep_prompts.detach()
    base = _LORA_BASE if isinstance(module, LoraTuning) else _BASE
    tensors |= {f"{base}{name}": weight.detach() for name, weight in head_of(tuned.model).items()}
    tensors = {name: tensor.cpu().float().contiguous() for name, tensor in tensors.items()}
    deep = "deep_prompts" in tensors
    # As bytes, because safetensors' own error for a file that cannot be written is no OSError.
    files = {DEEP_PROMPTS if deep else WEIGHTS: save(tensors, metadata={"format": "pt"})}
    if not deep:
        text = json.dumps(_peft_config(tuned, note), indent=2, sort_keys=True)
        files[CONFIG] = f"{text}\n".encode()
    files |= {NOTE: note.to_bytes(), CARD: card.encode(errors="replace")}
    with disk_errors(folder, "Saving the adapter", WRITE_ADVICE):
        write_files(folder, files)
        for stale in {CONFIG, WEIGHTS, DEEP_PROMPTS} - files.keys():
            (folder / stale).unlink(missing_ok=True)


def _peft_config(tuned: Tuned, note: AdapterNote) -> dict[str, Any]:
    """The fields of peft's LoraConfig or PromptTuningConfig that differ from its defaults."""
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
    return config | {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": module.num_virtual_tokens,
        "token_dim": module.prompt_embeddings.shape[1],
        "num_transformer_submodules": 1,
        "num_attention_heads": tuned.model.config.to_dict().get("num_attention_heads"),  # blocks may have others
        "num_layers": tuned.model.num_blocks,
        "prompt_tuning_init": "RANDOM",
        "modules_to_save": heads or None,
    }


def load_adapter(model: DistributedModel, folder: Path | str) -> PromptTuning | LoraTuning:
    """The adapter in a folder (of `petalnode tune`, or of peft: LORA and PROMPT_TUNING), applied to `model`.

    The result generates, classifies, and can be trained further; only to generate, `from_pretrained(adapter=folder)` is
    enough. The head of a classifier is put into `model`, which must have been opened with as many labels.

    Raises:
        BadInput: the folder is no adapter, is damaged, or does not fit the model.
    """
    adapter = read_adapter(Path(folder))
    adapter.check_model(model.version, model.path.name)
    blocks = Span(0, model.num_blocks)
    adapter.check_fits(blocks, dict(enumerate(model.linears)), model.hidden_size, model.num_blocks)
    _put_head(model, adapter)
    if adapter.soft_prompt is not None:
        prompts = adapter.soft_prompt
        module = PromptTuning(model, len(prompts), deep=bool(adapter.tensors), init=prompts)
        if module.deep_prompts is not None:
            deep = [adapter.tensors[f"{block}.{PROMPTS}"] for block in range(model.num_blocks)]
            module.deep_prompts.data.copy_(torch.stack(deep))
        return module
    names = {name: parsed for name in adapter.tensors if (parsed := LoraName.parse(name)) is not None}
    ranks = {adapter.tensors[name].shape[0] for name, parsed in names.items() if parsed.part == LORA_PARTS[0]}
    if len(ranks) != 1:
        raise BadInput(f"{folder} has the ranks {sorted(ranks)}: with one rank only can it be trained on")
    [rank] = ranks
    tuned = LoraTuning(
        model,
        rank,
        lora_alpha=rank,  # the scaling is in the weights
        target_modules=sorted({parsed.path for parsed in names.values()}),
        layers_to_transform=sorted({parsed.block for parsed in names.values()}),
    )
    tuned.load({parsed: adapter.tensors[name] for name, parsed in names.items()})
    return tuned


@torch.no_grad()
def _put_head(model: DistributedModel, adapter: Adapter) -> None:
    head = head_of(model)
    if adapter.local.keys() != head.keys():
        raise BadInput(
            f"the adapter {adapter.name} has {'a' if adapter.local else 'no'} head of its own: open it with "
            + ("AutoDistributedModelForSequenceClassification" if adapter.local else "AutoDistributedModelForCausalLM")
        )
    for name, weight in head.items():
        given = adapter.local[name]
        if given.shape != weight.shape:
            raise BadInput(
                f"the adapter {adapter.name} tells {len(given)} labels: open it with num_labels={len(given)}"
            )
        weight.copy_(given)


def card_of(note: AdapterNote) -> str:
    """The model card: the hub's metadata and Markdown."""
    results: Mapping[str, Any] = note.results
    peft = note.method != "deep-prompt"
    meta: dict[str, Any] = {"library_name": "peft" if peft else "petalnode"}
    if "/" in note.model:
        meta["base_model"] = note.model.partition("@")[0]
    meta["tags"] = tags_of(note)
    # JSON is YAML, and quotes whatever needs quotes.
    head = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in meta.items())
    lines = [
        f"---\n{head}\n---\n",
        f"# {_METHODS[note.method][0].upper()}{_METHODS[note.method][1:]} for {note.model}\n",
        "Trained over a swarm of machines with petalnode.\n",
        "| | |\n|---|---|",
        f"| method | {_METHODS[note.method]} |",
        f"| base model | {_cell(note.model)} |",
        f"| version of the base model | `{note.model_version}` |",
        f"| task | {note.task} |",
    ]
    if note.labels:
        lines.append(f"| labels | {_cell(', '.join(note.labels))} |")
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in results.items()]
    lines.append("\n## Use\n")
    if note.task == "language":
        lines.append("```\npetalnode chat --adapter FOLDER\n```\n")
    lines.append(f"```python\n{_python(note)}\n```\n")
    if peft:
        lines.append("Plain peft loads it as well: `PeftModel.from_pretrained(model, FOLDER)`.\n")
    else:
        lines.append("Deep prompts (a prefix at every block) have no equal in peft.\n")
    return "\n".join(line for line in lines if line)


def tags_of(note: AdapterNote) -> list[str]:
    """Tags by which the hub's search finds the adapter."""
    tags = ["petalnode", note.method, f"model-version:{note.model_version[:16]}", *note.tags]
    if "/" in note.model:
        tags.append(f"base_model:{note.model.partition('@')[0]}")
    return list(dict.fromkeys(tags))


def _python(note: AdapterNote) -> str:
    kind = "CausalLM" if note.task == "language" else "SequenceClassification"
    labels = f", num_labels={len(note.labels)}" if note.labels else ""
    return (
        f"from petalnode import AutoDistributedModelFor{kind}, load_adapter\n\n"
        f"model = AutoDistributedModelFor{kind}.from_pretrained({note.model!r}, initial_peers=[...]{labels})\n"
        "tuned = load_adapter(model, FOLDER)"
    )


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
