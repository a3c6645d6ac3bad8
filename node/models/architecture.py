"""The part of a model's configuration that decides what is computed, as canonical bytes.

The configuration is taken as it was written, field by field, so that every version of transformers gives the
same bytes. Left out is what may differ between two copies of one model: who wrote it and where, the dtype to
load in (the tensors' own dtypes are hashed with them), how to compute (`attn_implementation`, `use_cache`),
what only generation uses (token ids and sampling settings), and what only training uses (dropout).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .folder import TEXT_FIELDS

_LEFT_OUT = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "_model_name_or_path"),
        *("torch_dtype", "dtype", "torchscript", "use_bfloat16"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_cache"),
        *(
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
        *("begin_suppress_tokens", "bad_words_ids", "task_specific_params", "prefix", "tokenizer_class"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *(
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
        ),
        *(
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "num_return_sequences",
            "remove_invalid_values",
        ),
        *("exponential_decay_length_penalty", "chunk_size_feed_forward", "pruned_heads", "finetuning_task"),
        *("initializer_range", "initializer_factor", "gradient_checkpointing"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
        *("layerdrop", "activation_dropout", "classifier_dropout", "summary_first_dropout"),
        *("id2label", "label2id", "problem_type", "auto_map", "license"),
    }
)


def canonical_architecture(config: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `config` without what does not decide the computation.

    Keys are sorted; a number that is whole is written without a fraction, as `10000` and `10000.0` are one
    value that different writers spell differently.
    """
    kept = _kept(config)
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value) if key in TEXT_FIELDS and isinstance(value, Mapping) else _normal(value)
        for key, value in config.items()
        if key not in _LEFT_OUT
    }


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _normal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return value
