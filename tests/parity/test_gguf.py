"""Blocks and ends of GGUF files of several architectures, against transformers' own reading of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.kernels import library
from petalnode.node.blocks.kernels.tiles import TiledMatrix
from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.node.blocks.quantisation.slots import QuantisedExperts
from petalnode.node.blocks.span import load_span
from petalnode.node.models import resolve
from petalnode.protocols.ids import Span
from tests.parity.gguf_logits import TOKENS, logits
from tests.tiny_gguf import ARCHITECTURES, BLOCKS, write_model_gguf

logging.disable_progress_bar()
KERNELS = ("torch", *(["native"] if library.library() is not None else []))


pytestmark = pytest.mark.usefixtures("cache")


def as_transformers_reads(file: Path, config: Any) -> Any:
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model.float().eval()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.inference_mode()
def test_answers_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str, kernels: Any) -> None:
    file = write_model_gguf(tmp_path / f"{kind}.gguf", kind)
    folder = resolve(file)
    options: Any = {"dtype": "float32", "device": "cpu", "kernels": kernels}
    spans = [load_span(folder.path, part, **options) for part in (Span(0, 1), Span(1, BLOCKS))]
    client = load_client(folder.path, **options)
    whole = as_transformers_reads(file, AutoConfig.from_pretrained(folder.path))
    ids = torch.randint(3, 300, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    expected, found = whole(ids).logits, logits(client, spans, ids)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.skipif(library.library() is None, reason="the kernels are not built (make setup, with a C compiler)")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_matrices_are_held_in_bits_of_file(tmp_path: Path, kind: str) -> None:
    file = write_model_gguf(tmp_path / f"{kind}.gguf", kind, "Q8_0")
    blocks = load_span(resolve(file).path, Span(0, BLOCKS), dtype="float32", device="cpu", kernels="native")
    modules = [module for block in blocks.stack.blocks for module in block.modules()]
    linear = [module.matrix for module in modules if isinstance(module, QuantisedLinear)]
    experts = [
        matrix for module in modules if isinstance(module, QuantisedExperts) for matrix in module.up + module.down
    ]
    assert len(linear) + len(experts) == BLOCKS * {"phi3": 4, "qwen3_moe": 12, "starcoder2": 6}.get(kind, 7)
    assert all(isinstance(matrix, TiledMatrix) and matrix.form == "q8_half" for matrix in linear + experts)
    assert blocks.step is not None or kind == "starcoder2"
