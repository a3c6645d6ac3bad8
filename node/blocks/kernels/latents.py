"""Multi-head latent attention (arXiv 2405.04434, section 2.1) in a step of the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import nn

from .heads import HeadMatrices
from .library import Block, Matrix, Shape, Unsuitable
from .tiles import LANES, TiledMatrix, rows_of


def has_latents(attention: nn.Module) -> bool:
    return hasattr(attention, "kv_lora_rank")


def describe_latents(described: Block, shape: Shape, attention: Any, config: Any, whole: Matrix | None) -> list[Any]:
    """What each head has for itself, where `described` has all that heads share. `whole`: `kv_b`, if it is one matrix.

    Returns:
        What has to be kept.

    Raises:
        Unsuitable: the kernels do not compute such attention.
    """
    rank, turned, plain = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    heads, wide, hidden = attention.num_heads, attention.v_head_dim, shape.hidden
    shape.latent, shape.head_dim, shape.value_dim, shape.kv_heads = rank, plain + turned, wide, 1
    shape.latent_eps = float(attention.kv_a_layernorm.variance_epsilon)
    shape.pairs = 1 if config.model_type == "deepseek_v2" else 2 * bool(config.rope_interleave)
    described.scale = float(attention.scaling)
    low = described.low.out
    shape.low = max(shape.low, low)
    sizes = [(described.query, heads * (plain + turned), low or hidden), (described.key, rank + turned, hidden)]
    sizes += [(described.output, hidden, heads * wide), (described.low, low, hidden if low else 0)]
    if any((one.out, one.in_) != (out, into) for one, out, into in sizes):
        raise Unsuitable("matrices of other shapes")
    if any(size % LANES for size in (plain, wide, rank, turned, low)) or max(plain, turned) > LANES * LANES:
        raise Unsuitable("sizes that are no multiples of a vector")
    held: Any = getattr(attention.kv_b_proj, "matrix", None)
    if whole is None:
        parts = (_of(held.keys), 0, rank, rank), (_of(held.values), 0, wide, wide)
    else:
        parts = (whole, 0, plain, plain + wide), (whole, plain, wide, plain + wide)
        described.turned = True
    array = (Matrix * (2 * heads))()
    for place, (matrix, first, rows, apart) in enumerate(parts):
        for head in range(heads):
            array[2 * head + place] = rows_of(matrix, first + head * apart, rows)
            array[2 * head + place].rounds = False  # latents and queries stay as they are
    described.latent = ctypes.addressof(array)
    return [array, held]


def in_two(attention: Any) -> bool:
    """Whether `kv_b` is a pair of matrices."""
    return isinstance(getattr(attention.kv_b_proj, "matrix", None), HeadMatrices)


def score_floats(shape: Shape, rows: int) -> int:
    """float32 that each thread needs for a head of `rows` rows."""
    return int(rows * (shape.head_dim + shape.value_dim + 2 * shape.latent)) if shape.latent else 0


def _of(matrix: TiledMatrix) -> Matrix:
    return Matrix.from_buffer_copy(matrix.described)
