"""The state of a training in one safetensors file, which is replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import BadInput
from ..models.cache_dir import disk_errors
from .progress import EarlyStop

CHECKPOINT: Final = "checkpoint.safetensors"
FORMAT: Final = 1
_FIELD: Final = "petalnode"


@dataclass(frozen=True)
class Checkpoint:
    """
    Attributes:
        recipe: what has to be the same for the training to be resumed.
        step: steps done.
        evaluated: the steps that were done at the last evaluation.
        early_stop: state of early stopping.
        loss: of the last step.
        weights: the trained weights.
        optimiser: its state, "weight/entry" -> tensor.
        best: the weights of the best evaluation; empty without one.
    """

    recipe: Mapping[str, Any]
    step: int
    evaluated: int
    early_stop: EarlyStop
    loss: float
    weights: Mapping[str, torch.Tensor]
    optimiser: Mapping[str, torch.Tensor]
    best: Mapping[str, torch.Tensor]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes it into `folder`, over an earlier one.

    Raises:
        MachineError: the disk is full or cannot be written.
    """
    about = {
        "format": FORMAT,
        "recipe": checkpoint.recipe,
        "step": checkpoint.step,
        "evaluated": checkpoint.evaluated,
        "early_stop": asdict(checkpoint.early_stop),
        "loss": checkpoint.loss,
    }
    tensors = {
        f"{kind}/{name}": tensor.contiguous()
        for kind, held in (
            ("weights", checkpoint.weights),
            ("optimiser", checkpoint.optimiser),
            ("best", checkpoint.best),
        )
        for name, tensor in held.items()
    }
    target = folder / CHECKPOINT
    with disk_errors(folder, "Saving a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, unfinished, metadata={_FIELD: json.dumps(about)})
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def load_checkpoint(folder: Path) -> Checkpoint:
    """
    Raises:
        BadInput: there is none, or it is damaged.
    """
    file = folder / CHECKPOINT
    if not file.is_file():
        raise BadInput(f"there is no {file} to go on from: start without --resume")
    held: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "optimiser": {}, "best": {}}
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[_FIELD])
            if about["format"] != FORMAT:
                raise BadInput(f"{file} was written by another version of petalnode: go on with that one")
            for key in opened.keys():  # noqa: SIM118  (it is no dictionary)
                kind, _, name = key.partition("/")
                held[kind][name] = opened.get_tensor(key)
        return Checkpoint(
            recipe=dict(about["recipe"]),
            step=int(about["step"]),
            evaluated=int(about["evaluated"]),
            early_stop=EarlyStop(**about["early_stop"]),
            loss=float(about["loss"]),
            **held,
        )
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} is damaged ({error}): remove it and start without --resume") from None


def differences(recipe: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """The fields that differ, as "name: was X, is Y"."""
    return [
        f"{name}: was {json.dumps(checkpoint.get(name))}, is {json.dumps(recipe.get(name))}"
        for name in sorted({*recipe, *checkpoint})
        if recipe.get(name) != checkpoint.get(name)
    ]
