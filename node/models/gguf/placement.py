"""Where llama.cpp's converters have put the weights of a transformers model, and what they did to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

_BLOCK: Final = re.compile(r"layers\.(\d+)\.")
_PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "e_score_correction_bias": ("exp_probs_b.bias",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    "router.proj.weight": ("ffn_gate_inp.weight",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "kv_b_proj.weight": ("attn_k_b.weight", "attn_kv_b.weight", "attn_v_b.weight"),
    "in_proj_qkvz.weight": ("attn_gate.weight", "attn_qkv.weight", "ssm_in.weight"),
    "linear_attn.dt_bias": ("ssm_dt.bias",),
}
"""By the end of a parameter's name in a block, what the tensors that it is made of may be called. For all others the
table of the package `gguf` holds."""
_TURNED: Final = frozenset({"granite", "granitemoe", "mistral3", "mixtral", "smollm3"})
"""Those in whose queries and keys the two halves of a rotation stand beside each other."""
_ONE_MORE: Final = frozenset({"gemma", "qwen35", "qwen35moe", "qwen3next"})
"""Those whose norms are stored as 1 + weight."""
_TILED: Final = frozenset({"qwen35", "qwen35moe"})
"""Those of whose value heads the first ones of all key heads stand first."""

_TRANSPOSED: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("c_attn.weight", "c_fc.weight", "c_proj.weight"),
    "gpt_oss": ("gate_up_proj", "down_proj"),
}
"""By transformers' names, what a model has the other way round."""


@dataclass(frozen=True)
class Placement:
    """
    Args:
        architecture: a key of `architectures.ARCHITECTURES`.
        config: `config.json`.
        parameters: shapes of the whole model's parameters, by name.
    """

    architecture: str
    config: Mapping[str, Any] = field(repr=False)
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)

    def names(self, blocks: int) -> dict[str, str]:
        """From a tensor's name to that of the parameter of which it is all or a part."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        said = "llama" if self.architecture == "mixtral" else self.architecture
        table = get_tensor_name_map(next(key for key, name in MODEL_ARCH_NAMES.items() if name == said), blocks)
        found: dict[str, str] = {}
        for name in self.parameters:
            block, end = _BLOCK.search(name), next((end for end in _PLACES if name.endswith(f".{end}")), None)
            if block is not None and end is not None:
                found |= {f"blk.{block[1]}.{place}": name for place in _PLACES[end]}
                continue
            base = re.sub(r"\.(weight|bias)$", "", name)
            place = table.get_name(base) or table.get_name(base.removeprefix("transformer."))
            if place is not None:
                found[place + name.removeprefix(base)] = name
        return found

    def is_transposed(self, parameter: str) -> bool:
        """Whether the model has this matrix, or those of this stack, the other way round."""
        return parameter.endswith(_TRANSPOSED.get(self.config["model_type"], ()))

    def placed(self, arrays: Mapping[str, np.ndarray], parameter: str) -> np.ndarray:
        """The parameter that is made of these tensors, by name; but for what `is_transposed`, and dimensions of one.

        Raises:
            Exception: of any kind, where they are rows' numbers and more than rows are moved.
        """
        import numpy as np

        parts = [arrays[name] for name in sorted(arrays)]
        whole = parts[0]
        if parameter.endswith(("gate_up_proj", "gate_up_proj_bias")) and len(parts) == 2:
            whole = np.concatenate(parts, 1)
            if self.config["model_type"] == "gpt_oss":
                whole = np.stack(parts, 2).reshape(whole.shape)
        elif parameter.endswith("input_linear.weight"):
            whole = np.concatenate(parts)
        elif parameter.endswith("kv_b_proj.weight") and len(parts) == 2:
            keys, values = parts
            whole = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, values.shape[2])
        elif (
            "norm" in parameter and self.architecture in _ONE_MORE and not parameter.endswith("linear_attn.norm.weight")
        ):
            whole = whole - 1
        elif self.architecture in _TURNED and re.search(r"\.[qk]_proj\.(weight|bias)$", parameter):
            heads = self.config["num_attention_heads" if ".q_proj" in parameter else "num_key_value_heads"]
            whole = whole.reshape(heads, -1, 2, *whole.shape[1:]).swapaxes(1, 2).reshape(whole.shape)
        elif re.search(r"query_key_value\.(weight|bias)$", parameter):
            groups = self.config["num_key_value_heads"]
            wide = whole.shape[0] // (self.config["num_attention_heads"] + 2 * groups)
            parts = np.split(whole, [-2 * groups * wide, -groups * wide])
            rows = [part.reshape(groups, -1, *whole.shape[1:]) for part in parts]
            whole = np.concatenate(rows, 1).reshape(whole.shape)
        elif ".linear_attn." in parameter:
            whole = self._gated_delta_net(parts, parameter.partition(".linear_attn.")[2])
        return whole

    def _gated_delta_net(self, parts: list[np.ndarray], name: str) -> np.ndarray:
        import numpy as np

        whole = parts[0]
        if name == "A_log":
            whole = np.log(-whole)
        if name == "in_proj_qkvz.weight" and len(parts) == 2:
            return self._by_key_heads(parts[1], parts[0])
        if self.architecture not in _TILED:
            return whole
        if name in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
            return self._grouped(whole, 1)
        if name == "in_proj_z.weight":
            return self._grouped(whole, self.config["linear_value_head_dim"])
        if name in ("in_proj_qkv.weight", "conv1d.weight"):
            first = 2 * self.config["linear_num_key_heads"] * self.config["linear_key_head_dim"]
            values = self._grouped(whole[first:], self.config["linear_value_head_dim"])
            return np.concatenate([whole[:first], values])
        if name == "out_proj.weight":
            return self._grouped(whole.T, self.config["linear_value_head_dim"]).T
        return whole

    def _grouped(self, rows: np.ndarray, wide: int) -> np.ndarray:
        """Value heads of `wide` rows, those of a key head behind each other."""
        keys = self.config["linear_num_key_heads"]
        return rows.reshape(-1, keys, wide, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def _by_key_heads(self, mixed: np.ndarray, gates: np.ndarray) -> np.ndarray:
        """Of queries, keys and values of all heads, and gates, those of a key head behind each other."""
        import numpy as np

        keys = self.config["linear_num_key_heads"]
        first = keys * self.config["linear_key_head_dim"]
        parts = (mixed[:first], mixed[first : 2 * first], mixed[2 * first :], gates)
        rows = [part.reshape(keys, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(rows, 1).reshape(-1, *mixed.shape[1:])


def is_of_blocks(tensor: str, blocks: int) -> bool:
    """Whether a tensor belongs to one of the first `blocks` blocks, or to none: others are heads for drafts."""
    number = re.match(r"blk\.(\d+)\.", tensor)
    return number is None or int(number[1]) < blocks
