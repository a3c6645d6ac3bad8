"""Rotary positions are computed without a library, as transformers has them but for the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.kernels.rotary import exact_frequencies, exponential, logarithm

KINDS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 150000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
]


@pytest.mark.parametrize("parameters", KINDS, ids=[kind["rope_type"] for kind in KINDS])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    theirs = LlamaRotaryEmbedding(config)
    found = exact_frequencies(config, None)
    assert found is not None
    assert float((found[0] / theirs.inv_freq - 1).abs().max()) < 4e-7
    assert abs(found[1] - theirs.attention_scaling) < 1e-12


def test_kinds_undefined_to_the_bit_have_none() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert exact_frequencies(LlamaConfig(rope_parameters=parameters), None) is None


def test_powers_and_logarithms_are_right_to_last_bits() -> None:
    for number in (1e-30, 0.3, 0.99999, 1.0, 1.00001, 2.0, 10.0, 5e5, 1e300):
        assert abs(logarithm(number) - math.log(number)) <= 1e-15 * max(1.0, abs(math.log(number)))
    for number in (-600.0, -3.3, -1e-9, 0.0, 0.34, 1.0, 13.7, 700.0):
        assert abs(exponential(number) / math.exp(number) - 1) <= 1e-15


def test_cosines_and_sines_are_the_nearest_float32() -> None:
    found = library()
    assert found is not None
    frequencies = torch.tensor([1.0, 0.6180339, 1.5707964, 1e-3, 3e-7])
    positions = torch.cat(
        [torch.arange(3000), torch.randint(1 << 20, (3000,), generator=torch.Generator().manual_seed(1))]
    )
    given = torch.empty(2, len(positions), 10)
    found.functions.petalnode_rotary(
        frequencies.data_ptr(), 5, 1.0, positions.data_ptr(), len(positions), given[0].data_ptr(), given[1].data_ptr()
    )
    angles = (positions.float().unsqueeze(1) * frequencies).repeat(1, 2).tolist()
    for of, expected in zip(given, (math.cos, math.sin), strict=True):
        right = torch.tensor([[expected(angle) for angle in row] for row in angles], dtype=torch.float64)
        assert torch.equal(of, right.float())
