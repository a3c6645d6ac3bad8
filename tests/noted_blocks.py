"""Blocks of a server that tell what they compute, or compute something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan

Noted = Callable[[Sequence[SpanCache], int], object]
"""Gets the caches of the sessions that a step is computed of, and its tokens of a row."""


def nothing(caches: Sequence[SpanCache], tokens: int) -> None:
    pass


class NotedBlocks:
    """In the place of `blocks`. `before` is called ahead of each batch of decode steps and each part of a prompt,
    `then` behind it; both may be exchanged.

    Attributes:
        made: the caches of its sessions, in their order.
    """

    def __init__(self, blocks: BlockSpan, *, before: Noted = nothing, then: Noted = nothing) -> None:
        self._blocks = blocks
        self.before, self.then = before, then
        self.made: list[SpanCache] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    @property
    def parts(self) -> tuple[NotedBlocks, ...]:
        return (self,)

    def make_cache(self, *arguments: Any, **options: Any) -> SpanCache:
        self.made.append(self._blocks.make_cache(*arguments, **options))
        return self.made[-1]

    def forward(self, hidden: torch.Tensor, cache: SpanCache, *rest: Any) -> torch.Tensor:
        self.before([cache], hidden.shape[1])
        output = self._blocks.forward(hidden, cache, *rest)
        self.then([cache], hidden.shape[1])
        return output

    def decode(self, steps: Sequence[tuple[torch.Tensor, SpanCache]], *rest: Any) -> list[torch.Tensor]:
        caches = [cache for _, cache in steps]
        self.before(caches, 1)
        outputs = self._blocks.decode(steps, *rest)
        self.then(caches, 1)
        return outputs
