"""Forward and backward passes through a part of a span, without a cache, a block at a time.

They are generators that pause between blocks, so that whoever owns the device may do something more urgent there.
No gradient is ever taken with respect to the weights.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...protocols.ids import Span
from .span import BlockSpan
from .stack import BlockStack

T = TypeVar("T")
Passing = Generator[None, None, T]
"""Pauses between blocks; ends with what was computed."""


@dataclass(frozen=True)
class Batch:
    """What goes through the blocks of `part`.

    Attributes:
        hidden: float [rows, tokens, hidden size] of any dtype and device.
        mask: bool [rows, tokens], False at padding; None if there is none.
        positions: int64 [rows, tokens]; None counts each row from 0.
        prompts: [blocks of the part, 1 or rows, prefix, hidden size], added to the first `prefix` positions of what
            enters each block (deep prompts: Petals, NeurIPS 2023, appendix G).
    """

    part: Span
    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    prompts: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    """With respect to the hidden states and the prompts of a batch, of their shapes and dtypes."""

    hidden: torch.Tensor
    prompts: torch.Tensor | None


@dataclass
class _Graph:
    """One block with what autograd keeps of it: the leaves that gradients are wanted for, and the output."""

    entered: torch.Tensor
    prompt: torch.Tensor | None
    left: torch.Tensor


class Passes:
    """Runs batches through blocks of `span`. Not thread-safe; whoever owns the span owns this.

    Args:
        activation_bytes: what autograd may keep at once, except that one block is always run as a whole. If all
            blocks of a batch do not fit, they are computed twice in a backward pass (segments of as many blocks as
            fit, after Chen et al. 2016).
    """

    def __init__(self, span: BlockSpan, activation_bytes: int) -> None:
        self._span = span
        self._stack: BlockStack = span.stack
        self._activation_bytes = activation_bytes
        self._weights = self._stack.weight_storages()

    def forward(self, batch: Batch) -> Passing[torch.Tensor]:
        """What the blocks make of `batch.hidden`: the same shape, on the span's device and in its dtype."""
        run = _Run(self._span, batch)
        hidden = run.hidden
        for block in range(run.count):
            if block:
                yield
            hidden = run.without_graph(block, hidden)
        return hidden

    def backward(self, batch: Batch, gradient: torch.Tensor) -> Passing[Gradients]:
        """Computes the forward pass again and goes back through it.

        Args:
            gradient: with respect to what `forward` returns, of that shape.
        """
        run = _Run(self._span, batch)
        entered = {0: run.hidden}  # what the first block of each segment gets
        graphs, nbytes = self._measured(run, run.hidden)
        yield
        fitting = max(1, self._activation_bytes // max(nbytes, 1))
        starts = list(range(run.count - fitting, 0, -fitting))
        if starts:
            hidden = graphs.pop().left.detach()
            for block in range(1, starts[0]):
                if block in starts:
                    entered[block] = hidden
                hidden = run.without_graph(block, hidden)
                yield
            entered[starts[0]] = hidden
        flowing = gradient.to(run.hidden.device, run.hidden.dtype)
        prompts: list[torch.Tensor] = []
        end = run.count
        for start in [*starts, 0]:
            hidden = graphs[-1].left.detach() if graphs else entered.pop(start)
            for block in range(start + len(graphs), end):
                graphs.append(run.with_graph(block, hidden))
                hidden = graphs[-1].left.detach()
                yield
            while graphs:
                graph = graphs.pop()
                flowing, prompt = _back(graph, flowing)
                if prompt is not None:
                    prompts.append(prompt)
                if graphs or start:
                    yield
            end = start
        return Gradients(flowing, torch.stack(prompts[::-1]) if prompts else None)

    def _measured(self, run: _Run, hidden: torch.Tensor) -> tuple[list[_Graph], int]:
        """The first block's graph, and the bytes that autograd keeps for it."""
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            graph = run.with_graph(0, hidden)
        return [graph], sum(kept.values())


class _Run:
    """One batch on the span's device."""

    def __init__(self, span: BlockSpan, batch: Batch) -> None:
        device = span.device
        self._stack = span.stack
        self._first = batch.part.start - span.span.start
        self.count = len(batch.part)
        self.hidden = batch.hidden.to(device, span.dtype)
        self._mask = None if batch.mask is None else batch.mask.to(device)
        if batch.positions is None:
            self._positions = torch.arange(self.hidden.shape[1], device=device).unsqueeze(0)
        else:
            self._positions = batch.positions.to(device)
        self._prompts = None if batch.prompts is None else batch.prompts.to(device)

    @torch.no_grad()
    def without_graph(self, block: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the `block`-th block of the batch's part makes of `hidden`."""
        return self._block(block, hidden, None if self._prompts is None else self._prompts[block])

    @torch.enable_grad()
    def with_graph(self, block: int, hidden: torch.Tensor) -> _Graph:
        entered = hidden.detach().requires_grad_()
        prompt = None if self._prompts is None else self._prompts[block].detach().requires_grad_()
        return _Graph(entered, prompt, self._block(block, entered, prompt))

    def _block(self, block: int, hidden: torch.Tensor, prompt: torch.Tensor | None) -> torch.Tensor:
        if prompt is not None:
            prefix = prompt.shape[1]
            hidden = torch.cat([hidden[:, :prefix] + prompt.to(hidden.dtype), hidden[:, prefix:]], dim=1)
        index = self._first + block
        return self._stack.run(hidden, None, self._positions, self._mask, part=range(index, index + 1))


def _back(graph: _Graph, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    leaves = [graph.entered] if graph.prompt is None else [graph.entered, graph.prompt]
    found = torch.autograd.grad(graph.left, leaves, gradient)
    return found[0], found[1] if graph.prompt is not None else None
