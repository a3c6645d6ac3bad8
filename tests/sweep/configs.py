"""A tiny configuration of nearly every model of transformers: four blocks, 300 tokens, hidden size 64.

By the names of its fields; what this does not shrink, or shrinks so that it does not fit together, is in
`overrides.json`. A heuristic: a model whose configuration cannot be made is reported, not guessed at.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BLOCKS: Final = 4
VOCABULARY: Final = 300
_OVERRIDES: Final[dict[str, Any]] = json.loads((Path(__file__).parent / "overrides.json").read_text())
_VALUES: Final[dict[int, str]] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input text_vocab_size",
    64: "hidden_size d_model n_embd dim embedding_size hidden_dim word_embed_proj_dim attention_hidden_size lru_width "
    "embed_dim dim_model emb_dim embedding_dim decoder_hidden_size",
    96: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size intermediate_size_mlp decoder_ffn_dim encoder_ffn_dim "
    "dim_ff mlp_hidden_size block_ff_dim dff inner_dim d_inner_ff mlp_dim hidden_dim_ff feed_forward_size "
    "dense_intermediate_size ffn_intermediate_size expert_ffn_hidden_size",
    512: "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length model_max_length "
    "max_target_positions context_length max_position max_source_positions",
    128: "mamba_d_ssm mamba_intermediate_size",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_intermediate_size shared_intermediate_size moe_ffn_hidden_size moe_latent_size mamba_d_head "
    "mamba_head_dim mamba_headdim",
    24: "q_lora_rank qk_head_dim",
    16: "head_dim kv_channels global_head_dim swa_head_dim swa_v_head_dim dim_head attention_head_dim kv_lora_rank "
    "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim linear_head_dim "
    "indexer_head_dim mamba_d_state ssm_state_size state_size mamba_state_size",
    8: "qk_rope_head_dim rotary_dim sliding_window attention_chunk_size sliding_window_size local_window "
    "window_size_local attention_window_size attention_window swa_window chunk_size mamba_chunk_size block_size "
    "time_step_rank mamba_dt_rank hidden_size_per_layer_input laurel_rank",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers depth "
    "num_blocks num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads swa_num_attention_heads num_global_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_routed_experts n_experts linear_num_value_heads index_topk indexer_topk mamba_n_heads "
    "n_mamba_heads mamba_num_heads",
    2: "num_key_value_heads num_global_key_value_heads swa_num_key_value_heads num_kv_heads num_experts_per_tok "
    "moe_topk moe_k top_k num_experts_per_token experts_per_token moe_top_k linear_num_key_heads index_n_heads "
    "indexer_num_heads index_num_heads eos_token_id",
    1: "n_group topk_group n_groups_moe num_expert_group n_shared_experts num_shared_experts first_k_dense_replace "
    "moe_num_shared_experts num_dense_layers zero_expert_num mamba_n_groups n_groups mamba_ngroups bos_token_id",
    0: "num_kv_shared_layers pad_token_id",
    28: "image_size",
    14: "patch_size",
}
_RULES: Final = {name: value for value, names in _VALUES.items() for name in names.split()}
_PICTURES: Final = {
    **_RULES,
    "num_hidden_layers": 2,
    "num_blocks": 2,
    "depth": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")
_OFF: Final = (
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "zero_expert_num",
    "n_shared_experts",
    "num_shared_experts",
)
"""Left at 0 where that is the default."""


def tiny_config(kind: str) -> PretrainedConfig:
    """The configuration of a tiny model of this type. Raises whatever transformers raises where there is none."""
    given = _OVERRIDES.get(kind, {})
    over, text = dict(given.get("over", {})), given.get("text", {})
    made: Any = CONFIG_MAPPING[kind]
    default = _default(made)
    if hasattr(default, "is_decoder") or getattr(default, "is_encoder_decoder", False):
        over = {"is_decoder": True, "is_encoder_decoder": False, **over}
    for name, part in (getattr(made, "sub_configs", None) or {}).items():
        current = getattr(default, name, None)
        if name in over or (default is not None and current is None):
            continue
        inner = type(current) if hasattr(current, "model_type") else part
        if inner.__name__ != "AutoConfig":
            language = any(word in name for word in ("text", "decoder", "llm"))
            fields = _shrunk(inner, _RULES if language else _PICTURES, dict(text) if language else {})
            over[name] = {**fields, "model_type": inner.model_type}
    return AutoConfig.for_model(kind, **_shrunk(made, _RULES, over))


def fill(model: torch.nn.Module) -> None:
    """Weights that are wide enough for a wrong block to be noticed."""
    generator = torch.Generator().manual_seed(0)
    left = ("A_log", "dt_", "conv", "time_", ".D", "rg_lru", "recurrent")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point() and not any(part in name for part in left):
                weight.copy_(0.15 * torch.randn(weight.shape, generator=generator))
            elif weight.dim() == 1 and name.endswith(".weight") and "norm" in name.lower():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):  # the experts of a token
                buffer.copy_(torch.randint(_RULES["n_routed_experts"], buffer.shape, generator=generator))


def _default(made: Any) -> Any:
    try:
        default = made()
    except Exception:  # some have no defaults
        return None
    default.allow_global_per_layer_attribute_access = True
    return default


def _shrunk(made: Any, rules: dict[str, int], over: dict[str, Any]) -> dict[str, Any]:
    default, aliases = _default(made), getattr(made, "attribute_map", None) or {}
    names = {*inspect.signature(made.__init__).parameters, *aliases, *(vars(default) if default is not None else ())}
    fields: dict[str, Any] = {}
    for name, value in rules.items():
        alias = aliases.get(name)
        if name in names and name not in over and not (alias in rules and alias in names):
            current = getattr(default, name, None) if default is not None else 0
            if _shrinks(name, current):
                fields[name] = value
    count = getattr(default, "num_hidden_layers", None)
    for name, value in vars(default).items() if default is not None else ():
        if isinstance(value, (list, tuple)) and isinstance(count, int) and 1 < count == len(value) and name not in over:
            different = list({repr(kind): kind for kind in value}.values())
            fields[name] = [different[place % len(different)] for place in range(BLOCKS)]
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            fields[name] = VOCABULARY - 1 - len(fields) % 40
    if "qk_rope_head_dim" in fields:  # latent attention: all heads have keys of their own
        fields.pop("head_dim", None)
        fields.update({"num_key_value_heads": 4, **({"head_dim": 8} if "head_dim" in names else {})})
    return {**fields, **over}


def _shrinks(name: str, current: Any) -> bool:
    if current is None:
        return name in _TOKENS
    if isinstance(current, list):
        return name.endswith("token_id")
    return not isinstance(current, (tuple, dict, bool, str)) and not (name in _OFF and current == 0)
