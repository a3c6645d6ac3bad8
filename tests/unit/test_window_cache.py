"""Blocks that look back by a window keep what they look at and what a session may go back by, and nothing more."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.caches.pages import WINDOWS
from petalnode.node.blocks.caches.states import StatesLost
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import STEP_TOKENS
from tests.tiny_models import NUM_BLOCKS, save_tiny

PIECE, LENGTH, WINDOW = 200, 1400, 8


@pytest.fixture(scope="module", params=["torch", "native"])
def span(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Every other block has a window."""
    folder = save_tiny("gemma3", tmp_path_factory.mktemp("gemma3"), max_position_embeddings=4096)
    return load_span(folder, Span(0, NUM_BLOCKS), kernels=request.param)


def fed(span: BlockSpan, cache: SpanCache, hidden: torch.Tensor) -> torch.Tensor:
    """What the blocks answer, in steps of a piece each and, behind these, of a token."""
    outputs = []
    for step in [*hidden[:, :LENGTH].split(PIECE, 1), *hidden[:, LENGTH:].split(1, 1)]:
        span.stack.begin_step(cache, step.shape[1], False)
        outputs.append(span.forward(step, cache))
    return torch.cat(outputs, 1)


def inputs(span: BlockSpan, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, span.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_cache_behind_the_window_goes_unnoticed(span: BlockSpan) -> None:
    hidden = inputs(span, LENGTH + 3)
    keeping = span.make_cache(2, 2048, [0, 5])
    keeping.keep_all()
    cache = span.make_cache(2, 2048, [0, 5])
    assert torch.equal(fed(span, cache, hidden), fed(span, keeping, hidden))
    keeping.rollback(PIECE)  # as validators may have to
    page = mmap.PAGESIZE // (16 * 4)  # tokens of a head; one that is shared with another head stays
    far = LENGTH - PIECE - WINDOW - WINDOWS.back - WINDOWS.at_once
    for block, spec in enumerate(span.specs):
        for buffer in cache._held[block]:
            assert bool(buffer[:, :, page : far - page].any()) is not spec.forgets
            assert buffer[:, :, far + WINDOWS.at_once : cache.length].any(-1).all()


def test_session_goes_back_as_far_as_kept(span: BlockSpan) -> None:
    hidden = inputs(span, LENGTH + 1)
    cache = span.make_cache(2, 2048)
    expected = fed(span, cache, hidden)
    with pytest.raises(StatesLost, match="from the first token on"):
        cache.rollback(PIECE)
    assert cache.length == LENGTH + 1
    back = LENGTH - WINDOWS.back
    cache.rollback(back)
    cache.reorder([1, 0])
    span.stack.begin_step(cache, 50, False)
    again = span.forward(hidden[[1, 0], back : back + 50], cache)
    assert torch.allclose(again[[1, 0]], expected[:, back : back + 50], atol=1e-4)
    cache.rollback(0)
    assert torch.equal(fed(span, cache, hidden), expected)


def test_a_session_reserves_what_it_keeps_at_once(span: BlockSpan) -> None:
    most = WINDOW + WINDOWS.back + WINDOWS.at_once + STEP_TOKENS
    half, tokens = span.cache_bytes_per_token // 2, 100_000
    assert span.make_cache(1, tokens).nbytes == half * (tokens + most)
    assert span.cache_tokens(1, tokens) == -(-(tokens + most) // 2)
    assert span.cache_tokens(3, 500) == 1500  # nothing is let go of a short one


@pytest.mark.parametrize("kind", ["qwen3_5", "nemotron_h", "lfm2"])
def test_states_take_as_much_in_long_sessions(kind: str, tmp_path: Path) -> None:
    """Only blocks with attention to all tokens take more."""
    span = load_span(save_tiny(kind, tmp_path), Span(0, NUM_BLOCKS))
    sizes = [
        [SpanCache([spec], 1, tokens, span._form, span.device).nbytes for tokens in (1000, 100_000)]
        for spec in span.specs
    ]
    growing = [large > small for small, large in sizes]
    assert growing == [bool(spec.heads) for spec in span.specs] and not all(growing)
    assert all(small == large for (small, large), grows in zip(sizes, growing, strict=True) if not grows)
    assert any(small for (small, _), grows in zip(sizes, growing, strict=True) if not grows)
    assert span.cache_tokens(1, 100_000) * span.cache_bytes_per_token >= sum(large for _, large in sizes)
