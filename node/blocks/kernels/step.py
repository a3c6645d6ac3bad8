"""A decode step of all blocks of a span in one call of the compiled kernels.

For blocks like Llama's (RMS norm, rotary positions, grouped attention, a gated MLP with SiLU), in float32 on a CPU, for
rows of many sessions of different lengths. Keys and values go into the sessions' own caches, so that prefill, rollback
and reorder are as ever. Whether it computes what transformers does is tried out when a span is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..cache import BlockCacheSpec, SpanCache
from ..quantisation.matrix import QuantisedLinear
from .library import Block, Library, Matrix, Row, Shape
from .tiles import LANES, MOST_ROWS, TiledMatrix

_MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FORM_F32: Final = 0
_POSITIONS: Final = 4096
"""Whose rotations are computed once, when a span is loaded: a few megabytes."""
_LINEARS: Final = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_NORMS: Final = {
    "input_norm": "input_layernorm",
    "output_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions, int64 [1, n], to cosines and sines, [1, n, head dim] each."""


class Unsuitable(Exception):
    """These blocks are not of the kind that the kernels know."""


class SpanStep:
    """The decode step of a span. Not thread-safe. Weights stay those of the blocks' modules.

    Args:
        blocks: modules of transformers, all of the span.
        specs: what they keep, one each.
        config: of the model.
        rotary: the model's own.

    Raises:
        Unsuitable: the kernels do not compute such blocks.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], specs: Sequence[BlockCacheSpec], config: Any, rotary: Rotary, found: Library
    ) -> None:
        if config.model_type not in _MODEL_TYPES or getattr(config, "hidden_act", "") != "silu":
            raise Unsuitable(config.model_type)
        if len({(spec.heads, spec.key_dim, spec.value_dim) for spec in specs}) != 1:
            raise Unsuitable("blocks that keep different things")
        self._functions = found.functions
        self._blocks = (Block * len(blocks))()
        self._kept: list[torch.Tensor] = []  # tensors that the structures point into
        for described, block, spec in zip(self._blocks, blocks, specs, strict=True):
            self._describe(described, block, spec)
        self._shape = self._checked_shape(blocks[0], specs[0], config)
        self._rotary = rotary
        cosines, sines = rotary(torch.arange(_POSITIONS).unsqueeze(0))
        if cosines.shape[-1] != self._shape.head_dim:
            raise Unsuitable("rotary positions of a part of each head")
        self._cosines, self._sines = cosines[0].float(), sines[0].float()
        self._scratch = torch.empty(0)

    def takes(self, caches: Sequence[SpanCache]) -> bool:
        """Whether a step of these sessions has few enough rows."""
        return sum(cache.batch for cache in caches) <= MOST_ROWS

    def run(self, hidden: torch.Tensor, caches: Sequence[SpanCache]) -> torch.Tensor:
        """One token for each row: what the last block of the sessions' part makes of `hidden`.

        All caches are of the same blocks; they get keys and values, and are not advanced.

        Args:
            hidden: float32 [rows of all caches, 1, hidden size].
        """
        count = len(hidden)
        rows = (Row * count)()
        positions: list[int] = []
        for cache in caches:
            memory, length, longest = cache.memory.data_ptr(), cache.length, cache.max_length
            for row, padding in enumerate(cache.left_padding):
                rows[len(positions)] = Row(memory, cache.batch, row, longest, length, padding)
                positions.append(max(length - padding, 0))
        cosines, sines = self._rotations(torch.tensor(positions))
        output = hidden.clone(memory_format=torch.contiguous_format)
        shape = ctypes.byref(self._shape)
        needed = self._functions.petalnode_step_scratch(shape, count, max(cache.length for cache in caches) + 1)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(2 * needed)
        first, blocks = caches[0].first, len(caches[0].specs)
        self._functions.petalnode_step(
            shape,
            ctypes.addressof(self._blocks) + first * ctypes.sizeof(Block),
            blocks,
            rows,
            count,
            cosines.data_ptr(),
            sines.data_ptr(),
            output.data_ptr(),
            self._scratch.data_ptr(),
        )
        return output

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [rows, head dim]."""
        near = positions.clamp(max=_POSITIONS - 1)
        cosines, sines = self._cosines[near], self._sines[near]
        far = positions >= _POSITIONS
        if bool(far.any()):
            beyond = self._rotary(positions[far].unsqueeze(0))
            cosines[far], sines[far] = beyond[0][0].float(), beyond[1][0].float()
        return cosines, sines

    def _describe(self, described: Block, block: nn.Module, spec: BlockCacheSpec) -> None:
        for field, path in _NORMS.items():
            module = _submodule(block, path)
            setattr(described, field, None if module is None else self._pointer(module.weight))
        if described.input_norm is None or described.output_norm is None:
            raise Unsuitable("other norms")
        described.window = spec.window or 0
        for field, path in _LINEARS.items():
            setattr(described, field, self._matrix(_submodule(block, path)))

    def _matrix(self, module: Any) -> Matrix:
        if isinstance(module, QuantisedLinear) and isinstance(module.matrix, TiledMatrix):
            matrix = Matrix.from_buffer_copy(module.matrix.described)
            self._kept += module.matrix.tensors().values()
        elif isinstance(module, nn.Linear) and module.in_features % LANES == 0:
            matrix = Matrix(_FORM_F32, module.out_features, module.in_features, module.in_features)
            matrix.codes = self._pointer(module.weight)
        else:
            raise Unsuitable("weights in another form")
        if module.bias is not None:
            matrix.bias = self._pointer(module.bias)
        return matrix

    def _pointer(self, tensor: torch.Tensor) -> int:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise Unsuitable("weights in another form")
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _checked_shape(self, block: nn.Module, spec: BlockCacheSpec, config: Any) -> Shape:
        attention, norm = _submodule(block, "self_attn"), _submodule(block, "input_layernorm")
        first = self._blocks[0]
        shape = Shape(
            int(config.hidden_size),
            first.query.out // spec.key_dim,
            spec.heads,
            spec.key_dim,
            first.gate.out,
            0,
            float(norm.variance_epsilon),
            float(attention.scaling),
        )
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        expected = {
            "query": (wide, shape.hidden), "key": (narrow, shape.hidden), "value": (narrow, shape.hidden),
            "output": (shape.hidden, wide), "gate": (shape.inner, shape.hidden), "up": (shape.inner, shape.hidden),
            "down": (shape.hidden, shape.inner),
        }  # fmt: skip
        for described in self._blocks:
            for name, (out, into) in expected.items():
                matrix = getattr(described, name)
                if (matrix.out, matrix.in_) != (out, into):
                    raise Unsuitable("matrices of other shapes")
        if spec.key_dim != spec.value_dim or any(size % LANES for size in (shape.hidden, shape.head_dim, shape.inner)):
            raise Unsuitable("sizes that are no multiples of a vector")
        if shape.heads % shape.kv_heads:
            raise Unsuitable("heads that do not share keys evenly")
        return shape


def _submodule(block: nn.Module, path: str) -> Any:
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None
