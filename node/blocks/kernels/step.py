"""A decode step of all blocks of a span in one call of the compiled kernels.

For blocks of the families in `_MODEL_TYPES`: RMS or layer norms, rotary positions or none, grouped attention or a gated
delta rule, an MLP with or without a gate or a mixture of experts, and LoRA of some of the rows; in float32 on a CPU,
for rows of many sessions of different lengths. Keys, values and states go into the sessions' own caches, so that
prefill, rollback and reorder are as ever. Whether it computes what transformers does is tried out when a span is
loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...models.quantisation import CacheDtype
from ..cache import BlockCacheSpec, SpanCache
from ..quantisation.matrix import QuantisedLinear
from ..quantisation.slots import QuantisedExperts, expert_stacks
from ..span_adapter import AdapterRows, SpanAdapter
from .changes import FORM_F32, FORM_F32_COLUMNS, Changes
from .delta import describe_delta, entering_states, layout_of, mixing_floats
from .latents import describe_latents, has_latents, in_two, score_floats
from .library import MOST_THREADS, Block, Change, Library, Matrix, Row, Shape, StepStruct, Unsuitable
from .tiles import LANES, MOST_ROWS, TiledMatrix, pointer, rows_of

_MODEL_TYPES: Final = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"),
        *("gpt_oss", "glm4_moe", "dots1", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo2"),
        *("olmo_hybrid", "kimi_linear", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "youtu"),
    }
)
_ACTIVATIONS: Final = {"silu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2}
_HELD: Final[dict[CacheDtype, int]] = {"auto": 0, "float32": 0, "bfloat16": 1, "int8": 2}
"""As `enum held` counts them."""
_SCRATCH_FLOATS: Final = 4 << 20
"""That rows take at once where there are more, of 64 to 256: the bits are the same."""
_ATTENDED: Final = 16
"""As in kernels.c."""
_ROUTING: Final = {
    "gpt_oss": 1,
    **dict.fromkeys(("glm4_moe", "dots1", "kimi_linear", "deepseek_v3", "glm4_moe_lite", "axk1"), 2),
}
"""As `enum routing` counts them, where it is not the first."""
_LAYERS: Final = ("query", "key", "value", "output", "gate", "up", "down")
"""As `enum layer` counts them."""

Frequencies = Callable[[str | None], tuple[torch.Tensor, float] | None]
"""Of a layer's type, where these differ, as `BlockStack.frequencies` and `exact_frequencies` have them."""


class SpanStep:
    """The decode step of a span. Not thread-safe. Weights stay those of the blocks' modules.

    Args:
        blocks: modules of transformers, all of the span.
        specs: what they keep, one each.
        config: of the model.
        frequencies: of its rotary positions.
        held: how the sessions' caches hold keys and values.
        exact: any number of tokens is taken, with the bits that docs/exact.md defines.

    Attributes:
        takes_prompts: whether any number of tokens is taken: if exact, or if all matrices are packed.
        threads: that compute a step, if no other thread of the process has them; the results are the same.
        counts: of experts, as `QuantisedExperts` has them.

    Raises:
        Unsuitable: the kernels do not compute such blocks.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        specs: Sequence[BlockCacheSpec],
        config: Any,
        frequencies: Frequencies,
        found: Library,
        held: CacheDtype = "auto",
        exact: bool = False,
    ) -> None:
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        activation = activation or getattr(config, "activation_function", "")
        if config.model_type not in _MODEL_TYPES or activation not in _ACTIVATIONS:
            raise Unsuitable(config.model_type)
        kept = {(spec.heads, spec.key_dim, spec.value_dim) for spec in specs if spec.heads} or {(1, LANES, LANES)}
        if len(kept) != 1:
            raise Unsuitable("blocks that keep different things")
        self.threads, self.takes_prompts = 1, True
        self.counts = (ctypes.c_int64 * 2)()
        self._functions, self._config = found.functions, config
        one_more = ("gemma", "qwen3_5", "qwen3_next")  # whose norms multiply with 1 + weight
        self._one_more = config.model_type.startswith(one_more)
        self._blocks = (Block * len(blocks))()
        self._kept: list[Any] = []  # tensors and arrays that the structures point into
        self._layers: dict[nn.Module, tuple[int, int]] = {}  # whole modules, to block and layer
        self._shape = Shape(hidden=int(config.hidden_size), activation=_ACTIVATIONS[activation], held=_HELD[held])
        self._shape.kv_heads, self._shape.head_dim, _ = kept.pop()
        self._shape.routing, self._shape.groups = _ROUTING.get(config.model_type, 0), 1
        self._shape.routed_scale = 1.0
        kinds: list[str | None] = []
        for index, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
            kind = _rotary_kind(block, config)
            if kind not in kinds:
                kinds.append(kind)
            self._describe(index, block, spec)
            self._blocks[index].rotary = kinds.index(kind)
        self._check(specs)
        turning = [frequencies(kind) for kind in kinds] if getattr(config, "rope_parameters", None) else []
        self._turning = [(of.contiguous(), scale) for of, scale in filter(None, turning)]
        self._shape.rotary_dim = 2 * len(self._turning[0][0]) if self._turning else 0
        parts = not self._shape.latent or self._shape.rotary_dim == specs[0].value_dim
        if not parts or len(self._turning) != len(turning) or len({len(of) for of, _ in self._turning}) > 1:
            raise Unsuitable("rotary positions of another kind")
        self._scratch, self._changes = torch.empty(0), Changes(self._layers)
        of_row = self._functions.petalnode_step_scratch(ctypes.byref(self._shape), 1, 0, 0)
        self._together = min(max(_SCRATCH_FLOATS // of_row, 64), 256)
        apart = self._shape.latent or self._shape.mixing or torch.get_num_threads() > MOST_THREADS
        self.takes_prompts = exact or (self.takes_prompts and not apart)

    def takes(self, caches: Sequence[SpanCache], adapters: Sequence[AdapterRows] = (), tokens: int = 1) -> bool:
        """Whether `tokens` tokens of each row of these sessions are few enough, and the adapters known."""
        few = tokens * sum(cache.batch for cache in caches) <= MOST_ROWS
        return (few or self.takes_prompts) and all(self.knows(use.adapter) for use in adapters)

    def knows(self, adapter: SpanAdapter) -> bool:
        """Whether all layers that it changes are known."""
        return self._changes.knows(adapter)

    def run(
        self, hidden: torch.Tensor, caches: Sequence[SpanCache], adapters: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """The next tokens of each row: what the last block of the sessions' part makes of `hidden`.

        All caches are of the same blocks; they get keys and values, and are not advanced.

        Args:
            hidden: float32 [rows of all caches, tokens, hidden size].
            adapters: which change the blocks for some of the rows; `takes` has agreed to them.
        """
        pieces = torch.split(hidden, max(1, self._together // len(hidden)), dim=1)
        done = [0, *accumulate(piece.shape[1] for piece in pieces)]
        outputs = [self._run(piece, at, caches, adapters) for piece, at in zip(pieces, done, strict=False)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _run(
        self, hidden: torch.Tensor, ahead: int, caches: Sequence[SpanCache], adapters: Sequence[AdapterRows]
    ) -> torch.Tensor:
        """The same of tokens behind `ahead` others, whose keys and values are there."""
        tokens = hidden.shape[1]
        count = len(hidden) * tokens
        rows = (Row * count)()
        positions: list[int] = []
        entering = [entering_states(cache, self._blocks, self._functions, tokens) for cache in caches]
        for cache, (states, _) in zip(caches, entering, strict=True):
            memory, longest, pointers = cache.memory.data_ptr(), cache.max_length, ctypes.addressof(states)
            for row, padding in enumerate(cache.left_padding):
                for length in range(cache.length + ahead, cache.length + ahead + tokens):
                    rows[len(positions)] = Row(memory, cache.batch, row, longest, length, padding, pointers)
                    positions.append(max(length - padding, 0))
        rotations = self._rotations(torch.tensor(positions))
        output = hidden.clone(memory_format=torch.contiguous_format)
        first, blocks = caches[0].first, len(caches[0].specs)
        changes = self._changes.of(adapters, first, blocks, tokens)
        scores = self._score_count(count, max(cache.length for cache in caches) + ahead + tokens, changes)
        shape = ctypes.byref(self._shape)
        needed = self._functions.petalnode_step_scratch(shape, count, scores, self.threads)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(2 * needed)
        step = StepStruct(
            ctypes.addressof(self._shape), ctypes.addressof(self._blocks) + first * ctypes.sizeof(Block),
            ctypes.addressof(rows), ctypes.addressof(changes), blocks, count, len(changes), scores,
            tokens if tokens > 1 else 0, rotations[0].data_ptr(), rotations[1].data_ptr(), output.data_ptr(),
            self._scratch.data_ptr(), ctypes.addressof(self.counts),
        )  # fmt: skip
        self._functions.petalnode_step(ctypes.byref(step), self.threads)
        return output

    def _score_count(self, rows: int, longest: int, changes: Sequence[Change]) -> int:
        """float32 that each thread needs for itself."""
        shape = self._shape
        group = 1 if shape.latent else shape.heads // shape.kv_heads
        experts = max(block.experts for block in self._blocks)
        adapted = max((change.rows * (change.down.out + change.up.out) for change in changes), default=0)
        of_heads = score_floats(shape, rows)
        return int(max(max(group, _ATTENDED) * (longest + LANES), (rows + 1) * experts, adapted, of_heads))

    def _rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines [2, tables, rows, rotated dim] of int64 [rows]."""
        found = torch.empty(2, max(1, len(self._turning)), len(positions), self._shape.rotary_dim)
        for table, (of, scale) in enumerate(self._turning):
            into = (found[0, table].data_ptr(), found[1, table].data_ptr())
            self._functions.petalnode_rotary(of.data_ptr(), len(of), scale, positions.data_ptr(), len(positions), *into)
        return found

    # --- the blocks ---

    def _describe(self, index: int, block: nn.Module, spec: BlockCacheSpec) -> None:
        described = self._blocks[index]
        described.window = spec.window or 0
        names = ("self_attn", "attn", "linear_attn")
        attention: Any = next(filter(None, (_submodule(block, name) for name in names)), None)
        if attention is None:
            raise Unsuitable("attention of another kind")
        self._describe_norms(described, block)
        if (layout := layout_of(attention)) is not None:
            matrices = [self._matrix(attention.get_submodule(path)) for path in layout.projections]
            delta, weights = describe_delta(attention, layout, spec.states, matrices)
            self._kept += [delta, *weights]
            described.delta = ctypes.addressof(delta)
            self._put(index, "output", attention.get_submodule(layout.output))
            self._shape.mixing = max(self._shape.mixing, mixing_floats(delta))
            self._shape.mixed = max(self._shape.mixed, described.output.in_)
        elif has_latents(attention):
            if self._config.model_type == "kimi_linear":
                raise Unsuitable("latents without positions")
            if attention.q_lora_rank is not None:
                described.low = self._matrix(attention.q_a_proj)
                described.query_norm = self._pointer(attention.q_a_layernorm.weight)
            self._put(index, "query", attention.q_b_proj if described.low.codes else attention.q_proj)
            self._put(index, "key", attention.kv_a_proj_with_mqa)
            self._put(index, "output", attention.o_proj)
            described.key_norm = self._pointer(attention.kv_a_layernorm.weight)
            whole = None if in_two(attention) else self._matrix(attention.kv_b_proj)
            self._kept += describe_latents(described, self._shape, attention, self._config, whole)
        else:
            self._describe_attention(index, attention)
        mlp: Any = _submodule(block, "mlp")
        if (experts := _submodule(mlp, "experts")) is not None:
            self._describe_experts(described, mlp, experts)
        else:
            self._describe_mlp(index, mlp)

    def _describe_norms(self, described: Block, block: nn.Module) -> None:
        names = {"input_norm": "input_layernorm", "output_norm": "post_attention_layernorm"}
        latents = has_latents(_submodule(block, "self_attn"))
        if latents and _submodule(block, "mlp.post_mlp_layernorm") is not None:
            names["mlp_norm"] = "mlp.post_mlp_layernorm"
        if _submodule(block, "ln_1") is not None:
            names = {"input_norm": "ln_1", "output_norm": "ln_2"}
        elif _submodule(block, "pre_feedforward_layernorm") is not None:
            names |= {"attention_norm": "post_attention_layernorm", "output_norm": "pre_feedforward_layernorm"}
            names |= {"mlp_norm": "post_feedforward_layernorm"}
        elif _submodule(block, "input_layernorm") is None:
            names = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
        names |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
        for field, path in names.items():
            norm = _submodule(block, path)
            if norm is None:
                continue
            weight = (1.0 + norm.weight.detach()) if self._one_more else norm.weight
            setattr(described, field, self._pointer(weight))
            if (bias := getattr(norm, "bias", None)) is not None:
                setattr(described, field.replace("norm", "bias"), self._pointer(bias))
            described.whole = described.whole or (field == "query_norm" and len(weight) != self._shape.head_dim)
            self._shape.eps = float(getattr(norm, "variance_epsilon", 0.0) or norm.eps)
        first = [norm for norm in names if norm in ("input_norm", "output_norm", "attention_norm", "mlp_norm")]
        if any(getattr(described, norm) is None for norm in first):
            raise Unsuitable("other norms")

    def _describe_attention(self, index: int, attention: Any) -> None:
        described = self._blocks[index]
        described.scale = float(attention.scaling)
        sinks = getattr(attention, "sinks", None)
        described.sinks = None if sinks is None else self._pointer(sinks)
        self._shape.softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0.0)
        together = _submodule(attention, "qkv_proj") or _submodule(attention, "c_attn")
        narrow = self._shape.kv_heads * self._shape.head_dim
        if together is not None:
            wide = _outputs(together) - 2 * narrow
            parts = {"query": (0, wide), "key": (wide, narrow), "value": (wide + narrow, narrow)}
            for field, (start, size) in parts.items():
                setattr(described, field, rows_of(self._matrix(together), start, size))
        else:
            for field, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
                self._put(index, field, _submodule(attention, name))
        self._put(index, "output", _submodule(attention, "o_proj") or _submodule(attention, "c_proj"))

    def _describe_mlp(self, index: int, mlp: Any) -> None:
        described = self._blocks[index]
        if (together := _submodule(mlp, "gate_up_proj")) is not None:
            half = _outputs(together) // 2
            described.gate = rows_of(self._matrix(together), 0, half)
            described.up = rows_of(self._matrix(together), half, half)
        elif _submodule(mlp, "c_fc") is not None:
            self._put(index, "up", _submodule(mlp, "c_fc"))
        else:
            self._put(index, "gate", _submodule(mlp, "gate_proj"))
            self._put(index, "up", _submodule(mlp, "up_proj"))
        self._put(index, "down", _submodule(mlp, "down_proj") or _submodule(mlp, "c_proj"))
        self._shape.inner = max(self._shape.inner, described.up.out)

    def _describe_experts(self, described: Block, mlp: Any, experts: Any) -> None:
        router = _submodule(mlp, "gate") or mlp.router
        ups, downs = self._expert_matrices(experts)
        described.experts = len(ups)
        described.router = Matrix(FORM_F32, *router.weight.shape, router.weight.shape[1], self._pointer(router.weight))
        if getattr(router, "bias", None) is not None:
            described.router.bias = self._pointer(router.bias)
        favours = getattr(router, "e_score_correction_bias", None)
        described.favours = None if favours is None else self._pointer(favours)
        array = (Matrix * (3 * len(ups)))()
        half = downs[0].in_
        self._describe_activation(experts)
        for number, (up, down) in enumerate(zip(ups, downs, strict=True)):
            parts = [up, Matrix()] if self._shape.limit else [rows_of(up, 0, half), rows_of(up, half, half)]
            array[3 * number : 3 * number + 3] = [*parts, down]
        self._kept.append(array)
        described.expert = ctypes.addressof(array)
        if isinstance(experts, QuantisedExperts) and experts.ranges is not None:
            described.each, described.ranges = experts.each, ctypes.addressof(experts.ranges)
            self._kept.append(experts.ranges)
        self._shape.inner = max(self._shape.inner, 2 * half if self._shape.limit else half)
        self._describe_shared(described, mlp)
        self._shape.chosen = int(router.top_k)
        second = self._config.model_type == "deepseek_v2"  # whose shares never add up
        self._shape.shares_add_up = not second and bool(getattr(router, "norm_topk_prob", True))
        self._shape.routed_scale = float(getattr(router, "routed_scaling_factor", 1.0))
        grouped = getattr(router, "topk_method", None) != "greedy"
        self._shape.groups = int((grouped and getattr(router, "num_group", None)) or 1)
        self._shape.kept = int(getattr(router, "topk_group", None) or 1)
        if max(self._shape.chosen, self._shape.groups) > 64 or len(ups) % self._shape.groups:
            raise Unsuitable("more experts of a token than MOST_CHOSEN of kernels.c")

    def _describe_activation(self, experts: Any) -> None:
        original = experts.original[0] if isinstance(experts, QuantisedExperts) else experts
        limit = getattr(original, "limit", None)
        if limit is not None:
            self._shape.alpha, self._shape.limit = float(original.alpha), float(limit)

    def _describe_shared(self, described: Block, mlp: Any) -> None:
        """The expert that all tokens share, if there is one."""
        shared = _submodule(mlp, "shared_experts") or _submodule(mlp, "shared_expert")
        if shared is None:
            return
        gate = _submodule(mlp, "shared_expert_gate")
        described.shared = None if gate is None else self._pointer(gate.weight)
        described.gate, described.up = self._matrix(shared.gate_proj), self._matrix(shared.up_proj)
        described.down = self._matrix(shared.down_proj)
        self._shape.inner = max(self._shape.inner, described.up.out)

    def _expert_matrices(self, experts: Any) -> tuple[list[Matrix], list[Matrix]]:
        """Gates and ups, one behind the other, and downs, by expert."""
        if isinstance(experts, QuantisedExperts):
            found = [self._tiled(one) for one in experts.up], [self._tiled(one) for one in experts.down]
        else:
            self.takes_prompts = False
            found = self._float_experts(experts)
        for name, matrices in zip(("gate_up_proj_bias", "down_proj_bias"), found, strict=True):
            biases = experts._parameters.get(name)
            for expert, matrix in enumerate(matrices if biases is not None else ()):
                matrix.bias = self._pointer(biases[expert])
        return found

    def _float_experts(self, experts: Any) -> tuple[list[Matrix], list[Matrix]]:
        stacks = [getattr(experts, name) for name in expert_stacks(experts)]
        form = FORM_F32_COLUMNS if experts.is_transposed else FORM_F32
        found: list[list[Matrix]] = []
        for stack in stacks:
            across = stack.shape[2]
            sizes = (across, stack.shape[1]) if experts.is_transposed else tuple(stack.shape[1:])
            if experts.is_transposed and across % LANES:
                raise Unsuitable("sizes that are no multiples of a vector")
            found.append([Matrix(form, *sizes, across, self._pointer(one)) for one in stack])
        return found[0], found[1]

    def _put(self, index: int, field: str, module: Any) -> None:
        setattr(self._blocks[index], field, self._matrix(module))
        self._layers[module] = (index, _LAYERS.index(field))

    def _matrix(self, module: Any) -> Matrix:
        self.takes_prompts = self.takes_prompts and isinstance(module, QuantisedLinear)
        if isinstance(module, QuantisedLinear):
            matrix = self._tiled(module.matrix)
        elif isinstance(module, nn.Linear) and module.in_features % LANES == 0:
            matrix = Matrix(FORM_F32, module.out_features, module.in_features, module.in_features)
            matrix.codes = self._pointer(module.weight)
        elif isinstance(module, Conv1D) and module.nf % LANES == 0:
            matrix = Matrix(FORM_F32_COLUMNS, module.nf, module.nx, module.nf, self._pointer(module.weight))
        else:
            raise Unsuitable("weights in another form")
        if module.bias is not None:
            matrix.bias = self._pointer(module.bias)
        matrix.rounds = bool(getattr(module, "rounds_inputs", False))
        return matrix

    def _tiled(self, matrix: Any) -> Matrix:
        if not isinstance(matrix, TiledMatrix):
            raise Unsuitable("weights in another form")
        self._kept += matrix.tensors().values()
        return Matrix.from_buffer_copy(matrix.described)

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return pointer(tensor)

    def _check(self, specs: Sequence[BlockCacheSpec]) -> None:
        """That the sizes fit together, and are whole vectors."""
        shape = self._shape
        attending = (described for described in self._blocks if not described.delta)
        wide = next((described.output.in_ for described in attending), shape.head_dim)
        shape.heads = wide // (shape.value_dim if shape.latent else shape.head_dim)
        narrow, hidden = shape.kv_heads * shape.head_dim, shape.hidden
        for described in self._blocks:
            expected = {"output": (hidden, described.output.in_ if described.delta else wide)}
            shape.inner = max(shape.inner, described.output.in_, described.query.out if not described.delta else 0)
            if not described.delta and not shape.latent:
                gated = described.query.out == 2 * wide
                expected |= {"query": ((1 + gated) * wide, hidden), "key": (narrow, hidden), "value": (narrow, hidden)}
            if not described.experts:
                inner = described.up.out
                expected |= {"up": (inner, hidden), "down": (hidden, inner)}
                if described.gate.codes:
                    expected["gate"] = (inner, hidden)
            for name, (out, into) in expected.items():
                matrix = getattr(described, name)
                if (matrix.out, matrix.in_) != (out, into):
                    raise Unsuitable("matrices of other shapes")
            if described.up.out % LANES:
                raise Unsuitable("sizes that are no multiples of a vector")
        unlike = not shape.latent and any(spec.key_dim != spec.value_dim for spec in specs)
        if unlike or any(size % LANES for size in (hidden, shape.head_dim, shape.inner)):
            raise Unsuitable("sizes that are no multiples of a vector")
        if shape.heads % shape.kv_heads:
            raise Unsuitable("heads that do not share keys evenly")


def _rotary_kind(block: nn.Module, config: Any) -> str | None:
    """The type of the block's layer, if the types have rotary positions of their own."""
    entries = getattr(config, "rope_parameters", None) or {}
    kind = getattr(_submodule(block, "self_attn"), "layer_type", None)
    return kind if isinstance(entries.get(kind), dict) else None


def _outputs(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)


def _submodule(module: nn.Module | None, path: str) -> Any:
    try:
        return None if module is None else module.get_submodule(path)
    except AttributeError:
        return None
