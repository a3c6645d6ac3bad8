"""How fast this machine runs its span: what its announcement says and the router believes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch

from ...blocks.span import BlockSpan

_LEAST_STEPS, _MOST_STEPS = 5, 30
_STEPS_SECONDS: Final = 0.3
"""Steps go on for so long: other work on the machine must not be taken for the span's."""
_PREFILL: Final = 64
_PREFILLS: Final = 2


@dataclass(frozen=True)
class Speed:
    """`step_seconds`: one decode step of one row through the whole span; `forward_tokens_per_second`: a prefill."""

    step_seconds: float
    forward_tokens_per_second: float


def measure_speed(blocks: BlockSpan) -> Speed:
    """Runs short prefills and a few decode steps. Call it on the thread that owns the device.

    The best of several, because whatever else the machine was doing is not the span's cost.
    """
    most = max(1, min(_MOST_STEPS, blocks.max_positions // 4))
    tokens = max(1, min(_PREFILL, blocks.max_positions - most - 1))
    cache = blocks.make_cache(1, tokens + most + 1)
    try:
        hidden = torch.zeros(1, tokens, blocks.hidden_size, dtype=blocks.dtype, device=blocks.device)
        blocks.forward(hidden[:, :1], cache)  # the first call allocates and warms up
        prefills = []
        for _ in range(_PREFILLS):
            cache.rollback(0)
            begun = time.perf_counter()
            blocks.forward(hidden, cache)
            synchronise(blocks.device)
            prefills.append(time.perf_counter() - begun)
        steps: list[float] = []
        while len(steps) < most and (len(steps) < _LEAST_STEPS or sum(steps) < _STEPS_SECONDS):
            begun = time.perf_counter()
            blocks.decode([(hidden[:, :1], cache)])
            synchronise(blocks.device)
            steps.append(time.perf_counter() - begun)
        return Speed(min(steps), tokens / min(prefills))
    finally:
        cache.free()


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
