"""How coarsely a server may hold its weights: the names, and how much room each takes."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, get_args

from ..errors import BadInput

Quantisation: TypeAlias = Literal["none", "int8", "nf4"]
QUANTISATIONS: Final[tuple[Quantisation, ...]] = get_args(Quantisation)

Kernels: TypeAlias = Literal["auto", "native", "torch"]
"""What computes a few rows on a CPU: the compiled kernels of `blocks/kernels`, torch, or the quicker one."""
KERNELS: Final[tuple[Kernels, ...]] = get_args(Kernels)

NF4_BLOCK: Final = 64
"""Weights that share a scale (QLoRA, Dettmers et al. 2023, section 3)."""
_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK}


def choose_quantisation(text: str) -> Quantisation:
    """
    Raises:
        BadInput: it is none of the names.
    """
    if text not in QUANTISATIONS:
        raise BadInput(
            f"--quant {text}: give none, int8 (a quarter of float32's memory, almost the same answers) or nf4 (a "
            "seventh, answers differ somewhat)"
        )
    return text


def choose_kernels(text: str) -> Kernels:
    """
    Raises:
        BadInput: it is none of the names.
    """
    for name in KERNELS:
        if text == name:
            return name
    raise BadInput(f"--kernels {text}: give auto (the quickest on this machine), native or torch")


def held_bytes(quantisation: Quantisation, shape: tuple[int, ...], nbytes: int) -> int:
    """What a server needs for a tensor of a block that has `nbytes` in the checkpoint; about, and in time for choosing
    how many blocks to take. Matrices and stacks of matrices shrink, vectors do not.
    """
    if quantisation == "none" or len(shape) < 2:
        return nbytes
    return int(math.prod(shape) * _BYTES[quantisation])
