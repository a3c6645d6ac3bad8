"""Tiny models of transformers as llama.cpp's converters write them: names, metadata, and what is done to the weights.

After https://github.com/ggml-org/llama.cpp/tree/master/conversion, so that what reads them is not held against itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.sweep.configs import fill
from tests.tiny_gguf import VOCABULARY, add_tokenizer

BLOCKS, HIDDEN, WIDTH, HEADS, KEY_VALUE_HEADS, HEAD = 4, 128, 192, 4, 2, 32
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + place for place in range(12)],
}
_YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
_LINEAR = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
_LINEAR_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
    "full_attention_interval": 4, "rope.dimension_count": 8,
}  # fmt: skip
_MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
_SHARED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
}  # fmt: skip
_SHARED_KEYS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 96,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_ROUTED_KEYS = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1,
    "leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2,
}  # fmt: skip
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_MLA_KEYS = {
    "attention.q_lora_rank": 64, "attention.kv_lora_rank": 64, "rope.dimension_count": 16,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.key_length": 80,
    "attention.value_length": 64, "attention.head_count_kv": 1,
}  # fmt: skip
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_GRANITE_KEYS = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
_HEAD_KEYS = {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD}
_FOUR_TIMES = {"feed_forward_length": 4 * HIDDEN, "rope.freq_base": None}
_GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1, "attention_k_eq_v": False, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
_GEMMA4_KEYS = {
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
    "attention.value_length_swa": 32, "attention.sliding_window": 8, "rope.freq_base": 1_000_000.0,
    "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
    "attention.sliding_window_pattern": [True, True, True, False], "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bloom": ("bloom", "bloom", {}, {**_FOUR_TIMES, "attention.head_count_kv": HEADS}),
    "command-r": ("cohere", "command-r", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "cohere2": (
        "cohere2", "cohere2", {"logit_scale": 0.25, "sliding_window": 8, "head_dim": HEAD},
        {"logit_scale": 0.25, "attention.sliding_window": 8, **_HEAD_KEYS},
    ),
    "deepseek2": (
        "deepseek_v3", "deepseek2",
        {**_ROUTED, **_MLA, "num_key_value_heads": HEADS, "n_group": 2, "topk_group": 1,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}},
        {**_ROUTED_KEYS, **_MLA_KEYS, **_YARN_KEYS, "expert_group_count": 2, "expert_group_used_count": 1,
         "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "deepseek2 of softmax": (
        "deepseek_v2", "deepseek2",
        {**_ROUTED, **_MLA, "num_key_value_heads": HEADS, "q_lora_rank": None, "norm_topk_prob": False,
         "topk_method": "greedy"},
        {**{k: v for k, v in _ROUTED_KEYS.items() if k != "expert_weights_norm"}, **_MLA_KEYS, "expert_gating_func": 1,
         "attention.q_lora_rank": None},
    ),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"head_dim": HEAD}, _HEAD_KEYS),
    "ernie4_5-moe": (
        "ernie4_5_moe", "ernie4_5-moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "moe_layer_interval": 1},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1,
         "leading_dense_block_count": 1, "interleave_moe_layer_step": 1, **_HEAD_KEYS},
    ),
    "falcon": (
        "falcon", "falcon", {"num_kv_heads": 1}, {**_FOUR_TIMES, "attention.head_count_kv": 1},
    ),
    "falcon of several keys": (
        "falcon", "falcon", {"num_kv_heads": 2, "new_decoder_architecture": True},
        _FOUR_TIMES,
    ),
    "falcon of one norm": (
        "falcon", "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
         "tie_word_embeddings": False},
        _FOUR_TIMES,
    ),
    "gemma": ("gemma", "gemma", {"head_dim": HEAD}, _HEAD_KEYS),
    "gemma3": (
        "gemma3_text", "gemma3",
        {"head_dim": HEAD, "sliding_window": 8, "num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"attention.sliding_window": 8, "attention.key_length": HEAD, "attention.value_length": HEAD, "block_count": 7,
         "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma4": ("gemma4_text", "gemma4", _GEMMA4, {**_GEMMA4_KEYS, "attention.head_count_kv": [2, 2, 2, 1]}),
    "gemma4 of experts": (
        "gemma4_text", "gemma4",
        {**_GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
         "moe_intermediate_size": 64},
        {**_GEMMA4_KEYS, "attention.head_count_kv": [2, 2, 2, 1], "expert_count": 4, "expert_used_count": 2,
         "expert_feed_forward_length": 64},
    ),
    "glm4": (
        "glm4", "glm4", {"head_dim": HEAD, "partial_rotary_factor": 0.5, "attention_bias": True},
        {**_HEAD_KEYS, "rope.dimension_count": 16},
    ),
    "glm4moe": (
        "glm4_moe", "glm4moe",
        {**_ROUTED, "head_dim": HEAD, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True},
        {**_ROUTED_KEYS, **_HEAD_KEYS, "rope.dimension_count": 16},
    ),
    "gpt2": ("gpt2", "gpt2", {"n_inner": WIDTH}, {"attention.head_count_kv": None, "rope.freq_base": None}),
    "gpt-oss": (
        "gpt_oss", "gpt-oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": HEAD,
         "rope_parameters": {**_YARN, "truncate": False, "rope_theta": 10000.0}},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": WIDTH, "attention.sliding_window": 8,
         **_HEAD_KEYS, **_YARN_KEYS},
    ),
    "granite": ("granite", "granite", _GRANITE, _GRANITE_KEYS),
    "granitemoe": (
        "granitemoe", "granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**_GRANITE_KEYS, "expert_count": 4, "expert_used_count": 2},
    ),
    "granitemoe of a shared expert": (
        "granitemoeshared", "granitemoe",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
        {**_GRANITE_KEYS, "expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 96},
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", "hunyuan-dense", {"head_dim": HEAD}, _HEAD_KEYS),
    "lfm2": (
        "lfm2", "lfm2", {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
        {"attention.head_count_kv": [0, 0, KEY_VALUE_HEADS, 0], "shortconv.l_cache": 3},
    ),
    "minimax-m2": (
        "minimax_m2", "minimax-m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": HEAD, "rotary_dim": 16},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": WIDTH, "expert_gating_func": 2,
         **_HEAD_KEYS, "rope.dimension_count": 16},
    ),
    "mistral3": (
        "ministral3", "mistral3",
        {"head_dim": HEAD, "rope_parameters": {**_YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                               "llama_4_scaling_beta": 0.1}},
        {**_HEAD_KEYS, **_YARN_KEYS, "attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "mixtral": (
        "mixtral", "llama", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2, "rope.dimension_count": HEAD},
    ),
    "nemotron": ("nemotron", "nemotron", {"head_dim": HEAD}, {"rope.dimension_count": HEAD // 2}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo2 of a window": (
        "olmo3", "olmo2", {"sliding_window": 8}, {"attention.sliding_window": 8},
    ),
    "phi3": (
        "phi3", "phi3",
        {"original_max_position_embeddings": 4, "sliding_window": 8, "rope_parameters": _LONGROPE},
        {"rope.scaling.original_context_length": 4, "rope.dimension_count": 24, "attention.sliding_window": 8},
    ),
    "qwen2moe": ("qwen2_moe", "qwen2moe", {**_SHARED, "decoder_sparse_step": 1}, _SHARED_KEYS),
    "qwen35": (
        "qwen3_5_text", "qwen35", {**_LINEAR, "head_dim": HEAD, "rope_parameters": _MROPE},
        {**_HEAD_KEYS, **_LINEAR_KEYS, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen35moe": (
        "qwen3_5_moe_text", "qwen35moe", {**_LINEAR, **_SHARED, "head_dim": HEAD, "rope_parameters": _MROPE},
        {**_HEAD_KEYS, **_LINEAR_KEYS, **_SHARED_KEYS, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen3next": (
        "qwen3_next", "qwen3next", {**_LINEAR, **_SHARED, "head_dim": HEAD, "partial_rotary_factor": 0.25},
        {**_HEAD_KEYS, **_LINEAR_KEYS, **_SHARED_KEYS},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": HEAD, "attention_bias": True}, _HEAD_KEYS),
    "smollm3": ("smollm3", "smollm3", {}, {"rope.dimension_count": HEAD}),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True}, {"rope.dimension_count": HEAD // 4}),
}  # fmt: skip
"""By name: transformers' name, llama.cpp's, fields of the configuration, and the metadata that its converter makes of
them. None: left out."""
_TURNED = ("granite", "granitemoe", "mistral3", "llama", "smollm3")
_LAYER_NORM = ("bloom", "command-r", "cohere2", "falcon", "gpt2", "nemotron", "stablelm")


def write_layout(file: Path, kind: str, quantisation: str = "F32", *, drafts: bool = False) -> Any:
    """Writes a tiny model of a key of `LAYOUTS` and returns it: with the values before they were quantised.

    `drafts`: with a block behind the model's, of a head for the token after the next one.
    """
    from transformers import AutoConfig

    model_type, architecture, fields, metadata = LAYOUTS[kind]
    config: Any = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": BLOCKS,
            "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "max_position_embeddings": 128,
            "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0, **fields,
        },
    )  # fmt: skip
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    fill(model)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.dim() == 1 and "norm" not in name and "inv_freq" not in name:
                value.add_(0.1 * torch.rand(value.shape))
    tied = set(model.all_tied_weights_keys or {})
    writer = gguf.GGUFWriter(file, architecture)
    _write_metadata(writer, architecture, config, metadata, BLOCKS + drafts)
    add_tokenizer(writer)
    if drafts:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
        writer.add_tensor(f"blk.{BLOCKS}.nextn.eh_proj.weight", np.ones((HIDDEN, 2 * HIDDEN), np.float32))
    if architecture == "gemma4":
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 24, np.float32))
    if architecture == "phi3":
        writer.add_pad_token_id(2)
        for text in ("short", "long"):
            writer.add_tensor(f"rope_factors_{text}.weight", np.array(_LONGROPE[f"{text}_factor"], np.float32))
    wanted = gguf.GGMLQuantizationType[quantisation]
    table = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        for stored, part in _stored(architecture, config, name, value.float(), table):
            values = np.ascontiguousarray(part.detach().numpy())
            small = values.ndim < 2 or "gate_inp" in stored or "conv1d" in stored or values.shape[-1] % 32
            if small or quantisation == "F32":
                writer.add_tensor(stored, values)
            else:
                writer.add_tensor(stored, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "norm_eps")


def _write_metadata(
    writer: gguf.GGUFWriter, architecture: str, config: Any, metadata: dict[str, Any], blocks: int
) -> None:
    norm = "attention.layer_norm_epsilon" if architecture in _LAYER_NORM else "attention.layer_norm_rms_epsilon"
    said = {
        "block_count": blocks, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": WIDTH,
        "attention.head_count": HEADS, "attention.head_count_kv": KEY_VALUE_HEADS, "vocab_size": VOCABULARY,
        norm: next(value for end in _EPSILONS if (value := getattr(config, end, None))),
        "rope.freq_base": 10000.0, **metadata,
    }  # fmt: skip
    for key, value in said.items():
        name = f"{architecture}.{key}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(name, value)
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
            case _:
                writer.add_uint32(name, value)


def _stored(architecture: str, config: Any, name: str, value: Any, table: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that are written of one parameter, by name."""
    base = re.sub(r"\.(weight|bias)$", "", name)
    end = name.removeprefix(base) or ".weight"
    if architecture == "bloom":
        base = base.removeprefix("transformer.")
    found = re.search(r"layers\.(\d+)\.", name)
    block = f"blk.{found[1]}." if found else ""
    value = _changed(architecture, config, name, value)
    if ".experts." in base:
        yield from ((block + place, part) for place, part in _of_experts(architecture, base, value))
        return
    renamed = next((place for tail, place in _RENAMED.items() if name.endswith(tail)), None)
    if renamed is not None:
        yield block + renamed, -value.exp() if "A_log" in name else value.squeeze()
    elif base.endswith("shared_mlp.input_linear"):
        gate, up = value.chunk(2)
        yield from ((f"{block}ffn_gate_shexp.weight", gate), (f"{block}ffn_up_shexp.weight", up))
    elif base.endswith("kv_b_proj"):
        keys, values = value.view(HEADS, -1, value.shape[1]).split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield from ((f"{block}attn_k_b.weight", keys.transpose(1, 2)), (f"{block}attn_v_b.weight", values))
    elif base.endswith("linear_attn.in_proj_qkvz"):
        rows = value.view(config.linear_num_key_heads, -1, HIDDEN).split([32, 32, 64, 64], 1)
        parts = [part.reshape(-1, HIDDEN) for part in rows]
        yield from ((f"{block}attn_qkv.weight", torch.cat(parts[:3])), (f"{block}attn_gate.weight", parts[3]))
    else:
        yield f"{table.get_name(base)}{end}", value.squeeze() if "shared_expert_gate" in name else value


_RENAMED = {
    "e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "router.proj.weight": "ffn_gate_inp.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}


def _of_experts(architecture: str, base: str, value: Any) -> Iterator[tuple[str, Any]]:
    oss = architecture == "gpt-oss"
    end = ".bias" if base.endswith("_bias") else ".weight"
    if value.dim() == 3 and oss:
        value = value.transpose(1, 2)
    if "down_proj" in base:
        yield f"ffn_down_exps{end}", value
    elif architecture == "gemma4":
        yield f"ffn_gate_up_exps{end}", value
    else:
        gate, up = (value[:, ::2], value[:, 1::2]) if oss else value.chunk(2, 1)
        yield from ((f"ffn_gate_exps{end}", gate), (f"ffn_up_exps{end}", up))


def _changed(architecture: str, config: Any, name: str, value: Any) -> Any:
    """What is done to the values."""
    if architecture in _TURNED and re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        heads = HEADS if ".q_proj" in name else KEY_VALUE_HEADS
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)
    if "query_key_value" in name:
        groups = config.num_kv_heads if architecture == "falcon" else HEADS
        heads = value.view(groups, HEADS // groups + 2, HEAD, *value.shape[1:])
        parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
        return torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return value.T
    ones = architecture in ("gemma", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
    if ones and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return value + 1
    if "conv1d" in name or ".conv.conv." in name:
        value = value.squeeze(1)
    if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        return _tiled(config, name.partition(".linear_attn.")[2].partition(".")[0], value)
    return value


def _tiled(config: Any, name: str, value: Any) -> Any:
    keys, wide = config.linear_num_key_heads, config.linear_value_head_dim

    def tiled(rows: Any, size: int) -> Any:
        each = config.linear_num_value_heads // keys
        return rows.reshape(keys, each, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    match name:
        case "in_proj_qkv" | "conv1d":
            first = 2 * keys * config.linear_key_head_dim
            return torch.cat([value[:first], tiled(value[first:], wide)])
        case "in_proj_z":
            return tiled(value, wide)
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return tiled(value, 1)
        case "out_proj":
            return tiled(value.T, wide).T
    return value
