"""Tiny random Llamas as GGUF files, with a byte-level tokenizer and a chat template in their metadata."""

from __future__ import annotations

from math import prod
from pathlib import Path

import gguf
import numpy as np

VOCABULARY = 320
BLOCKS = 3
HIDDEN, FEED_FORWARD, HEADS, KEY_VALUE_HEADS = 64, 96, 4, 2
CHAT_TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"


def write_tiny_gguf(
    file: Path,
    quantisation: str = "Q4_1",
    *,
    seed: int = 0,
    fine_norms: bool = False,
    said_feed_forward: int = FEED_FORWARD,
    extra: dict[str, np.ndarray] | None = None,
    without: str = "",
) -> Path:
    """Writes a Llama of 3 blocks whose matrices are stored as `quantisation`, and returns `file`. Those of kinds whose
    scales have scales are wider than others.

    Args:
        fine_norms: gives the norms values that half precision does not have.
        said_feed_forward: what the metadata claims of the feed-forward's width.
        extra: more float32 tensors, by GGUF name.
        without: the name of a tensor that is left out.
    """
    kind = gguf.GGMLQuantizationType[quantisation]
    super_block = gguf.GGML_QUANT_SIZES[kind][0] == 256
    hidden, width = (256, 256) if super_block else (HIDDEN, FEED_FORWARD)
    writer = _writer(file, BLOCKS, hidden, width if super_block else said_feed_forward)
    random = np.random.default_rng(seed)
    shapes = _shapes(BLOCKS, hidden, width)
    shapes.pop(without.removesuffix(".weight"), None)
    for name, shape in shapes.items():
        if len(shape) == 1:
            norm = np.full(shape, 1.25, np.float32)
            writer.add_tensor(f"{name}.weight", norm + np.float32(1e-6) if fine_norms else norm)
        else:
            writer.add_tensor(f"{name}.weight", stored_rows(quantisation, shape, random), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where in a block of a kind its float16 scales are."""


def stored_rows(quantisation: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Random weights as a GGUF file has them: values quantised, or random bytes of kinds that `gguf` only reads."""
    kind = gguf.GGMLQuantizationType[quantisation]
    try:
        rows: np.ndarray = gguf.quants.quantize(random.normal(0, 0.3, shape).astype(np.float32), kind)
        return rows
    except NotImplementedError:
        inputs, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // inputs, size), dtype=np.uint8)
    for place in SCALES.get(quantisation, ()):
        scales = random.uniform(-0.002, 0.002, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    if quantisation == "MXFP4":
        blocks[..., 0] = random.integers(118, 124, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def write_sparse_gguf(file: Path, blocks: int, hidden: int, feed_forward: int) -> Path:
    """Writes a Llama whose float16 weights are a hole in the file: its size is that of a real one. Returns `file`."""
    writer = _writer(file, blocks, hidden, feed_forward)
    for name, shape in _shapes(blocks, hidden, feed_forward).items():
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor_info(f"{name}.weight", list(shape), np.dtype(kind), prod(shape) * np.dtype(kind).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size + sum(4 * prod(s) for s in _shapes(blocks, hidden, feed_forward).values()))
    return file


def _writer(file: Path, blocks: int, hidden: int, feed_forward: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(blocks)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    return writer


def _shapes(blocks: int, hidden: int, feed_forward: int) -> dict[str, tuple[int, ...]]:
    key_value = hidden // HEADS * KEY_VALUE_HEADS
    shapes = {"token_embd": (VOCABULARY, hidden), "output": (VOCABULARY, hidden), "output_norm": (hidden,)}
    for block in range(blocks):
        shapes |= {
            f"blk.{block}.attn_norm": (hidden,),
            f"blk.{block}.ffn_norm": (hidden,),
            f"blk.{block}.attn_q": (hidden, hidden),
            f"blk.{block}.attn_k": (key_value, hidden),
            f"blk.{block}.attn_v": (key_value, hidden),
            f"blk.{block}.attn_output": (hidden, hidden),
            f"blk.{block}.ffn_gate": (feed_forward, hidden),
            f"blk.{block}.ffn_up": (feed_forward, hidden),
            f"blk.{block}.ffn_down": (hidden, feed_forward),
        }
    return shapes


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    pieces = ["<unk>", "<s>", "</s>", *_byte_pieces(), *("th", "he", "in", "an", "\u0120t", "\u0120th", "\u0120the")]
    pieces += [f"<unused{number}>" for number in range(VOCABULARY - len(pieces))]
    special = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(
        [special if piece.startswith("<") and len(piece) > 1 else gguf.TokenType.NORMAL for piece in pieces]
    )
    writer.add_token_merges(["t h", "h e", "i n", "a n", "\u0120 t", "\u0120t h", "\u0120th e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_pieces() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(hidden))]
