"""Blocks of a server that tell which parts of prompts they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan


class NotedBlocks:
    """In the place of `blocks`. `then` is called with the position of each part of a prompt that was computed, and with
    its tokens of a row."""

    def __init__(self, blocks: BlockSpan, then: Callable[[int, int], object]) -> None:
        self._blocks = blocks
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def forward(self, hidden: torch.Tensor, cache: SpanCache, *rest: Any) -> torch.Tensor:
        position = cache.length
        output = self._blocks.forward(hidden, cache, *rest)
        self._then(position, hidden.shape[1])
        return output
