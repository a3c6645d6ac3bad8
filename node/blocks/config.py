"""What a model folder says of its architecture, and on what it shall be computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from ..errors import BadInput, MachineError, ModelError
from .weights import Weights

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the text model in `folder`. Never runs code that the folder brings along.

    Raises:
        ModelError: no config.json, not JSON, an architecture that transformers does not know, or weights that
            are stored quantised.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is no model folder: it has no config.json")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict) or not raw.get("model_type"):
        raise ModelError(f"{path} names no model_type, so it is not the configuration of a model")
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "some method")
        raise ModelError(
            f"{folder} holds weights quantised by {method}, which petalnode does not load: take the unquantised model"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config.json may break transformers in any way
        raise ModelError(f"{path} cannot be used ({_first_line(error)})") from error
    return config


def choose_device(device: str) -> torch.device:
    """`auto` is the best that there is: cuda, then mps, then cpu.

    Raises:
        BadInput: no such device name.
        MachineError: this machine has no such device.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"{device!r} is no device: use auto, cpu, mps, cuda or cuda:N") from error
    missing = {
        "cuda": not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count(),
        "mps": not torch.backends.mps.is_available(),
        "cpu": False,
    }
    if chosen.type not in missing:
        raise BadInput(f"{device!r} is no device that petalnode uses: use auto, cpu, mps, cuda or cuda:N")
    if missing[chosen.type]:
        raise MachineError(f"this machine has no device {device!r}: use --device auto or cpu")
    return chosen


def choose_dtype(dtype: str, config: PreTrainedConfig, weights: Weights) -> torch.dtype:
    """`auto` is what the checkpoint says it was saved in, else what its first tensor is stored in.

    Raises:
        BadInput: no such dtype.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise BadInput(f"{dtype!r} is no dtype to compute in: use auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    said = config.dtype
    if isinstance(said, str):
        said = _DTYPES.get(said.removeprefix("torch."))
    if isinstance(said, torch.dtype) and said in _DTYPES.values():
        return said
    return _SAFETENSORS_DTYPES.get(weights.first_dtype() or "F32", torch.float32)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
