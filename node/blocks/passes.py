"""Forward and backward passes through a part of a span, without a cache, a block at a time.

They are generators that pause between blocks, so that whoever owns the device may do something more urgent there.
No gradient is ever taken with respect to the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeVar

import torch

from ...protocols.ids import Span
from ...protocols.training import LORA_PARTS, LoraName
from .span import BlockSpan
from .span_adapter import with_added, with_lora

T = TypeVar("T")
SAVED_SHARE: Final = 0.5
"""Of what autograd may keep: what batches that wait for their gradients take at most."""
PassGenerator = Generator[None, None, T]
"""Pauses between blocks; ends with what was computed."""


def run_through(generator: PassGenerator[T]) -> T:
    """What the pass computes, without pauses."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            value: T = end.value
            return value


@dataclass(frozen=True)
class Batch:
    """What goes through the blocks of `span`, and in a backward pass back.

    Attributes:
        hidden: float [rows, tokens, width] of any dtype and device, the width as `BlockStack.width` has it.
        mask: bool [rows, tokens], False at padding; None if there is none.
        positions: int64 [rows, tokens], or [axes, rows, tokens]; None counts each row from 0.
        prompts: [blocks of the span, 1 or rows, prefix, hidden size], added to the first `prefix` positions of each
            stream (deep prompts: Petals, NeurIPS 2023, appendix G).
        lora: by their names, tensors that change linear layers of the span's blocks.
        gradient: of what comes of it, of its shape; None in a forward pass, and while it is on its way.
    """

    span: Span
    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    lora: Mapping[LoraName, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    """With respect to the hidden states, prompts and LoRA tensors of a batch, of their shapes and dtypes."""

    hidden: torch.Tensor
    prompts: torch.Tensor | None
    lora: Mapping[LoraName, torch.Tensor]


@dataclass
class _Graph:
    """One unit with what autograd keeps of it: the leaves that gradients are wanted for, and the output."""

    entered: torch.Tensor
    inputs: _Inputs
    left: torch.Tensor


@dataclass(frozen=True)
class _Inputs:
    """What the blocks of one unit get beside hidden states; prompts by the numbers of their blocks."""

    prompts: Mapping[int, torch.Tensor]
    lora: Mapping[LoraName, torch.Tensor]

    def leaves(self) -> _Inputs:
        """The same, for gradients to be taken for."""
        prompts = {block: prompt.detach().requires_grad_() for block, prompt in self.prompts.items()}
        return _Inputs(prompts, {name: factor.detach().requires_grad_() for name, factor in self.lora.items()})


@dataclass(eq=False)
class SavedActivations:
    """A batch that was computed forward and waits for its gradient. `graphs`: of all blocks; none if there was no room.

    `nbytes` is what autograd keeps for them.
    """

    batch: Batch
    run: _BatchRun
    graphs: list[_Graph]
    nbytes: int


class SpanPasses:
    """Runs batches through blocks of `span`. Not thread-safe; whoever owns the span owns this.

    Args:
        activation_bytes: what autograd may keep at once, except that one block is always run as a whole. If all blocks
            of a batch do not fit, a backward pass computes them twice. They are cut into segments of as many blocks as
            fit (after Chen et al. 2016). What is saved takes a part of it.
    """

    def __init__(self, span: BlockSpan, activation_bytes: int) -> None:
        self._span = span
        self._activation_bytes = activation_bytes
        self._weights = set[int]().union(*(part.stack.weight_storages() for part in span.parts))
        self._saved: weakref.WeakSet[SavedActivations] = weakref.WeakSet()

    def forward(self, batch: Batch) -> PassGenerator[torch.Tensor]:
        """What the blocks make of `batch.hidden`, on the device of the last one and in the span's dtype."""
        run = _BatchRun(self._span, batch)
        hidden = run.hidden
        for block in range(run.count):
            if block:
                yield
            hidden = run.without_graph(block, hidden)
        return hidden

    def backward(self, batch: Batch, gradient: torch.Tensor) -> PassGenerator[Gradients]:
        """Computes the forward pass again and goes back through it.

        Args:
            gradient: with respect to what `forward` returns, of that shape.
        """
        run = _BatchRun(self._span, batch)
        entered = {0: run.hidden}  # what the first block of each segment gets
        graphs, nbytes = self._measured(run)
        yield
        fitting = max(1, (self._activation_bytes - self._saved_bytes()) // max(nbytes, 1))
        starts = list(range(run.count - fitting, 0, -fitting))
        if starts:
            hidden = graphs.pop().left.detach()
            for block in range(1, starts[0]):
                if block in starts:
                    entered[block] = hidden
                hidden = run.without_graph(block, hidden)
                yield
            entered[starts[0]] = hidden
        back = _BackwardPass(run, gradient)
        end = run.count
        for start in [*starts, 0]:
            if not graphs:
                graphs.append(run.with_graph(start, entered.pop(start)))
                yield
            yield from run.extend(graphs, range(start + len(graphs), end))
            yield from back.through(graphs, last=not start)
            end = start
        return back.gradients()

    def recompute(self, batch: Batch) -> PassGenerator[SavedActivations]:
        """The first half of `backward`, before the gradient is there; `resume` is the other.

        What autograd keeps is counted for as long as somebody refers to what is returned. If it would take too much
        together with what is saved already, nothing is kept, and `resume` begins anew.
        """
        run = _BatchRun(self._span, batch)
        graphs, nbytes = self._measured(run)
        saved = SavedActivations(batch, run, [], nbytes * run.count)
        if self._saved_bytes() + saved.nbytes > SAVED_SHARE * self._activation_bytes:
            return SavedActivations(batch, run, [], 0)
        self._saved.add(saved)
        saved.graphs += graphs
        if run.count > 1:
            yield
        yield from run.extend(saved.graphs, range(1, run.count))
        return saved

    def resume(self, saved: SavedActivations, gradient: torch.Tensor) -> PassGenerator[Gradients]:
        """The second half: goes back through what `recompute` returned, once, and frees it on the way."""
        if not saved.graphs:
            return (yield from self.backward(saved.batch, gradient))
        back = _BackwardPass(saved.run, gradient)
        yield from back.through(saved.graphs, last=True)
        return back.gradients()

    def _saved_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._saved)

    def _measured(self, run: _BatchRun) -> tuple[list[_Graph], int]:
        """The first block's graph, and the bytes that autograd keeps for it."""
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            graph = run.with_graph(0, run.hidden)
        return [graph], sum(kept.values())


class _BatchRun:
    """One batch, unit by unit on their devices: a block each, or the blocks that share keys and values."""

    def __init__(self, span: BlockSpan, batch: Batch) -> None:
        parts = filter(span.stack.boundaries.may_part, range(batch.span.start, batch.span.end + 1))
        self._units = [range(*unit) for unit in pairwise(parts)]
        self.count = len(self._units)
        self._parts = [next(part for part in span.parts if unit.start in part.span) for unit in self._units]
        device = self._parts[0].device
        self.hidden = batch.hidden.to(device, span.dtype)
        self._mask = None if batch.mask is None else batch.mask.to(device)
        counted = torch.arange(self.hidden.shape[1]).unsqueeze(0)
        self._positions = (counted if batch.positions is None else batch.positions).to(device)
        prompts = {} if batch.prompts is None else dict(enumerate(batch.prompts, batch.span.start))
        self._inputs = [
            _Inputs(
                {block: prompts[block].to(part.device) for block in unit if block in prompts},
                {name: tensor.to(part.device) for name, tensor in batch.lora.items() if name.block in unit},
            )
            for unit, part in zip(self._units, self._parts, strict=True)
        ]

    @torch.no_grad()
    def without_graph(self, unit: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the `unit`-th unit of the batch's span makes of `hidden`."""
        return self._run(unit, hidden, self._inputs[unit])

    @torch.enable_grad()
    def with_graph(self, unit: int, hidden: torch.Tensor) -> _Graph:
        entered = hidden.detach().requires_grad_()
        inputs = self._inputs[unit].leaves()
        return _Graph(entered, inputs, self._run(unit, entered, inputs))

    def extend(self, graphs: list[_Graph], units: range) -> PassGenerator[None]:
        """Adds graphs of these units, which come behind those that are there. Pauses after each."""
        for unit in units:
            graphs.append(self.with_graph(unit, graphs[-1].left.detach()))
            yield

    def _run(self, unit: int, hidden: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        blocks, own = self._units[unit], self._parts[unit]
        stack, start = own.stack, own.span.start
        mask = None if self._mask is None else self._mask.to(own.device)
        with ExitStack() as changed:
            for number, prompt in inputs.prompts.items():
                changed.enter_context(with_added(stack, number - start, prompt, hidden.shape[1]))
            for number in blocks:
                pairs = {
                    name.path: (tensor, inputs.lora[replace(name, part=LORA_PARTS[1])])
                    for name, tensor in inputs.lora.items()
                    if name.block == number and name.part == LORA_PARTS[0]
                }
                changed.enter_context(with_lora(stack.blocks[number - start], pairs))
            part = range(blocks.start - start, blocks.stop - start)
            return stack.run(hidden.to(own.device), None, self._positions.to(own.device), mask, part=part)


class _BackwardPass:
    """A gradient on its way back through the blocks of a run, and what comes off it there."""

    def __init__(self, run: _BatchRun, gradient: torch.Tensor) -> None:
        self._device, self._flowing = run.hidden.device, gradient.to(run.hidden.dtype)
        self._prompts: dict[int, torch.Tensor] = {}
        self._lora: dict[LoraName, torch.Tensor] = {}

    def through(self, graphs: list[_Graph], *, last: bool) -> PassGenerator[None]:
        """Takes it through all of them, the last one first, which it takes out. `last`: there are no more to come."""
        while graphs:
            self._through(graphs.pop())
            if graphs or not last:
                yield

    def _through(self, graph: _Graph) -> None:
        inputs = graph.inputs
        leaves = [graph.entered, *inputs.lora.values(), *inputs.prompts.values()]
        flowing = self._flowing.to(graph.left.device)
        self._flowing, *others = torch.autograd.grad(graph.left, leaves, flowing, materialize_grads=True)
        self._lora.update(zip(inputs.lora, others, strict=False))
        self._prompts.update(zip(inputs.prompts, others[len(inputs.lora) :], strict=True))

    def gradients(self) -> Gradients:
        prompts = [gradient.to(self._device) for _, gradient in sorted(self._prompts.items())]
        return Gradients(self._flowing, torch.stack(prompts) if prompts else None, self._lora)
