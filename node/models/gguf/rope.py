"""Rotary scaling out of a GGUF file that has it only as a tensor of factors.

llama.cpp stores the frequency scaling of Llama 3.1 and its successors as `rope_freqs.weight`, one divisor for each
frequency, and keeps the settings it was computed from to itself. transformers does not read that tensor, and the model
would lose its way in long texts. The settings are found again and checked against every divisor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ROPE_FACTORS = "rope_freqs.weight"

# The only ones that were ever published with this kind of scaling; the factor itself differs from model to model.
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
_TOLERANCE = 1e-4


def rope_scaling(factors: Sequence[float], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of a configuration that gives `factors`, one for each pair of a head's dimensions.

    None if they are all 1, which scales nothing.

    Raises:
        ValueError: if no scaling that transformers knows gives them.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    factor = round(max(factors), 3)
    expected = _llama3(len(factors), float(config.get("rope_theta", 10000.0)), factor)
    if any(abs(found - wanted) > _TOLERANCE * wanted for found, wanted in zip(factors, expected, strict=True)):
        raise ValueError("its rotary frequencies are scaled in a way that is not known here")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _CONTEXT,
    }


def _llama3(count: int, theta: float, factor: float) -> list[float]:
    """The divisors of `count` frequencies: 1 for short waves, `factor` for long ones, smooth in between."""
    divisors = []
    for place in range(count):
        turns = _CONTEXT * theta ** (-place / count) / (2 * math.pi)  # in the context the model was first trained on
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
