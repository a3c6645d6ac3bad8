"""Tiny random models of many architectures, saved as ordinary Hugging Face folders without a tokenizer.

No trained weights are needed to ask whether a slice computes what the whole model computes. Initialisation is
made wide on purpose: with transformers' default of 0.02 a block hardly changes its input, and a wrong layer
would pass for a right one.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from petalnode.protocols.ids import Span

logging.disable_progress_bar()

NUM_BLOCKS = 6
VOCABULARY = 128
HIDDEN = 64

# What most decoders of the Llama family understand: 4 query heads of 16 on 2 key-value heads.
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD_DIM: dict[str, Any] = {**_LLAMA_LIKE, "head_dim": 16}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SLIDING_EVERY_OTHER = ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2)

_LATENT: dict[str, Any] = {
    **_LLAMA_LIKE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}

_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "codegen": (
        "codegen",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": NUM_BLOCKS,
            "n_head": 4,
            "n_positions": 256,
            "n_ctx": 256,
            "rotary_dim": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neo_local": (
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_layers": NUM_BLOCKS,
            "num_heads": 4,
            "window_size": 8,
            "attention_types": [[["global", "local"], NUM_BLOCKS // 2]],
            "max_position_embeddings": 256,
            **_IDS,
        },
    ),
    "modernbert": (
        "modernbert-decoder",
        {**_LLAMA_LIKE, "local_attention": 8, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "mpt": (
        "mpt",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "n_layers": NUM_BLOCKS,
            "n_heads": 4,
            "max_seq_len": 256,
            "use_cache": True,
            **_IDS,
        },
    ),
    "llama": ("llama", _LLAMA_LIKE),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen2_sliding": (
        "qwen2",
        {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", _HEAD_DIM),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": 8}),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "gemma2",
        {
            **_HEAD_DIM,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {**_HEAD_DIM, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": _SLIDING_EVERY_OTHER},
    ),
    "phi3": ("phi3", _LLAMA_LIKE),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "granite": ("granite", {**_LLAMA_LIKE, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "llama4": (
        "llama4_text",
        {
            **_HEAD_DIM,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 0] * (NUM_BLOCKS // 3),
            "attn_temperature_tuning": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_HEAD_DIM,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": _SLIDING_EVERY_OTHER,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "n_shared_experts": 1}),
    "deepseek_v32": ("deepseek_v32", {**_LATENT, "index_topk": 4, "index_n_heads": 8, "index_head_dim": 16}),
    "dots3_note": (  # blocks with a window have other heads than those with an index
        "dots3_note_text",
        {
            **_LATENT,
            "index_topk": 4,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "shared_experts_intermediate_size": 32,
            "sliding_window": 8,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 20,
            "swa_kv_lora_rank": 12,
            "swa_head_dim": 20,
            "swa_qk_nope_head_dim": 12,
            "swa_v_head_dim": 12,
        },
    ),
    "bloom": (
        "bloom",
        {**_IDS, "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": NUM_BLOCKS, "n_head": 4},
    ),
    "gpt2": (
        "gpt2",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": NUM_BLOCKS,
            "n_head": 4,
            "n_positions": 256,
        },
    ),
    "opt": (
        "opt",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "ffn_dim": 96,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 48,
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "falcon": (
        "falcon",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 4,
            "alibi": False,
            "multi_query": True,
            "max_position_embeddings": 256,
        },
    ),
    "falcon_alibi": (
        "falcon",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 4,
            "alibi": True,
            "multi_query": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
        },
    ),
}

ARCHITECTURES: tuple[str, ...] = tuple(_SPECS)

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (NUM_BLOCKS // 3),
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}

_HYBRID_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {**_HEAD_DIM, **_DELTA}),
    "qwen3_next": ("qwen3_next", {**_HEAD_DIM, **_DELTA, **_EXPERTS}),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "layer_types": _DELTA["layer_types"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_local_experts": 4,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_LLAMA_LIKE, **_DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 32}),
    "lfm2": ("lfm2", {**_LLAMA_LIKE, "layer_types": ["conv", "conv", "full_attention"] * (NUM_BLOCKS // 3)}),
    "falcon_h1": ("falcon_h1", {**_HEAD_DIM, **_MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 8}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_LLAMA_LIKE,
            **_MAMBA,
            "mamba_chunk_size": 8,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (NUM_BLOCKS // 3),
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_HEAD_DIM,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
}

HYBRIDS: tuple[str, ...] = tuple(_HYBRID_SPECS)
"""Those whose blocks keep states beside keys and values."""

_WHOLE_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("jamba", {**_LLAMA_LIKE, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": ("bamba", {**_LLAMA_LIKE, **_MAMBA, "mamba_chunk_size": 8, "attn_layer_indices": [1, 4]}),
    "mamba2": (
        "mamba2",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": NUM_BLOCKS,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 16,
            "chunk_size": 8,
        },
    ),
    "minimax": ("minimax", {**_HEAD_DIM, "block_size": 8, "num_local_experts": 4}),
    "recurrent_gemma": ("recurrent_gemma", {**_LLAMA_LIKE, "attention_window_size": 8}),
}
WHOLE: tuple[str, ...] = tuple(_WHOLE_SPECS)
"""Those likewise that transformers computes otherwise, or in a cache of their own, behind the first piece of a prompt:
compared by the tokens of a whole answer."""

_PER_LAYER: dict[str, Any] = {
    **_HEAD_DIM,
    "sliding_window": 8,
    "layer_types": _SLIDING_EVERY_OTHER,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCABULARY,
}
_STREAMS: dict[str, Any] = {
    **_PER_LAYER,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5] * 3 + [0.0] * 3,
}
_SPARSE, _HEAVILY = "compressed_sparse_attention", "heavily_compressed_attention"
_CROSSING_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm_shared": (
        "glm_moe_dsa",
        {
            **_LATENT,
            "index_topk": 4,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
        },
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {
            **_HEAD_DIM,
            "num_key_value_heads": 1,
            "layer_types": [_HEAVILY, _SPARSE, _HEAVILY, "sliding_attention", _SPARSE, _SPARSE],
            "compress_rates": {_SPARSE: 4, _HEAVILY: 8},
            "mlp_layer_types": ["hash_moe"] * 4 + ["moe"] * 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 8,
            "partial_rotary_factor": 0.5,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 3,
        },
    ),
    "gemma4_per_layer": ("gemma4_text", {**_PER_LAYER, "global_head_dim": 32}),
    "gemma4_shared": ("gemma4_text", {**_PER_LAYER, "global_head_dim": 32, "num_kv_shared_layers": 2}),
    "gemma3n": ("gemma3n_text", {**_STREAMS, "num_kv_shared_layers": 0}),
    "gemma3n_shared": ("gemma3n_text", {**_STREAMS, "num_kv_shared_layers": 2}),
    "zamba2": (
        "zamba2",
        {
            **_LLAMA_LIKE,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"] * 2,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "chunk_size": 8,
            "adapter_rank": 8,
        },
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {
            **_HEAD_DIM,
            **_DELTA,
            **_EXPERTS,
            "eos_token_id": 126,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2, 5],
            "ple_embed_dim": 32,
            "ngram_vocab_size_base": 40,
            "heads_per_ngram": 2,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
            "hc_lowrank": 8,
        },
    ),
}
CROSSING: tuple[str, ...] = tuple(_CROSSING_SPECS)
"""Those whose blocks get more than the hidden states of the block before."""
CUTS: dict[str, tuple[Span, ...]] = {
    kind: (Span(0, 1), Span(1, 2), Span(2, 6)) if "shared" in kind else (Span(0, 2), Span(2, 3), Span(3, 6))
    for kind in CROSSING
}
"""How three servers hold them. What blocks share, they do among the blocks 2 to 5."""

_ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
_BY_NAME_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("phimoe", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**_HEAD_DIM, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 2}),
    "dots1": ("dots1", {**_HEAD_DIM, **_ROUTED, "n_shared_experts": 1}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **_HEAD_DIM,
            **_ROUTED,
            "v_head_dim": 12,
            "sliding_window": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * (NUM_BLOCKS - 1)],
            "mlp_layer_types": ["dense", "dense", *["sparse"] * (NUM_BLOCKS - 2)],
        },
    ),
}
"""Those that only some tests ask for."""


@cache
def _saved() -> tuple[TemporaryDirectory[str], dict[str, Path]]:
    """Where this process keeps the models that it has made, and their folders: many tests want the same ones."""
    return TemporaryDirectory(prefix="tiny-models-"), {}


def save_tiny(
    architecture: str,
    folder: Path,
    seed: int = 0,
    *,
    shards: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes a random model of 6 blocks, hidden size 64 and 128 tokens to `folder` and returns it.

    Args:
        architecture: one of ARCHITECTURES, or of those that only some tests ask for.
        seed: the same seed gives the same weights.
        shards: size of a shard such as "50KB"; None saves one safetensors file.
        dtype: of the saved weights.
        overrides: fields of the configuration, such as num_hidden_layers=2.
    """
    model_type, usual = (_SPECS | _HYBRID_SPECS | _WHOLE_SPECS | _CROSSING_SPECS | _BY_NAME_ONLY)[architecture]
    fields = {**usual, **overrides}
    room, made = _saved()
    asked = repr((model_type, fields, seed, shards, dtype))
    if asked not in made:
        place = Path(room.name, str(len(made)))
        size = {} if shards is None else {"max_shard_size": shards}
        _random_model(model_type, fields, seed).to(dtype).save_pretrained(place, **size)  # type: ignore[arg-type]
        made[asked] = place
    shutil.copytree(made[asked], folder, dirs_exist_ok=True)
    return folder


def _random_model(model_type: str, fields: dict[str, Any], seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.15 if parameter.dim() > 1 else 0.1
                offset = 1.0 if parameter.dim() == 1 and name.endswith(".weight") else 0.0  # norms
                parameter.copy_(offset + spread * torch.randn(parameter.shape))
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):  # of a router of experts: zero until it is trained
                    buffer.copy_(0.1 * torch.randn(buffer.shape))
                elif name.endswith("tid2eid"):
                    buffer.copy_(torch.randint(fields["n_routed_experts"], buffer.shape))
    return model


def load_whole(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model in plain transformers, to compare with."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
    return model.eval()
