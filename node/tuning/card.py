"""The model card of an adapter: what it is, what it was made of, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..models.adapters.note import AdapterNote

_METHODS = {"prompt": "soft prompts", "deep-prompt": "deep prompts", "lora": "LoRA inside the blocks"}


def card_of(note: AdapterNote) -> str:
    """Markdown with the hub's metadata before it."""
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
    """What the hub's search finds it by."""
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
