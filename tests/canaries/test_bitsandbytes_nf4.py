"""bitsandbytes with AVX-512: NF4 with rows of a multiple of 32 weights, but not of 64, gets wrong scales."""

from __future__ import annotations

import pytest
import torch

CURED = "bitsandbytes has cured it: docs/decisions/nf4-on-cpu.md says what can be thrown away"
functional = pytest.importorskip("bitsandbytes").functional


def dequantised(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """As bitsandbytes gives it, and as the same codes and scales give it in rows of whole blocks."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    code, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    given = functional.dequantize_4bit(code, state)
    state.shape = torch.Size((weight.numel() // 64, 64))
    return given, functional.dequantize_4bit(code, state).view(shape)


def test_rows_of_whole_blocks_are_right() -> None:
    given, right = dequantised((64, 128))
    assert torch.equal(given, right)


def test_avx512_errs_in_rows_ending_inside_a_block() -> None:
    given, right = dequantised((64, 96))
    assert torch.allclose(given, right) is ("AVX512" not in torch.backends.cpu.get_cpu_capability()), CURED
