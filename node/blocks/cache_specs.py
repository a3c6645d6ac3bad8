"""What the blocks of a span keep for each token between steps: how far back they look, and of which shape it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...protocols.ids import Span
from ..errors import ModelError
from .cache import BlockCacheSpec
from .skeleton import Skeleton
from .stack import BlockStack


def windows_of(skeleton: Skeleton, span: Span) -> list[int | None]:
    """Per block of the span, how far back it looks."""
    layers = DynamicCache(config=skeleton.config).layers
    if len(layers) != skeleton.num_blocks:
        layers = [DynamicLayer() for _ in range(skeleton.num_blocks)]
    windows: list[int | None] = []
    for layer in layers[span.start : span.end]:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            raise ModelError(
                f"{skeleton.config.model_type!r} keeps more than attention keys and values between tokens "
                f"({type(layer).__name__}): petalnode cannot serve it yet"
            )
    return windows


class _Recorder(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Sees which keys and values the blocks want to keep."""

    def __init__(self, count: int) -> None:
        super().__init__(layers=[])
        self.seen: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@torch.inference_mode()
def cache_specs(
    stack: BlockStack, skeleton: Skeleton, windows: Sequence[int | None], device: torch.device
) -> list[BlockCacheSpec]:
    """What each block keeps per token, found by running one token: no configuration says it for all."""
    recorder = _Recorder(len(windows))
    hidden = torch.zeros(1, 1, int(skeleton.config.hidden_size), dtype=skeleton.dtype, device=device)
    stack.run(hidden, recorder, torch.zeros(1, 1, dtype=torch.long, device=device))
    specs = []
    for seen, window in zip(recorder.seen, windows, strict=True):
        if seen is None:
            raise ModelError(
                f"some blocks of {skeleton.config.model_type!r} use the attention cache of others: "
                "petalnode cannot serve it yet"
            )
        keys, values = seen
        specs.append(BlockCacheSpec(keys.shape[1], keys.shape[3], values.shape[3], window))
    return specs
