"""Architectures that need more than one rule: rotary embeddings that grow, and models that also see pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.passes import Batch, SpanPasses, run_through
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span
from tests.parity.whole import Whole
from tests.tiny_models import HIDDEN, NUM_BLOCKS, VOCABULARY, load_whole, save_tiny

GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": 12, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "longrope": (
        "phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 12,
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_a_long_session_leaves_a_short_one_alone(kind: str, tmp_path: Path) -> None:
    architecture, fields = GROWING[kind]
    folder = save_tiny(architecture, tmp_path / kind, **fields)
    span = load_span(folder, Span(0, NUM_BLOCKS))
    assert not span.supports_ragged
    lengths = (24, 15)  # both beyond the 12 tokens of training: transformers itself undoes less than that
    ids = [torch.randint(3, VOCABULARY, (1, length + 3)) for length in lengths]
    # One model for each session: what a whole model remembers of another session is not to be copied.
    wholes = [Whole(folder) for _ in lengths]
    theirs = [whole.cache() for whole in wholes]
    mine = [span.make_cache(1, 32) for _ in lengths]
    for step in range(4):
        for place, length in enumerate(lengths):
            now = ids[place][:, :length] if step == 0 else ids[place][:, length + step - 1 : length + step]
            entered, left, _ = wholes[place].step(now, theirs[place])
            assert torch.equal(
                span.decode([(entered, mine[place])])[0] if step else span.forward(entered, mine[place]), left
            )


@torch.no_grad()
def test_a_decoder_that_scales_its_input_in_place(tmp_path: Path) -> None:
    """CTRL multiplies the embeddings that it is given: what enters a span stays as it is."""
    fields = {
        "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": NUM_BLOCKS, "n_head": 4, "dff": 96, "n_positions": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("ctrl", initializer_range=0.2, **fields)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path)
    ids = torch.randint(3, VOCABULARY, (2, 11))
    expected = load_whole(tmp_path)(ids).logits
    client, spans = load_client(tmp_path), [load_span(tmp_path, cut) for cut in (Span(0, 2), Span(2, 6))]
    caches = [span.make_cache(2, 16) for span in spans]
    for start, end in ((0, 8), (8, 10), (10, 11)):
        hidden = client.embed(ids[:, :end])[:, start:end] if start else client.embed(ids[:, :end])
        for span, cache in zip(spans, caches, strict=True):
            before = hidden.clone()
            left = span.decode([(hidden, cache)])[0] if end - start == 1 else span.forward(hidden, cache)
            assert torch.equal(hidden, before)
            hidden = left
        assert (client.head(hidden) - expected[:, start:end]).abs().max() <= 1e-4
    entering = client.embed(ids).requires_grad_()
    passed = run_through(SpanPasses(spans[0], 1 << 24).forward(Batch(Span(0, 2), entering)))
    gradients = run_through(
        SpanPasses(spans[0], 1 << 24).backward(Batch(Span(0, 2), entering), torch.ones_like(passed))
    )
    assert torch.isfinite(gradients.hidden).all()


def test_language_part_of_model_that_sees_pictures(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "sliding_window": 8, "max_position_embeddings": 256, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, VOCABULARY, (2, 11))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    client = load_client(tmp_path)
    hidden = client.embed(ids)
    for cut in (Span(0, 2), Span(2, 6)):
        span = load_span(tmp_path, cut)
        hidden = span.forward(hidden, span.make_cache(2, 16))
    assert (client.head(hidden) - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_gemma3ns_language_part_without_its_encoders(tmp_path: Path) -> None:
    """transformers builds those only with a library that petalnode does without."""
    alone = save_tiny("gemma3n_shared", tmp_path / "alone")
    weights = load_file(alone / "model.safetensors")
    seen = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    seen |= {f"model.{name}.weight": torch.ones(3) for name in ("vision_tower.timm_model.conv", "embed_audio.norm")}
    save_file(seen, tmp_path / "model.safetensors")
    outer = {"model_type": "gemma3n", "text_config": json.loads((alone / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ids = torch.randint(3, VOCABULARY, (2, 11))
    client = load_client(tmp_path)
    hidden = client.embed(ids)
    for cut in (Span(0, 1), Span(1, 6)):
        span = load_span(tmp_path, cut)
        hidden = span.forward(hidden, span.make_cache(2, 16))
    assert torch.equal(client.head(hidden), load_whole(alone)(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("head", ["tied", "tied, says the configuration", "its own"])
def test_seeing_models_outer_tied_head_is_found(head: str, tmp_path: Path) -> None:
    text = {
        "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
        "output_channels": 16, "global_attn_indexes": [0],
    }  # fmt: skip
    tied = head == "tied"
    config = AutoConfig.for_model("got_ocr2", text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    if head == "tied, says the configuration":
        stated = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(stated))
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert not config.text_config.tie_word_embeddings
    ids = torch.randint(3, VOCABULARY, (1, 12))
    client, span = load_client(tmp_path), load_span(tmp_path, Span(0, NUM_BLOCKS))
    hidden = span.forward(client.embed(ids), span.make_cache(1, 16))
    assert (client.head(hidden) - whole(ids).logits).abs().max() <= 1e-5
