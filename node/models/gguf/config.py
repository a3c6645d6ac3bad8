"""The `config.json` that a GGUF file's metadata comes to."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from math import pi
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ...errors import ModelError
from .architectures import ARCHITECTURES, architecture_config, named, rope_scaling_of
from .header import GgufHeader, GgufTensor, read_gguf_header
from .stored import stored_values

# One divisor for each rotary frequency. llama.cpp stores the frequency scaling of Llama 3.1 and its successors so, and
# not the settings it was computed from. transformers does not read that tensor, and the model would fail in long texts:
# the settings are found again, and checked against every divisor.
ROPE_FACTORS: Final = "rope_freqs.weight"
LONGROPE_FACTORS: Final = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""Those of short and long texts (https://arxiv.org/abs/2402.13753), with the fields of a configuration."""
# The only settings that were ever published with this scaling; the factor itself differs from model to model.
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
_TOLERANCE: Final = 1e-4
_LEFT_OUT: Final = (
    (("qwen3_moe",), "expert_feed_forward_length", "moe_intermediate_size"),
    (("qwen3", "qwen3_moe", "llama", "mistral"), "attention.key_length", "head_dim"),
)
"""What transformers does not read of the metadata, by types of model: the key, and the field of the configuration."""
_SCALED_BY_WIDTH: Final = (("gemma2", 46), ("gemma3_text", 62))
"""The models of 27 billion, by their blocks: their attention is scaled otherwise, and files do not say so."""
_BROKEN: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, StopIteration)
"""What comes of a header that lacks keys, or has others than it should; NotImplementedError too."""
_WORDS: Final = "tokenizer.ggml.tokens"
_LEFT_ASIDE: Final = (
    _WORDS,
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "general.alignment",
)
"""What is long, and says nothing of the configuration."""
_UINT32: Final = 4
_INSTEAD: Final = "Use the model's safetensors folder."


def read_gguf_config(files: Sequence[Path]) -> dict[str, Any]:
    """`config.json` as transformers reads it out of the files of a model, before it adds its defaults.

    The defaults are added when the folder is loaded. They grow with every version of transformers, and the
    model version is a hash over what stands here.

    Raises:
        ModelError: transformers cannot read this architecture from GGUF.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file, header = files[0], read_gguf_header(files[0])
    metadata, architecture = header.metadata, header.metadata.get("general.architecture")
    tensors = {tensor.name: (part, tensor) for part in files for tensor in read_gguf_header(part).tensors}
    try:
        if named(header) in ARCHITECTURES:
            config = architecture_config(header, tensors)
        else:
            config = _as_transformers_reads(file, header, tensors)
        if int(config.get("num_hidden_layers", 0)) > len(tensors):
            raise ValueError(f"{config['num_hidden_layers']:,} blocks of {len(tensors):,} tensors")
    except _BROKEN as error:
        raise ModelError(
            f"{file} has architecture {architecture!r}, which transformers cannot read from GGUF ({error}). {_INSTEAD}"
        ) from error
    config.pop("_model_name_or_path", None)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    if name is None:
        raise ModelError(
            f"{file} has architecture {architecture!r}, of which transformers has no decoder-only language model."
        )
    config["architectures"] = [name]
    config["tie_word_embeddings"] = "output.weight" not in tensors  # transformers looks into one part alone
    for model_types, key, name in _LEFT_OUT:
        value = metadata.get(f"{architecture}.{key}")
        if config["model_type"] in model_types and isinstance(value, int):
            config[name] = value
    if ROPE_FACTORS in tensors and config["model_type"] != "gemma4_text":
        try:
            scaling = rope_scaling(stored_values(*tensors[ROPE_FACTORS]).tolist(), config)
        except ValueError as error:
            raise ModelError(f"{file} cannot be used: {error}. {_INSTEAD}") from error
        if scaling is not None:
            config["rope_scaling"] = scaling
    return config


def _as_transformers_reads(
    file: Path, header: GgufHeader, tensors: Mapping[str, tuple[Path, GgufTensor]]
) -> dict[str, Any]:
    """With what it leaves out of scalings and of Phi-3."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with TemporaryDirectory() as scratch:
        short = Path(scratch) / "header.gguf"
        short.write_bytes(_without_vocabulary(file, header))
        config = dict(load_gguf_checkpoint(str(short), return_tensors=False)["config"]) | rope_scaling_of(header)
    if isinstance(words := header.metadata.get(_WORDS), int):
        config.setdefault("vocab_size", words)  # of StarCoder2, which has no key for it
    if (config["model_type"], config.get("num_hidden_layers")) in _SCALED_BY_WIDTH:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    return config | _of_phi3(header.metadata, config, tensors) if config["model_type"] == "phi3" else config


def _of_phi3(
    metadata: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, tuple[Path, GgufTensor]]
) -> dict[str, Any]:
    """The window, the part of a head that turns, and the factors for short and long texts."""
    found, head_dim = dict[str, Any](), config["hidden_size"] // config["num_attention_heads"]
    if metadata.get("phi3.attention.sliding_window"):
        found["sliding_window"] = metadata["phi3.attention.sliding_window"]
    if metadata.get("phi3.rope.dimension_count", head_dim) != head_dim:
        found["partial_rotary_factor"] = metadata["phi3.rope.dimension_count"] / head_dim
    held = {field: tensors[name] for name, field in LONGROPE_FACTORS.items() if name in tensors}
    if held:
        factors = {field: stored_values(*of).tolist() for field, of in held.items()}
        found["rope_scaling"] = {"rope_type": "longrope", **factors}
        found["original_max_position_embeddings"] = metadata["phi3.rope.scaling.original_context_length"]
    return found


def _without_vocabulary(file: Path, header: GgufHeader) -> bytes:
    """A GGUF file with the metadata of `file` and the names of its tensors, each of one number.

    transformers reads every word of a vocabulary to find the settings, which takes seconds. They need its length alone.
    """
    place, words = f"{header.metadata.get('general.architecture')}.vocab_size", header.metadata.get(_WORDS)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        kept = [view[slice(*at)] for key, at in header.places.items() if key not in _LEFT_ASIDE]
    if isinstance(words, int) and place not in header.metadata:
        kept.append(_text(place) + struct.pack("<II", _UINT32, words))
    names = b"".join(_text(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0) for tensor in header.tensors)
    counts = struct.pack("<IQQ", 3, len(header.tensors), len(kept))
    return b"GGUF" + counts + b"".join(kept) + names + bytes(64)  # to the alignment, and one number


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def is_read_anew(header: GgufHeader) -> bool:
    """Whether earlier versions made another configuration of it, or none."""
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture"))
    blocks, kind = metadata.get(f"{architecture}.block_count"), architecture.replace("gemma3", "gemma3_text")
    changed = (kind, blocks) in _SCALED_BY_WIDTH or architecture == "phi3" or named(header) in ARCHITECTURES
    return changed or bool(rope_scaling_of(header))


def rope_scaling(factors: Sequence[float], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of a configuration that gives `factors`, one for each pair of a head's dimensions.

    None if they are all 1, which scales nothing.

    Raises:
        ValueError: if no scaling that transformers knows gives them.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    factor = round(max(factors), 3)
    expected = _llama3(len(factors), float(config.get("rope_theta", 10000.0)), factor)
    if any(abs(found - wanted) > _TOLERANCE * wanted for found, wanted in zip(factors, expected, strict=True)):
        raise ValueError("its rotary frequencies are scaled in a way that is not known here")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _CONTEXT,
    }


def _llama3(count: int, theta: float, factor: float) -> list[float]:
    """The divisors of `count` frequencies: 1 for short waves, `factor` for long ones, smooth in between."""
    divisors = []
    for index in range(count):
        turns = _CONTEXT * theta ** (-index / count) / (2 * pi)  # in the context the model was first trained on
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
