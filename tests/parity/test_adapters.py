"""Adapters in blocks compute what plain peft computes, also when sessions of several share a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.blocks.span_adapter import SpanAdapter
from petalnode.node.models.adapter import read_adapter
from petalnode.protocols.ids import Span
from tests.peft_adapters import TARGETS, load_with, save_lora
from tests.tiny_models import NUM_BLOCKS, VOCABULARY

Tiny = Callable[[str], Path]
WHOLE = Span(0, NUM_BLOCKS)
TOKENS = 9
PADDING = [3, 0]


def adapters_of(span: BlockSpan, model: Path, architecture: str, root: Path) -> tuple[list[Path], list[SpanAdapter]]:
    folders = [
        save_lora(model, root / "one", TARGETS[architecture], 1),
        save_lora(model, root / "two", TARGETS[architecture][:1], 2, r=2, layers_to_transform=[1, 4]),
    ]
    adapters = []
    for folder in folders:
        adapter = read_adapter(folder)
        adapter.check_fits(WHOLE, span.linears, span.hidden_size, NUM_BLOCKS)
        adapters.append(span.make_adapter(adapter.tensors))
    return folders, adapters


def entering(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the first block of a model, and leaves its last."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == NUM_BLOCKS)
    seen: list[torch.Tensor] = []

    def enter(block: Any, args: Any, kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def leave(block: Any, args: Any, output: Any) -> None:
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    hooks = [
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[-1].register_forward_hook(leave),
    ]
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen[0], seen[1]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    difference = float((got - expected).norm() / expected.norm())
    assert difference <= tolerance, f"differs by {difference:.2g}"


@pytest.mark.parametrize("architecture", list(TARGETS))
def test_adapters_share_a_step_and_equal_peft(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(architecture)
    span = load_span(model, WHOLE)
    folders, adapters = adapters_of(span, model, architecture, tmp_path)
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    expected: list[torch.Tensor] = []
    steps: list[tuple[torch.Tensor, SpanCache]] = []
    used: list[SpanAdapter | None] = [None, adapters[0], adapters[1], adapters[0], None]
    for adapter in used:
        plain = load_with(model, folders[adapters.index(adapter)]) if adapter is not None else None
        if plain is None:
            from tests.tiny_models import load_whole

            plain = load_whole(model)
        entered, left = entering(plain, ids)
        cache = span.make_cache(1, TOKENS)
        close(span.forward(entered[:, :-1], cache, adapter), left[:, :-1])
        steps.append((entered[:, -1:], cache))
        expected.append(left[:, -1:])
    for output, wanted in zip(span.decode(steps, used), expected, strict=True):
        close(output, wanted)
    assert float((expected[0] - expected[1]).norm() / expected[0].norm()) > 0.05
    assert float((expected[1] - expected[2]).norm() / expected[1].norm()) > 0.05


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_mixed_steps_on_quantised_blocks_equal_separate_ones(quantisation: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    span = load_span(model, WHOLE, quantisation=quantisation)
    _, adapters = adapters_of(span, model, "llama", tmp_path)
    generator = torch.Generator().manual_seed(0)
    used: list[SpanAdapter | None] = [adapters[1], None, adapters[0], adapters[1]]
    hidden = [torch.randn(2, TOKENS, span.hidden_size, generator=generator) for _ in used]
    caches = [span.make_cache(2, TOKENS, PADDING) for _ in used]
    apart = []
    for states, cache, adapter in zip(hidden, caches, used, strict=True):
        span.forward(states[:, :-1], cache, adapter)
        apart.append(span.decode([(states[:, -1:], cache)], [adapter])[0])
        cache.rollback(TOKENS - 1)
    steps = [(states[:, -1:], cache) for states, cache in zip(hidden, caches, strict=True)]
    for output, wanted in zip(span.decode(steps, used), apart, strict=True):
        close(output, wanted, 2e-2)


def test_sessions_take_turns_where_a_layer_hides_rows(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    span = load_span(model, WHOLE)
    _, adapters = adapters_of(span, model, "llama", tmp_path)
    mlp: Any = span.stack.blocks[3].mlp
    inner = mlp.forward
    # As layers do that sort tokens by expert: here every row comes twice.
    mlp.forward = lambda hidden: inner(hidden.repeat(2, 1, 1))[: len(hidden)]
    generator = torch.Generator().manual_seed(0)
    used: list[SpanAdapter | None] = [adapters[0], None, adapters[0], adapters[1]]
    hidden = [torch.randn(1, TOKENS, span.hidden_size, generator=generator) for _ in used]
    caches = [span.make_cache(1, TOKENS) for _ in used]
    apart = []
    for states, cache, adapter in zip(hidden, caches, used, strict=True):
        span.forward(states[:, :-1], cache, adapter)
        apart.append(span.forward(states[:, -1:], cache, adapter))
        cache.rollback(TOKENS - 1)
    steps = [(states[:, -1:], cache) for states, cache in zip(hidden, caches, strict=True)]
    for _ in range(2):
        for output, wanted in zip(span.decode(steps, used), apart, strict=True):
            close(output, wanted)
        assert [cache.length for cache in caches] == [TOKENS] * 4
        for cache in caches:
            cache.rollback(TOKENS - 1)
