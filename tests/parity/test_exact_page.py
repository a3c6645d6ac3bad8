"""docs/exact.md is enough to compute the exact kind: an implementation from the page alone gives the same bits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from petalnode.node.blocks.kernels.library import Library
from petalnode.node.blocks.kernels.tiles import TiledMatrix
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span
from tests.tiny_gguf import stored_rows
from tests.tiny_models import HIDDEN, save_tiny

Floats = NDArray[np.float32]
one = np.float32
HEADS, KV_HEADS, DIM, EPS, BASE = 4, 2, 16, one(1e-6), 10_000.0
TOKENS = 7


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """With one rounding: the product is exact in double, the sum is rounded to odd there."""
    product, added = np.float64(a) * np.float64(b), np.float64(c)
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    even = (np.atleast_1d(total).view(np.int64) & 1 == 0).reshape(np.shape(total))
    return np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def total(lanes: Floats) -> Floats:
    """[..., 16]."""
    f = (lanes[..., 0:4] + lanes[..., 8:12]) + (lanes[..., 4:8] + lanes[..., 12:16])
    return (f[..., 0] + f[..., 2]) + (f[..., 1] + f[..., 3])


def dot(x: Floats, weights: Floats) -> Floats:
    """The product of x [inputs] with row-major weights [outputs, inputs]."""
    sums = np.zeros((len(weights), 16), np.float32)
    for first in range(0, len(x), 16):
        sums = fma(weights[:, first : first + 16], x[first : first + 16], sums)
    return total(sums)


def packed(x: Floats, codes: Floats, scales: Floats, offsets: Floats | None) -> Floats:
    """With packed weights in blocks of 32: codes [outputs, inputs], scales and offsets [outputs, blocks]."""
    sums = np.zeros(len(codes), np.float32)
    for block in range(scales.shape[1]):
        part, own = np.zeros(len(codes), np.float32), x[32 * block : 32 * block + 32]
        for place, value in enumerate(own):
            part = fma(codes[:, 32 * block + place], value, part)
        sums = fma(scales[:, block], part, sums)
        if offsets is not None:
            sums = fma(offsets[:, block], total(own[:16]) + total(own[16:]), sums)
    return sums


def packed_bytes(x: Floats, codes: Floats, scales: Floats, offsets: Floats) -> Floats:
    """The same with rounded x, and codes 0 .. 15."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1)
    own, steps = rounded(blocks * (one(127) / largest)[:, None]), largest / one(127)
    sums = np.zeros(len(codes), np.float32)
    for block, (row, step) in enumerate(zip(own, steps, strict=True)):
        whole = codes[:, 32 * block : 32 * block + 32] @ row  # to the bit: whole numbers below 2 ** 24
        sums = sums + (scales[:, block] * step) * whole
        sums = sums + offsets[:, block] * (step * row.sum())
    return sums


def rounded(x: Floats) -> Floats:
    return (x + one(1.5 * 2**23)) - one(1.5 * 2**23)


def held(x: Floats, form: str) -> Floats:
    """What keys or values [heads, DIM] are held as."""
    if form == "bfloat16":
        return torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    if form == "int8":
        scale = np.abs(x).max(axis=1, keepdims=True) / one(127)
        up = ((scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
        return rounded(x / up) * up
    return x


def exponential(x: Floats) -> Floats:
    x = np.clip(x, one(-87), one(88))
    n = rounded(x * one(1.44269504))
    r = x - n * one(0.693359375) + n * one(2.12194440e-4)
    p = np.full_like(r, 1.9875691500e-4)
    for next_one in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + one(next_one)
    return (p * r * r + r + one(1)) * np.exp2(n).astype(np.float32)


def norm(x: Floats, weight: Floats) -> Floats:
    factor = one(1) / np.sqrt(dot(x, x[None])[0] / one(len(x)) + EPS)
    return weight * (x * factor)


def rotated(heads: Floats, position: int) -> Floats:
    """[heads, DIM]."""
    powers = [one(math.exp(float(one(2 * i) / one(DIM)) * math.log(BASE))) for i in range(DIM // 2)]
    angles = np.float64([one(position) * (one(1) / power) for power in powers])
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = heads[:, : DIM // 2], heads[:, DIM // 2 :]
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=1)


def attended(query: Floats, keys: Floats, values: Floats) -> Floats:
    """Of one head: query [DIM], keys and values [tokens, DIM]."""
    scores = dot(query, keys) * one(DIM**-0.5)
    shares = exponential(scores - scores.max())
    added = one(0)
    for share in shares:
        added = added + share
    out = np.zeros(DIM, np.float32)
    for share, value in zip(shares / added, values, strict=True):
        out = fma(share, value, out)
    return out


class Block:
    """A block of Llama's."""

    def __init__(self, weights: dict[str, Floats], number: int, form: str) -> None:
        self._form = form
        prefix = f"model.layers.{number}."
        self._weights = {key.removeprefix(prefix): held for key, held in weights.items() if key.startswith(prefix)}
        self._keys = np.zeros((0, KV_HEADS, DIM), np.float32)
        self._values = self._keys

    def _product(self, name: str, x: Floats) -> Floats:
        return dot(x, self._weights[f"{name}_proj.weight"])

    def token(self, x: Floats) -> Floats:
        entering, position = norm(x, self._weights["input_layernorm.weight"]), len(self._keys)
        query, key, value = (self._product(f"self_attn.{name}", entering).reshape(-1, DIM) for name in "qkv")
        self._keys = np.concatenate([self._keys, held(rotated(key, position), self._form)[None]])
        self._values = np.concatenate([self._values, held(value, self._form)[None]])
        group = HEADS // KV_HEADS
        heads = [
            attended(head, self._keys[:, index // group], self._values[:, index // group])
            for index, head in enumerate(rotated(query, position))
        ]
        x = x + self._product("self_attn.o", np.concatenate(heads))
        entering = norm(x, self._weights["post_attention_layernorm.weight"])
        gate = self._product("mlp.gate", entering)
        inner = gate / (one(1) + exponential(-gate)) * self._product("mlp.up", entering)
        return x + self._product("mlp.down", inner)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_blocks_by_the_page(form: str, tmp_path: Path, kernels: Library) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    kind = "none/exact-1" if form == "float32" else f"none/cache={form}/exact-1"
    span = load_span(folder, Span(0, 2), device="cpu", dtype="float32", quantisation=kind)
    weights = load_file(folder / "model.safetensors")
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    given = span.forward(hidden, span.make_cache(1, TOKENS))
    for block in (Block(weights, 0, form), Block(weights, 1, form)):
        hidden = torch.stack([torch.from_numpy(block.token(token.numpy())) for token in hidden[0]])[None]
    assert torch.equal(hidden, given)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_products_with_packed_weights_by_the_page(kind: str, kernels: Library) -> None:
    out, inputs = 48, 96
    rows = stored_rows(kind, (out, inputs), np.random.default_rng(2))
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2))
    matrix = TiledMatrix.of_stored(kind, [rows], (out, inputs))
    given = matrix.by_kernels(x)
    matrix.round_rows()
    with_rounded = matrix.by_kernels(x)
    blocks = rows.reshape(out, inputs // 32, -1)  # of halves, and of bytes with the codes of inputs k and k + 16
    halves, bytes_ = blocks[..., :-16].copy().view(np.float16).astype(np.float32), blocks[..., -16:]
    codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(out, inputs).astype(np.float32) - one(8)
    scales = halves[..., 0]
    offsets = fma(scales, one(8), halves[..., 1]) if kind == "Q4_1" else None
    plain = halves[..., 1] if kind == "Q4_1" else scales * one(-8)
    for row, expected, other in zip(x.numpy(), given.numpy(), with_rounded.numpy(), strict=True):
        assert np.array_equal(packed(row, codes, scales, offsets), expected)
        assert np.array_equal(packed_bytes(row, codes + one(8), scales, plain), other)
