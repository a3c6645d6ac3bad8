"""Makes a GGUF file of a real shape with random weights and the default model's tokenizer.

    python benchmarks/make_gguf.py SHAPE OUT.gguf [--kind Q4_0|Q4_K] [--blocks N] [--experts N] [--written A:B]

SHAPE is a name below. Random codes with scales that keep activations sane. Tensors are written one by one, so the disk
alone bounds the size; `--blocks` makes a model of fewer blocks than the shape has, `--experts` one of fewer experts, of
which a token uses as many; with `--written`, all other blocks are holes in the file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from petalnode.node.models import resolve
from petalnode.node.models.checkpoint import Checkpoint

POOL: Final = 1 << 26
ALIGNMENT: Final = 32
DEVIATION: Final = 0.7
"""Of a row's product with values of deviation one."""


@dataclass(frozen=True)
class Shape:
    arch: str
    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    used: int = 0
    expert_inner: int = 0
    shared: int = 0
    dense: int = 0
    latent: int = 0
    turned: int = 0
    value_dim: int = 0


SHAPES: Final = {
    "llama-1b": Shape("llama", 22, 2048, 32, 4, 64, 5632),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336),
    "llama-70b": Shape("llama", 80, 8192, 64, 8, 128, 28672),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 6144, 128, 8, 768),
    "deepseek-v2-lite": Shape("deepseek2", 27, 2048, 16, 1, 192, 10944, 64, 6, 1408, 2, 1, 512, 64, 128),
}
KINDS: Final = {"Q4_0": (32, 18), "Q4_K": (256, 144)}
"""Inputs that share a scale, and their bytes."""


def tensors(shape: Shape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (vocabulary, hidden)
    for number in range(shape.blocks):
        own: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        own |= {"attn_q": (wide, hidden)}
        if shape.latent:
            latent, plain = shape.latent, shape.head_dim - shape.turned
            own |= {"attn_kv_a_mqa": (latent + shape.turned, hidden), "attn_kv_a_norm": (latent,)}
            own |= {"attn_k_b": (shape.heads, latent, plain), "attn_v_b": (shape.heads, shape.value_dim, latent)}
            own |= {"attn_output": (hidden, shape.heads * shape.value_dim)}
        else:
            own |= {"attn_k": (narrow, hidden), "attn_v": (narrow, hidden), "attn_output": (hidden, wide)}
        if shape.arch.startswith("qwen3"):
            own |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
        if number >= shape.dense and shape.experts:
            stack = (shape.experts, shape.expert_inner, hidden)
            own |= {"ffn_gate_inp": (shape.experts, hidden), "ffn_gate_exps": stack, "ffn_up_exps": stack}
            own |= {"ffn_down_exps": (shape.experts, hidden, shape.expert_inner)}
            inner = shape.shared * shape.expert_inner
            if inner:
                own |= {"ffn_gate_shexp": (inner, hidden), "ffn_up_shexp": (inner, hidden)}
                own |= {"ffn_down_shexp": (hidden, inner)}
        else:
            own |= {"ffn_gate": (shape.inner, hidden), "ffn_up": (shape.inner, hidden)}
            own |= {"ffn_down": (hidden, shape.inner)}
        yield from ((f"blk.{number}.{name}.weight", of) for name, of in own.items())
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocabulary, hidden)


def is_plain(name: str, of: tuple[int, ...]) -> bool:
    return len(of) == 1 or "gate_inp" in name


def values(name: str, of: tuple[int, ...], kind: str, pool: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The bytes of a tensor, as the writer takes them."""
    if is_plain(name, of):
        return np.ones(of, np.float32) if len(of) == 1 else random.normal(0, 0.05, of).astype(np.float32)
    inputs, nbytes = KINDS[kind]
    row = DEVIATION / of[-1] ** 0.5
    blocks = np.resize(pool[int(random.integers(0, 1 << 20)) :], prod(of) // inputs * nbytes).reshape(-1, nbytes)
    if kind == "Q4_0":
        blocks[:, :2] = np.array([row / 4.6], np.float16).view(np.uint8)
    else:
        blocks[:, :4] = np.array([row / 258, 7.5 * row / 258], np.float16).view(np.uint8)
    return blocks.reshape(*of[:-1], of[-1] // inputs * nbytes)


def write_header(writer: gguf.GGUFWriter, shape: Shape, source: Path) -> int:
    """The metadata; returns the size of the vocabulary."""
    vocabulary = 0
    for name, held in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            value, kind = held.contents(), held.types[0]
            if name == "tokenizer.ggml.tokens":
                vocabulary = len(value)
            if kind == gguf.GGUFValueType.ARRAY:
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, kind)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.latent + shape.turned or shape.head_dim)
    writer.add_value_length(shape.latent or shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)
    if shape.latent:
        writer.add_key_length_mla(shape.head_dim)
        writer.add_value_length_mla(shape.value_dim)
        writer.add_kv_lora_rank(shape.latent)
        writer.add_rope_dimension_count(shape.turned)
        writer.add_leading_dense_block_count(shape.dense)
        writer.add_expert_shared_count(shape.shared)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if shape.arch == "llama":
        writer.add_rope_dimension_count(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.expert_inner)
    return vocabulary


def make(shape: Shape, out: Path, kind: str, written: range) -> None:
    source = Checkpoint(resolve("smollm2").path).gguf[0]
    writer = gguf.GGUFWriter(out, shape.arch)
    named = list(tensors(shape, write_header(writer, shape, source)))
    inputs, nbytes_of_run = KINDS[kind]
    for name, of in named:
        if is_plain(name, of):
            writer.add_tensor_info(name, of, np.dtype(np.float32), 4 * prod(of))
        else:
            stored = (*of[:-1], of[-1] // inputs * nbytes_of_run)
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), prod(stored), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(7)
    pool = random.integers(0, 256, POOL, dtype=np.uint8)
    for name, of in named:
        if name.startswith("blk.") and int(name.split(".")[1]) not in written:
            nbytes = 4 * prod(of) if is_plain(name, of) else prod(of) // inputs * nbytes_of_run
            writer.tensors[0].pop(name)
            writer.fout[0].seek(-(-nbytes // ALIGNMENT) * ALIGNMENT, os.SEEK_CUR)
        else:
            writer.write_tensor_data(values(name, of, kind, pool, random))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="Q4_0")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--written", default="")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    first, _, end = options.written.partition(":")
    blocks = options.blocks or shape.blocks
    shape = replace(shape, blocks=blocks, experts=options.experts or shape.experts)
    make(shape, options.out, options.kind, range(int(first or 0), int(end or blocks)))


if __name__ == "__main__":
    main()
