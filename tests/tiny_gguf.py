"""Tiny random Llamas as GGUF files, with a byte-level tokenizer and a chat template in their metadata."""

from __future__ import annotations

from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    heads: int = HEADS,
) -> Path:
    """Writes a Llama of 3 blocks whose matrices are stored as `quantisation`, and returns `file`. Those of kinds whose
    scales have scales are wider than others.

    Args:
        fine_norms: gives the norms values that half precision does not have.
        said_feed_forward: what the metadata claims of the feed-forward's width.
        extra: more float32 tensors, by GGUF name.
        without: the name of a tensor that is left out.
        heads: what the metadata claims of their number.
    """
    kind = gguf.GGMLQuantizationType[quantisation]
    super_block = gguf.GGML_QUANT_SIZES[kind][0] == 256
    hidden, width = (256, 256) if super_block else (HIDDEN, FEED_FORWARD)
    writer = _writer(file, BLOCKS, hidden, width if super_block else said_feed_forward, heads=heads)
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


ARCHITECTURES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}, {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}, {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}, {"attention.key_length": 32}),
    "qwen3_moe": (
        "qwen3moe",
        {
            "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "norm_topk_prob": True, "tie_word_embeddings": False,
        },
        {
            "attention.key_length": 32, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64,
        },
    ),
    "gemma2": (
        "gemma2", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8},
        {"attention.key_length": 32, "attention.sliding_window": 8},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 2, "pad_token_id": 2}, {}),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2}, {"attention.layer_norm_epsilon": 1e-5}),
}  # fmt: skip
"""By transformers' name: llama.cpp's, fields of the configuration, and more metadata of the file."""


def write_model_gguf(file: Path, kind: str, quantisation: str = "Q4_0", *, seed: int = 0) -> Path:
    """Writes a tiny model of a key of `ARCHITECTURES`, by transformers' own table of names. Returns `file`.

    Values are random; so it does not matter in which order llama.cpp has rows.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture, fields, metadata = ARCHITECTURES[kind]
    hidden, width = 128, 256
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=width, num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS, **fields,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    writer = _writer(file, BLOCKS, hidden, width, architecture)
    writer.add_pad_token_id(2)
    for name, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)  # type: ignore[arg-type]
    random = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[quantisation]
    for gguf_name, name in get_gguf_hf_weights_map(model, processor).items():
        shape = shapes[name]
        if name in (model.all_tied_weights_keys or {}):
            continue
        if "gate_exps" in gguf_name or "up_exps" in gguf_name:
            shape = (shape[0], shape[1] // 2, shape[2])
        stored = gguf_name if gguf_name.endswith((".weight", ".bias")) else f"{gguf_name}.weight"
        if len(shape) == 1 or "gate_inp" in gguf_name:
            writer.add_tensor(stored, random.normal(1 if "norm" in stored else 0, 0.1, shape).astype(np.float32))
        else:
            writer.add_tensor(stored, stored_rows(quantisation, shape, random), raw_dtype=number)
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


def _writer(
    file: Path, blocks: int, hidden: int, feed_forward: int, architecture: str = "llama", heads: int = HEADS
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(blocks)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
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


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
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
