"""How coarsely a server may hold its weights, keys and values, and round what weights are multiplied with: names, and
the room they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

from ..errors import BadInput

Quantisation: TypeAlias = Literal["none", "int8", "nf4"]
QUANTISATIONS: Final[tuple[Quantisation, ...]] = get_args(Quantisation)

Activations: TypeAlias = Literal["float32", "int8"]
"""What linear layers multiply: values as they are, or rounded to eight bits (`blocks/quantisation/activations.py`)."""
ACTIVATIONS: Final[tuple[Activations, ...]] = get_args(Activations)

CacheDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
"""How keys and values are held between steps (`blocks/cache.py`); auto: in the dtype that is computed in."""
CACHE_DTYPES: Final[tuple[CacheDtype, ...]] = get_args(CacheDtype)
CACHE_BLOCK: Final = 32
"""Values of a key or value that share a scale where they are held in eight bits."""

Kernels: TypeAlias = Literal["auto", "native", "torch"]
"""What computes a few rows on a CPU: the compiled kernels of `blocks/kernels`, torch, or the quicker one."""
KERNELS: Final[tuple[Kernels, ...]] = get_args(Kernels)

EXACT: Final = "exact-1"
"""The kind of computation whose every operation is defined to the bit (docs/exact.md)."""

NF4_BLOCK: Final = 64
"""Weights that share a scale (QLoRA, Dettmers et al. 2023, section 3)."""
_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK}


@dataclass(frozen=True)
class Numerics:
    """How coarsely a server computes beside its dtype. As text what it announces and signs as its quantisation: the
    weights, such as `nf4`, and behind them what is not as usual, such as `nf4/activations=int8/cache=bfloat16`. Who
    does not know that has no measure for its answers, and does not judge them.

    `exact`: sessions are computed as docs/exact.md has it, with the same bits on every machine; said as `EXACT`.
    """

    weights: Quantisation = "none"
    activations: Activations = "float32"
    cache: CacheDtype = "auto"
    exact: bool = False

    def __str__(self) -> str:
        parts: list[str] = [self.weights]
        if self.activations != "float32":
            parts.append(f"activations={self.activations}")
        if self.cache not in ("auto", "float32"):
            parts.append(f"cache={self.cache}")
        return "/".join([*parts, EXACT] if self.exact else parts)

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """
        Raises:
            BadInput: it is no such text.
        """
        weights, said = _parts(text)
        activations, held = said.get("activations", "float32"), said.get("cache", "auto")
        parsed = cls(cast(Quantisation, weights), cast(Activations, activations), cast(CacheDtype, held), EXACT in said)
        known = weights in QUANTISATIONS and activations in ACTIVATIONS and held in CACHE_DTYPES
        if not known or str(parsed) != text:
            raise BadInput(f"{text!r} is no kind of computation that is known here")
        return parsed


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """The weights, and what is said behind them."""
    weights, *others = text.split("/")
    return weights, dict(other.partition("=")[::2] for other in others)


def describe_numerics(dtype: str, quantisation: str) -> str:
    """What a server computes in, for people, from what it announces: "int8 weights in float32"."""
    weights, said = _parts(quantisation)
    held = dtype if weights in ("", "none") else f"{weights} weights in {dtype}"
    names = {"activations": "activations", "cache": "keys and values"}
    others = [f"{said[name]} {what}" for name, what in names.items() if name in said]
    told = f"{held} with {' and '.join(others)}" if others else held
    return f"{told}, exact to the bit" if EXACT in said else told


def is_exact(quantisation: str) -> bool:
    """Whether who announces this computes sessions with the same bits as everybody."""
    return quantisation.endswith(f"/{EXACT}")


def within_tolerance(quantisation: str) -> str:
    """The kind of computation that has the same answers but for roundings: what is said without `EXACT`."""
    return quantisation.removesuffix(f"/{EXACT}")


def key_bytes(cache: CacheDtype, values: int, item: int) -> int:
    """What a key or value of one head takes: `values` values of `item` bytes each in the computed dtype.

    In eight bits: a byte for each, up to an even number, and a bfloat16 scale for each `CACHE_BLOCK` of them.
    """
    if cache == "int8":
        return values + values % 2 + 2 * math.ceil(values / CACHE_BLOCK)
    return values * (2 if cache == "bfloat16" else item)


def held_bytes(quantisation: Quantisation, shape: tuple[int, ...], nbytes: int) -> int:
    """What a server needs for a tensor of a block that has `nbytes` in the checkpoint; about, and in time for choosing
    how many blocks to take. Matrices and stacks of matrices shrink, vectors do not.
    """
    if quantisation == "none" or len(shape) < 2:
        return nbytes
    return int(math.prod(shape) * _BYTES[quantisation])
