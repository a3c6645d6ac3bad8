"""The configuration of a model folder, and the choice of device and dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from ..errors import BadInput, MachineError, ModelError, reason_of
from ..models.folder import read_config as read_raw_config
from ..models.folder import scheme_of

_PLAIN_HEADS: Final = frozenset({"aya_vision", "cohere2_vision"})
"""Models with pictures whose head is that of their language part without what this does to logits behind it."""
_DEEPSTACK: Final = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""Models whose first blocks add features of pictures."""
_ENCODERS: Final = frozenset(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    )
)
"""Those that are decoders where the configuration says so."""
_REFUSED: Final = {
    "roformer": "feeds positions to every block, which a server makes otherwise",
    "whisper": "answers otherwise than in transformers where rows are padded",
}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the language model in `folder`. Never runs code that the folder brings along.

    Of a model that also takes pictures or sound it is the language part.

    Raises:
        ModelError: no config.json, not JSON, an architecture that transformers does not know, or weights that
            are stored quantised.
    """
    raw = read_raw_config(folder)
    path = folder / "config.json"
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{path} names no model_type, so it is not the configuration of a model")
    scheme = scheme_of(folder, raw)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text: PreTrainedConfig = config.get_text_config(decoder=True)
    except Exception as error:  # a config.json may break transformers in any way
        raise ModelError(f"{path} cannot be used ({reason_of(error)})") from error
    if text.dtype is None:
        text.dtype = config.dtype
    for part in (config, text):  # what is built has plain matrices, into which stored ones are opened
        vars(part).pop("quantization_config", None)
    if scheme is not None and scheme.integers:
        text.dtype = torch.float32  # in which each value is exact, and the kernels keep its bits
    # The head is that of the whole model, whose configuration says whether it is the embeddings.
    if getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True
    text.deepstack_blocks = deepstack_of(config)
    if config.model_type in _PLAIN_HEADS:
        text.logit_scale = 1.0
    if not getattr(text, "is_encoder_decoder", False) and isinstance(getattr(text, "decoder_layers", None), int):
        text.num_hidden_layers = text.decoder_layers  # BART and its kin mean their encoder by it
    return text


def deepstack_of(whole: PreTrainedConfig) -> int:
    """How many of the first blocks of a model with pictures add features of these (DeepStack, arXiv 2406.04334)."""
    if whole.model_type not in _DEEPSTACK:
        return 0
    return len(whole.vision_config.deepstack_visual_indexes)


def deepstack(config: PreTrainedConfig) -> int:
    """The same by the configuration of the language part, as `read_config` has it."""
    return int(getattr(config, "deepstack_blocks", 0))


def original_length(config: PreTrainedConfig) -> int | None:
    """The length up to which texts take the short factors of a model with longrope (arXiv 2402.13753); all tokens of a
    longer text take the long ones. None for models without.

    Raises:
        ModelError: its layers differ in that.
    """
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    lengths = {int(part["original_max_position_embeddings"]) for part in parts if part.get("rope_type") == "longrope"}
    if len(lengths) > 1:
        raise ModelError(
            f"layers of this {config.model_type!r} model take the factors of long texts from different lengths on: "
            "petalnode cannot serve it"
        )
    return next(iter(lengths), None)


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


def choose_dtype(dtype: str, config: PreTrainedConfig) -> torch.dtype:
    """`auto` is what the configuration says the checkpoint was saved in, float32 if it does not say.

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
    return said if said in _DTYPES.values() else torch.float32


def refuse_outside_inputs(config: PreTrainedConfig) -> None:
    """
    Raises:
        ModelError: its blocks read more than hidden states, so that a server that sees nothing else cannot run them.
    """
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError(
            f"in this {config.model_type!r} model all tokens of a prompt see each other, so that none can be gone on "
            "with: petalnode cannot serve it"
        )
    if config.model_type in _REFUSED:
        raise ModelError(f"{config.model_type!r} {_REFUSED[config.model_type]}: petalnode cannot serve it")
    if getattr(config, "is_decoder", None) is False and config.model_type in _ENCODERS:
        raise ModelError(
            f"this {config.model_type!r} model is an encoder, in which tokens see those behind them (is_decoder is "
            "false): petalnode serves decoder-only models"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelError(f"{config.model_type!r} has cross-attention: petalnode serves decoder-only models")
