"""Architectures of llama.cpp that transformers builds and does not read out of GGUF files: their configurations.

One table of names: by llama.cpp's name of an architecture that of transformers, and where the fields of a configuration
stand in the metadata. Where their weights are is in `placement`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .header import GgufHeader

_COMMON: Final = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "intermediate_size": "feed_forward_length",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_TOKENS: Final = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_GRANITE: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_EXPERTS: Final = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_ROUTED: Final = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_LINEAR: Final = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_COHERE: Final = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
_BY_MEAN: Final = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
_NO_GROUPS: Final = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        model_type: transformers' name.
        fields: of the configuration, with the keys of the metadata that hold them.
        fixed: fields that no key holds, or those of files that lack the key.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "bloom": Architecture("bloom", _BY_MEAN),
    "command-r": Architecture("cohere", _COHERE),
    "cohere2": Architecture("cohere2", {**_COHERE, "sliding_window": "attention.sliding_window"}),
    "deepseek2": Architecture(
        "deepseek_v3",
        {
            **_ROUTED,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
        },
        {"q_lora_rank": None, **_NO_GROUPS, "routed_scaling_factor": 1.0},
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        {"moe_num_shared_experts": 0},
    ),
    "falcon": Architecture("falcon", {**_BY_MEAN, "num_kv_heads": "attention.head_count_kv"}),
    "gemma": Architecture("gemma"),
    "gemma4": Architecture(
        "gemma4_text",
        {
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        {"hidden_size_per_layer_input": 0},
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", _ROUTED, {**_NO_GROUPS, "routed_scaling_factor": 1.0}),
    "gpt2": Architecture("gpt2", {**_BY_MEAN, "n_inner": "feed_forward_length"}),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "granite": Architecture("granite", _GRANITE),
    "granitemoe": Architecture(
        "granitemoe",
        {
            **_GRANITE,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "minimax-m2": Architecture(
        "minimax_m2", {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    ),
    "mistral3": Architecture("ministral3"),
    "mixtral": Architecture(
        "mixtral", {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    ),
    "olmo2": Architecture("olmo2"),
    "qwen2moe": Architecture("qwen2_moe", _EXPERTS),
    "qwen35": Architecture("qwen3_5_text", _LINEAR),
    "qwen35moe": Architecture("qwen3_5_moe_text", {**_LINEAR, **_EXPERTS}),
    "qwen3next": Architecture("qwen3_next", {**_LINEAR, **_EXPERTS}, {"norm_topk_prob": True}),
    "seed_oss": Architecture("seed_oss", {}, {"attention_bias": True}),
    "smollm3": Architecture("smollm3"),
}
"""By llama.cpp's name; "mixtral" is a "llama" with experts."""


def named(header: GgufHeader) -> str:
    """The architecture that a file with this header is of, a key of `ARCHITECTURES` or another one of llama.cpp's."""
    said = str(header.metadata.get("general.architecture"))
    return "mixtral" if said == "llama" and header.metadata.get("llama.expert_count") else said


def architecture_config(header: GgufHeader, tensors: Collection[str]) -> dict[str, Any]:
    """`config.json` of an architecture in `ARCHITECTURES`.

    Args:
        tensors: the names of those in all files of the model.

    Raises:
        KeyError: the metadata lacks what no model of this architecture is without.
    """
    metadata = _Metadata(header)
    known = ARCHITECTURES[named(header)]
    keys = {**_COMMON, **known.fields}
    found = {name: value for name, key in keys.items() if (value := metadata.get(key)) is not None}
    config: dict[str, Any] = {**known.fixed, **found, "model_type": known.model_type}
    config["num_hidden_layers"] = metadata["block_count"] - (metadata.get("nextn_predict_layers") or 0)
    config["vocab_size"] = header.metadata.get("tokenizer.ggml.tokens") or metadata["vocab_size"]
    config |= {name: header.metadata.get(key) for name, key in _TOKENS.items()}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if known.model_type not in ("gemma4_text", "deepseek_v3"):
        config |= _rotary(metadata, config["head_dim"])
        config |= rope_scaling_of(header)
    config |= _special(named(header), metadata, config, tensors)
    # ALiBi takes any position, whatever llama.cpp's limit; Falcon computes the other one, which cannot be set.
    config.pop({"bloom": "max_position_embeddings", "falcon": "head_dim"}.get(known.model_type, ""), None)
    return config


class _Metadata:
    """The values of a header by the names of keys behind the architecture's; arrays of numbers as tuples."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._prefix = str(header.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        whole = f"{self._prefix}.{key}"
        return self.header.arrays.get(whole, self.header.metadata.get(whole))

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(f"{self._prefix}.{key}")
        return value


def _rotary(metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    turned = metadata.get("rope.dimension_count")
    return {} if turned in (None, head_dim) else {"partial_rotary_factor": turned / head_dim}


def rope_scaling_of(header: GgufHeader) -> dict[str, Any]:
    """The field `rope_scaling`, if the metadata has one that scales."""
    metadata = _Metadata(header)
    kind, factor = metadata.get("rope.scaling.type"), metadata.get("rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor in (None, 0.0, 1.0):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata["rope.scaling.original_context_length"]
        scaling["beta_fast"] = metadata.get("rope.scaling.yarn_beta_fast") or 32.0
        scaling["beta_slow"] = metadata.get("rope.scaling.yarn_beta_slow") or 1.0
        if metadata.get("rope.scaling.yarn_log_multiplier"):
            scaling["mscale"] = scaling["mscale_all_dim"] = 1.0
    return {"rope_scaling": scaling}


def _special(
    architecture: str, metadata: _Metadata, config: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, Any]:
    """What one architecture alone has."""
    match architecture:
        case "command-r":
            return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
        case "deepseek2":
            return _deepseek(metadata, config)
        case "falcon":
            several = config["num_kv_heads"] > 1
            norms = 2 if "blk.0.attn_norm_2.weight" in tensors else 1
            return {
                "new_decoder_architecture": several, "multi_query": not several, "num_ln_in_parallel_attn": norms,
            }  # fmt: skip
        case "gemma4":
            return _gemma4(metadata, config, tensors)
        case "glm4" | "glm4moe":
            return {
                "attention_bias": "blk.0.attn_q.bias" in tensors,
                "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
            }
        case "gpt-oss":
            return {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
        case "granitemoe":
            return {"model_type": "granitemoeshared"} if "shared_intermediate_size" in config else {}
        case "mistral3":
            return _ministral(metadata, config)
        case "olmo2" if metadata.get("attention.sliding_window"):
            return {"model_type": "olmo3", "sliding_window": metadata["attention.sliding_window"]}
        case "qwen35" | "qwen35moe" | "qwen3next":
            return _gated_delta_net(metadata, config)
    return {}


def _deepseek(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    turned = config["qk_rope_head_dim"]
    wide = metadata.get("attention.key_length_mla") or metadata["attention.key_length"]
    found = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": turned,
        "qk_nope_head_dim": wide - turned,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata["attention.value_length"],
    }
    if metadata.get("expert_gating_func") != 2:  # no sigmoid: DeepSeek-V2
        method = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
        found |= {"model_type": "deepseek_v2", "topk_method": method}
    if metadata.get("rope.scaling.type") == "yarn":
        # a tenth of it is stored, https://github.com/ggml-org/llama.cpp/pull/17945
        scale = round(10 * (metadata.get("rope.scaling.yarn_log_multiplier") or 0.0), 4)
        found |= rope_scaling_of(metadata.header)
        found["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _gemma4(metadata: _Metadata, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    window = metadata["attention.sliding_window_pattern"]
    heads, width = config["num_key_value_heads"], config["intermediate_size"]
    found: dict[str, Any] = {
        "layer_types": ["sliding_attention" if of else "full_attention" for of in window],
        "attention_k_eq_v": f"blk.{window.index(False)}.attn_v.weight" not in tensors,
        "enable_moe_block": "num_experts" in config,
        "eos_token_id": sorted({1, 50, 106, config["eos_token_id"] or 1}),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.get("rope.freq_base_swa") or 10_000.0,
            },
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": metadata["rope.freq_base"],
            },
        },
    }
    if isinstance(heads, tuple):
        found["num_key_value_heads"] = next(count for count, of in zip(heads, window, strict=True) if of)
        found["num_global_key_value_heads"] = next(count for count, of in zip(heads, window, strict=True) if not of)
    if isinstance(width, tuple):
        found |= {"intermediate_size": width[0], "use_double_wide_mlp": width[-1] != width[0]}
    return found


def _ministral(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {}
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": metadata.get("attention.temperature_scale") or 0.0}}


def _gated_delta_net(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """https://arxiv.org/abs/2412.06464, as in Qwen3-Next and Qwen3.5."""
    found: dict[str, Any] = {"linear_value_head_dim": metadata["ssm.inner_size"] // config["linear_num_value_heads"]}
    sections = metadata.get("rope.dimension_sections")
    if sections is not None:
        found["rope_parameters"] = {
            "rope_theta": config["rope_theta"],
            "mrope_section": [section for section in sections if section],
            "mrope_interleaved": True,
            "partial_rotary_factor": metadata["rope.dimension_count"] / config["head_dim"],
        }
    return found
