"""Frequencies of rotary positions (Su et al. 2021) for the exact kind of computation.

As `transformers.modeling_rope_utils` has them but for a last bit now and then: powers and logarithms are computed here
in double, by sums, products and quotients alone: their bits are the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_LN2_HIGH: Final = 6.93147180369123816490e-01  # 33 bits: its products with exponents are exact
_LN2_LOW: Final = 1.90821492927058770002e-10
_PI: Final = 3.141592653589793

_Floats = NDArray[np.float32]


def logarithm(x: float) -> float:
    """Of a positive number, within 1e-15 of it or of 1."""
    fraction, exponent = math.frexp(x)  # exact
    if fraction < 0.7071067811865476:
        fraction, exponent = 2.0 * fraction, exponent - 1
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square, total = ratio * ratio, 0.0
    for odd in range(25, 0, -2):
        total = total * square + 1.0 / odd
    return exponent * _LN2_HIGH + (2.0 * ratio * total + exponent * _LN2_LOW)


def exponential(x: float) -> float:
    """e^x for |x| below 700, to a relative error of 1e-15."""
    turns = math.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - turns * _LN2_HIGH) - turns * _LN2_LOW
    total = 1.0
    for number in range(17, 0, -1):
        total = 1.0 + total * rest / number
    return math.ldexp(total, turns)  # exact


def exact_frequencies(config: Any, layer_type: str | None) -> tuple[torch.Tensor, float] | None:
    """float32 [rotated dim / 2], and what cosines and sines are multiplied with; None for kinds of rotary positions
    that are not defined to the bit."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(heads * parameters.get("partial_rotary_factor", 1.0))
    of_base = logarithm(float(parameters["rope_theta"]))
    shares = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.array([exponential(share * of_base) for share in shares.tolist()]).astype(np.float32)
    frequencies, scale = 1.0 / powers, 1.0
    match parameters["rope_type"]:
        case "default":
            pass
        case "linear":
            frequencies = frequencies / np.float32(parameters["factor"])
        case "llama3":
            frequencies = _llama3(frequencies, parameters)
        case "yarn":
            frequencies, scale = _yarn(powers, dim, of_base, parameters, config)
        case _:
            return None
    return torch.from_numpy(frequencies.astype(np.float32)), scale


def _llama3(plain: _Floats, parameters: dict[str, Any]) -> _Floats:
    """Long waves `factor` times as slow, those of middle length in between (Llama 3.1)."""
    low, high, length = (
        parameters[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    waves = 2.0 * _PI / plain
    slowed = np.where(waves > length / low, plain / parameters["factor"], plain)
    share = (length / waves - low) / (high - low)
    smoothed = (1.0 - share) * slowed / parameters["factor"] + share * slowed
    return np.where((waves >= length / high) & (waves <= length / low), smoothed, slowed)


def _yarn(powers: _Floats, dim: int, of_base: float, parameters: dict[str, Any], config: Any) -> tuple[_Floats, float]:
    """Peng et al. 2023, sections 3.2 and 3.4."""
    length = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or config.max_position_embeddings / length
    turns = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    low, high = (dim * logarithm(length / (number * 2.0 * _PI)) / (2.0 * of_base) for number in turns)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    slowed = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    kept = 1.0 - slowed
    frequencies = (1.0 / (factor * powers)) * (1.0 - kept) + (1.0 / powers) * kept
    scale = parameters.get("attention_factor")
    if scale is None:
        of_length = 0.1 * logarithm(factor) if factor > 1 else 0.0
        by_one, by_all = parameters.get("mscale") or 0.0, parameters.get("mscale_all_dim") or 0.0
        both = by_one and by_all
        scale = (by_one * of_length + 1.0) / (by_all * of_length + 1.0) if both else of_length + 1.0
    return frequencies, float(scale)
