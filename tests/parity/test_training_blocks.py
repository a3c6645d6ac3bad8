"""Gradients through spans are those of the same blocks inside the whole model, for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from petalnode.node.blocks.caches.chosen_tokens import settle_choices
from petalnode.node.blocks.passes import Batch, Gradients, PassGenerator, SpanPasses
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.blocks.span_adapter import linear_shapes
from petalnode.node.blocks.stack import closed, of_each_stream, written_ids
from petalnode.node.models.folder import open_folder
from petalnode.protocols.ids import Span
from petalnode.protocols.training import LoraName
from tests.tiny_models import ARCHITECTURES, CROSSING, HIDDEN, HYBRIDS, NUM_BLOCKS, VOCABULARY, load_whole

Tiny = Callable[[str], Path]

ROWS, TOKENS, PREFIX = 3, 13, 4
IDS = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
NO_IDS = torch.zeros_like(IDS)
PARTS = (Span(0, 2), Span(2, 6))
TOLERANCE = 1e-5  # of the largest value, float32
TOLERANCE_OF_CHANGES = {"gemma3": 5e-5}
"""B A x and W x are rounded apart, (W + B A) x at once: of what gemma3's many norms make of that, 3.1e-5 was seen."""
PADDING = torch.tensor([0, 4, 2])[:, None]
MASKS: dict[str, torch.Tensor | None] = {
    "no padding": None,
    "padded left": torch.arange(TOKENS) >= PADDING,
    "padded right": torch.arange(TOKENS) < TOKENS - PADDING,
}
PLENTY = 1 << 40


def drive(passing: PassGenerator[Any]) -> tuple[Any, int]:
    """What a pass ends with, and how often it paused."""
    pauses = 0
    while True:
        try:
            next(passing)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


@dataclass
class WholeBlocks:
    """The blocks of a whole model with deep prompts in front of each, and what enters and leaves them."""

    folder: Path
    prompts: torch.Tensor
    leaves: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = load_whole(self.folder).requires_grad_(False)
        self.boundaries, decoder = open_folder(self.folder, "tiny").boundaries, cast(Any, self.model.base_model)
        settle_choices(decoder)
        if self.boundaries.per_block:
            made = decoder.project_per_layer_inputs
            decoder.project_per_layer_inputs = lambda *args: self._leaf(made(*args))
        blocks = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == NUM_BLOCKS)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._entering(number), with_kwargs=True)
        blocks[-1].register_forward_hook(self._leaving)

    def _entering(self, number: int) -> Callable[[nn.Module, Any, Any], Any]:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if self.boundaries.carried:
                args = (hidden, self._leaf(hidden) if number == 0 else self.leaves[0], *args[2:])
            if number == 0:
                hidden = self._leaf(hidden)
            prompt = nn.functional.pad(self.prompts[number], (0, 0, 0, TOKENS - PREFIX))
            hidden = hidden + of_each_stream(self.boundaries, prompt)
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return enter

    def _leaf(self, given: torch.Tensor) -> torch.Tensor:
        self.leaves.append(given.detach().requires_grad_())
        return self.leaves[-1]

    def _leaving(self, block: nn.Module, args: Any, output: Any) -> None:
        self.left = closed(self.boundaries, output if isinstance(output, torch.Tensor) else output[0], None)

    def entering(self, leaves: Sequence[torch.Tensor], ids: torch.Tensor = NO_IDS) -> torch.Tensor:
        """As it travels: the leaves that a run has made, or their gradients."""
        if self.boundaries.ids:
            return closed(self.boundaries, leaves[-1], written_ids(ids, leaves[-1].dtype))
        return closed(self.boundaries, leaves[-1], None if len(leaves) == 1 else leaves[0].flatten(2))

    def run(self, mask: torch.Tensor | None) -> None:
        self.leaves.clear()
        self.model(IDS, attention_mask=None if mask is None else mask.long(), use_cache=False)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert torch.isfinite(got).all()
    difference = float(((got - expected).abs().max() / expected.abs().max()).detach())
    assert difference <= tolerance, f"differs by {difference:.2g}"


def units(span: BlockSpan, part: Span) -> int:
    """Of blocks that are computed at once."""
    return sum(map(span.stack.boundaries.may_part, range(part.start, part.end)))


def through(spans: Sequence[BlockSpan], batch: Batch, gradient: torch.Tensor, memory: int) -> tuple[torch.Tensor, Any]:
    """What leaves the last span, and the gradients of what enters the first and of all prompts."""
    parts = []
    hidden = batch.hidden
    for span, part in zip(spans, PARTS, strict=True):
        prompts = None if batch.prompts is None else batch.prompts[part.start : part.end]
        parts.append(replace(batch, span=part, hidden=hidden, prompts=prompts))
        hidden, pauses = drive(SpanPasses(span, memory).forward(parts[-1]))
        assert pauses == units(span, part) - 1
    found = []
    for span, part in zip(reversed(spans), reversed(parts), strict=True):
        gradients, pauses = drive(SpanPasses(span, memory).backward(part, gradient))
        assert pauses >= 2 * units(span, part.span) - 1  # at least between any two blocks, both ways
        gradient = gradients.hidden
        found.append(gradients.prompts)
    return hidden, Gradients(gradient, torch.cat(found[::-1]) if batch.prompts is not None else None, {})


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_gradients_equal_the_whole_models(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    generator = torch.Generator().manual_seed(1)
    prompts = (0.1 * torch.randn(NUM_BLOCKS, 1, PREFIX, HIDDEN, generator=generator)).requires_grad_()
    whole = WholeBlocks(folder, prompts)
    spans = [load_span(folder, Span(0, 2)), load_span(folder, Span(1, 6))]  # of the second, a part
    for mask in MASKS.values():
        whole.run(mask)
        seen = torch.ones(ROWS, TOKENS, 1) if mask is None else mask.unsqueeze(2).float()
        gradient = torch.randn(ROWS, TOKENS, whole.boundaries.width(NUM_BLOCKS), generator=generator) * seen
        *of_leaves, of_prompts = torch.autograd.grad(whole.left, [*whole.leaves, prompts], gradient)
        batch = Batch(Span(0, 1), whole.entering(whole.leaves, IDS).detach(), mask, None, prompts.detach())
        left, found = through(spans, batch, gradient, PLENTY)
        close(left * seen, whole.left * seen)
        close(found.hidden * seen, whole.entering(of_leaves) * seen)
        close(found.prompts, of_prompts)
        assert torch.isfinite(found.hidden).all()


@pytest.mark.parametrize(("memory", "kept"), [(PLENTY, [6, 6]), (1_000_000, [6, 0]), (200_000, [0, 0])])
def test_gradients_that_come_later_are_the_same(memory: int, kept: list[int], tiny: Tiny) -> None:
    span = load_span(tiny("llama"), Span(0, 6))
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randn(NUM_BLOCKS, 2, PREFIX, HIDDEN, generator=generator)
    hidden = [torch.randn(2, TOKENS, HIDDEN, generator=generator) for _ in kept]
    batches = [Batch(Span(0, 6), states, None, None, prompts) for states in hidden]
    gradients = [torch.randn(2, TOKENS, HIDDEN, generator=generator) for _ in kept]
    passes = SpanPasses(span, memory)
    parked = []
    for batch in batches:
        saved, pauses = drive(passes.recompute(batch))
        parked.append(saved)
        assert pauses >= (len(saved.graphs) == 6)  # never more than a block behind a step
    assert [len(saved.graphs) for saved in parked] == kept
    for batch, saved, gradient in reversed(list(zip(batches, parked, gradients, strict=True))):
        expected, _ = drive(SpanPasses(span, PLENTY).backward(batch, gradient))
        found, pauses = drive(passes.resume(saved, gradient))
        assert pauses >= 5
        assert torch.equal(found.hidden, expected.hidden) and torch.equal(found.prompts, expected.prompts)
    del parked, saved
    again, _ = drive(passes.recompute(batches[0]))  # what was kept is free
    assert len(again.graphs) == kept[0]


@pytest.mark.parametrize("memory", [1, 120_000, 200_000])
@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_gradients_are_the_same_where_memory_is_short(memory: int, architecture: str, tiny: Tiny) -> None:
    span = load_span(tiny(architecture), Span(0, 6))
    generator = torch.Generator().manual_seed(2)
    hidden, gradient = torch.randn(2, 2, TOKENS, HIDDEN, generator=generator)
    prompts = torch.randn(NUM_BLOCKS, 2, PREFIX, HIDDEN, generator=generator)
    batch = Batch(Span(0, 6), hidden, None, None, prompts)
    expected, fewest = drive(SpanPasses(span, PLENTY).backward(batch, gradient))
    found, pauses = drive(SpanPasses(span, memory).backward(batch, gradient))
    assert pauses > fewest  # some blocks were computed twice
    assert torch.equal(found.hidden, expected.hidden) and torch.equal(found.prompts, expected.prompts)


def test_positions_may_be_given(tiny: Tiny) -> None:
    span = load_span(tiny("llama"), Span(1, 3))
    hidden = torch.randn(1, 6, HIDDEN)
    usual = Batch(Span(1, 3), hidden)
    expected, _ = drive(SpanPasses(span, PLENTY).forward(usual))
    moved = replace(usual, positions=torch.arange(5, 11).unsqueeze(0))
    close(drive(SpanPasses(span, PLENTY).forward(moved))[0], expected)  # rotary positions are relative
    spread = replace(usual, positions=torch.tensor([[0, 2, 4, 6, 8, 10]]), mask=torch.ones(1, 6, dtype=torch.bool))
    assert (drive(SpanPasses(span, PLENTY).forward(spread))[0] - expected).abs().max() > 1e-2


def test_weights_never_get_gradients(tiny: Tiny) -> None:
    span = load_span(tiny("llama"), Span(0, 2))
    hidden = torch.randn(1, 6, HIDDEN)
    drive(SpanPasses(span, PLENTY).backward(Batch(Span(0, 2), hidden), torch.randn(1, 6, HIDDEN)))
    weights = [weight for block in span.stack.blocks for weight in block.parameters()]
    assert weights and all(weight.grad is None and not weight.requires_grad for weight in weights)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "mixtral", "gemma3", "gpt2", "gpt_neox"])
def test_low_rank_changes_are_those_of_the_weights(architecture: str, tiny: Tiny) -> None:
    """B A x beside a layer is what the layer with W + B A computes, and has the gradients of that."""
    folder, tolerance = tiny(architecture), TOLERANCE_OF_CHANGES.get(architecture, TOLERANCE)
    span, part = load_span(folder, Span(1, 6)), Span(2, 5)
    generator = torch.Generator().manual_seed(4)
    hidden, gradient = torch.randn(2, 2, TOKENS, HIDDEN, generator=generator)
    lora: dict[LoraName, torch.Tensor] = {}
    weights: dict[LoraName, torch.Tensor] = {}
    transposed: dict[LoraName, bool] = {}
    merged = load_span(folder, Span(1, 6))
    for number in (2, 4):
        block = merged.stack.blocks[number - 1]
        for path, (width, out) in linear_shapes(block).items():
            a, b = (0.2 * torch.randn(*shape, generator=generator) for shape in ((3, width), (out, 3)))
            lora[LoraName(number, path, "lora_A")], lora[LoraName(number, path, "lora_B")] = a, b
            layer: Any = block.get_submodule(path)
            name = LoraName(number, path, "")
            weights[name], transposed[name] = layer.weight, isinstance(layer, Conv1D)
            with torch.no_grad():
                layer.weight += (b @ a).T if transposed[name] else b @ a
    assert len(lora) >= 8
    plain, changed = Batch(part, hidden), Batch(part, hidden, lora=lora)
    expected, _ = drive(SpanPasses(merged, PLENTY).forward(plain))
    close(drive(SpanPasses(span, PLENTY).forward(changed))[0], expected, tolerance)
    assert (drive(SpanPasses(span, PLENTY).forward(plain))[0] - expected).abs().max() > 1e-2
    expected, _ = drive(SpanPasses(merged, PLENTY).backward(plain, gradient))
    found, _ = drive(SpanPasses(span, PLENTY).backward(changed, gradient))
    close(found.hidden, expected.hidden, tolerance)
    assert found.lora.keys() == lora.keys()
    # The gradient of W + B A with respect to A is B's transpose times that of the weight, and the other way round.
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    out = merged.stack.run(hidden, None, torch.arange(TOKENS).unsqueeze(0), part=range(1, 4))
    for name, full in zip(weights, torch.autograd.grad(out, list(weights.values()), gradient), strict=True):
        a_name, b_name = replace(name, part="lora_A"), replace(name, part="lora_B")
        whole = full.T if transposed[name] else full
        close(found.lora[a_name], lora[b_name].T @ whole, tolerance)
        close(found.lora[b_name], whole @ lora[a_name].T, tolerance)
