"""How other processors may compute, and inputs on which that makes a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from petalnode.node.blocks.span import BlockSpan
from petalnode.node.verification.judging import distance


class OtherKernels(TorchFunctionMode):
    """Products add up their two halves, as those of another processor may."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        values, weight, *bias = args
        half = weight.shape[1] // 2
        left = func(values[..., :half], weight[:, :half], *bias)
        return left + func(values[..., half:], weight[:, half:])


@contextmanager
def subnormals_are_zero() -> Iterator[bool]:
    """Within it, subnormal numbers count as zero; False where this processor cannot do that."""
    try:
        yield torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)


def decisive(blocks: BlockSpan, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An input between two others, [1, 1, hidden], at which the answer jumps, and a rounding decides which way.

    Raises:
        ValueError: there is none between them.
    """

    def answer(share: float) -> torch.Tensor:
        mixed = torch.lerp(one.double(), other.double(), share).float()
        return blocks.forward(mixed, blocks.make_cache(1, 20))

    steps = torch.linspace(0, 1, 33).tolist()
    answers = [answer(step) for step in steps]
    jumps = [distance(after, before).worst for before, after in pairwise(answers)]
    widest = max(range(len(jumps)), key=jumps.__getitem__)
    low, high = steps[widest], steps[widest + 1]
    while (middle := (low + high) / 2) not in (low, high):
        there = answer(middle)
        if distance(there, answer(low)).worst > distance(there, answer(high)).worst:
            high = middle
        else:
            low = middle
    spacing = 2e-9
    for number in range(-200, 200):
        mixed = torch.lerp(one.double(), other.double(), low + number * spacing).float()
        right = blocks.forward(mixed, blocks.make_cache(1, 20))
        with OtherKernels():
            if distance(blocks.forward(mixed, blocks.make_cache(1, 20)), right).worst > 0.01:
                return mixed
    raise ValueError("no rounding decides")
