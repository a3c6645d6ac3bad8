"""GGUF files of the architectures in our own table and some others, as llama.cpp's converters write them, against
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.kernels import library
from petalnode.node.blocks.kernels.heads import HeadMatrices
from petalnode.node.blocks.kernels.tiles import TiledMatrix
from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.node.blocks.quantisation.slots import QuantisedExperts
from petalnode.node.blocks.span import load_span
from petalnode.node.models import resolve
from petalnode.node.models.folder import open_folder
from petalnode.node.models.gguf.architectures import ARCHITECTURES
from petalnode.protocols.ids import Span
from tests.llama_cpp_layout import BLOCKS, LAYOUTS, write_layout
from tests.parity.gguf_logits import TOKENS, logits

pytestmark = pytest.mark.usefixtures("cache")
BY_TRANSFORMERS = ("gemma3", "lfm2", "nemotron", "phi3", "stablelm")
"""Which it reads itself, and whose files have something that Llama's have not."""
DRAFTS = ("glm4moe", "qwen35moe")
"""Of which the file has a block more, a head for drafts, which is left out."""


def tokens() -> torch.Tensor:
    return torch.randint(3, 300, (1, TOKENS), generator=torch.Generator().manual_seed(5))


def served(folder: Path, kernels: Any) -> torch.Tensor:
    options: Any = {"dtype": "float32", "device": "cpu", "kernels": kernels}
    blocks = open_folder(folder, "model").num_blocks
    spans = [load_span(folder, part, **options) for part in (Span(0, 1), Span(1, blocks))]
    return logits(load_client(folder, **options), spans, tokens())


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_architecture_of_the_table_is_tried() -> None:
    tried = {kind.partition(" ")[0] for kind in LAYOUTS}
    assert tried == {*ARCHITECTURES, *BY_TRANSFORMERS}


@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_answers_are_those_of_model_that_was_converted(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    model = write_layout(file, kind, drafts=kind in DRAFTS)
    expected, found = model(tokens()).logits, served(resolve(file).path, "torch")
    assert off(found, expected) < 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.skipif(library.library() is None, reason="the kernels are not built (make setup, with a C compiler)")
@pytest.mark.parametrize("kind", ["deepseek2", "deepseek2 of softmax"])
@pytest.mark.parametrize("stored", ["Q4_1", "Q8_0", "BF16"])
@torch.inference_mode()
def test_matrices_of_latents_stay_in_bits_of_file(tmp_path: Path, stored: str, kind: str) -> None:
    file = tmp_path / "model.gguf"
    write_layout(file, kind, stored)
    options: Any = {"dtype": "float32", "device": "cpu"}
    spans = [load_span(resolve(file).path, Span(0, 2), kernels=kernels, **options) for kernels in ("torch", "native")]
    assert spans[1].step is not None
    held = spans[1].stack.blocks[0].get_submodule("self_attn.kv_b_proj")
    assert isinstance(held, QuantisedLinear) and isinstance(held.matrix, HeadMatrices)
    hidden = torch.randn(2, 12, spans[0].hidden_size, generator=torch.Generator().manual_seed(1))
    said = []
    for span in spans:
        cache = span.make_cache(2, 12, [0, 3])
        parts = [span.forward(part, cache) for part in hidden.split((9, 1, 2), dim=1)]
        said.append(torch.cat(parts, dim=1))
    assert off(said[1], said[0]) < 1e-5


@pytest.mark.skipif(library.library() is None, reason="the kernels are not built (make setup, with a C compiler)")
@pytest.mark.parametrize("kind", ["deepseek2", "gemma4 of experts", "gpt-oss", "qwen35moe"])
@torch.inference_mode()
def test_experts_stay_in_the_bits_of_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    write_layout(file, kind, "Q8_0")
    folder = resolve(file).path
    assert off(served(folder, "native"), served(folder, "torch")) < 1e-5
    block = load_span(folder, Span(BLOCKS - 1, BLOCKS), dtype="float32", device="cpu", kernels="native").stack.blocks[0]
    experts = [module for module in block.modules() if isinstance(module, QuantisedExperts)]
    assert experts
    for matrix in (*experts[0].up, *experts[0].down):
        assert isinstance(matrix, TiledMatrix) and matrix.form == "q8_half"


@pytest.mark.skipif(library.library() is None, reason="the kernels are not built (make setup, with a C compiler)")
@pytest.mark.parametrize("kind", ["bloom", "falcon", "gpt2"])
@torch.inference_mode()
def test_matrices_stay_in_the_bits_of_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    write_layout(file, kind, "Q8_0")
    folder = resolve(file).path
    assert off(served(folder, "native"), served(folder, "torch")) < 1e-5
    block = load_span(folder, Span(0, 1), dtype="float32", device="cpu", kernels="native").stack.blocks[0]
    linear = [module.matrix for module in block.modules() if isinstance(module, QuantisedLinear)]
    assert len(linear) == 4  # queries, keys and values as one
    assert all(isinstance(matrix, TiledMatrix) and matrix.form == "q8_half" for matrix in linear)
