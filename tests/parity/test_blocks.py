"""Spans of blocks compute what the same blocks compute inside the whole model, for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.protocols.ids import Span
from tests.parity.local_swarm import loaded
from tests.parity.whole import Whole, whole_of
from tests.tiny_models import ARCHITECTURES, CROSSING, CUTS, HYBRIDS, NUM_BLOCKS, VOCABULARY

Tiny = Callable[[str], Path]

USUAL = (Span(0, 2), Span(2, 3), Span(3, 6))
# What may differ: whole model and spans use other kernels for one token (packed heads, no mask).
TOLERANCE = 1e-5
# Their masks or positions are of one length for all rows, or attention changes what it is given.
SINGLY = (
    "bloom",
    "falcon",
    "deepseek_v32",
    "deepseek_v4",
    "dots3_note",
    "glm_",
    "llama4",
    "codegen",
    "gpt_neo_",
    "mpt",
)
RAGGED = {*HYBRIDS, *(a for a in (*ARCHITECTURES, *CROSSING) if not a.startswith(SINGLY))}


class Chain:
    """Spans one after the other, each with its own cache, as a session through them."""

    def __init__(self, spans: Sequence[BlockSpan], batch: int = 1, padding: list[int] | None = None) -> None:
        self.spans = spans
        self.caches = [span.make_cache(batch, 40, padding) for span in spans]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for span, cache in zip(self.spans, self.caches, strict=True):
            hidden = span.forward(hidden, cache)
        return hidden


def decode_together(chains: Sequence[Chain], hidden: list[torch.Tensor]) -> list[torch.Tensor]:
    """One decode step of several sessions through the same spans, batched at each."""
    for place, span in enumerate(chains[0].spans):
        steps: list[tuple[torch.Tensor, SpanCache]] = [
            (state, chain.caches[place]) for state, chain in zip(hidden, chains, strict=True)
        ]
        hidden = span.decode(steps)
    return hidden


def tokens(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    scale = float(expected.abs().max().clamp(min=1))
    difference = float((got - expected).abs().max()) / scale
    assert difference <= tolerance, f"differs by {difference:.2g}"


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_spans_equal_the_whole_model(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    spans = [loaded(folder, cut) for cut in CUTS.get(architecture, USUAL)]
    mixed = architecture in ("dots3_note", "qwen4_exp")  # of their blocks, those with an index go one by one
    assert mixed or all(span.supports_ragged == (architecture in RAGGED) for span in spans)
    whole = whole_of(folder)
    ids = tokens(2, 24)
    cache, chain, other = whole.cache(), Chain(spans, batch=2), Chain(spans, batch=2)
    # Prefill and chunk run transformers' own attention: the same kernels on the same numbers, so no difference.
    entered, left, _ = whole.step(ids[:, :13], cache)
    assert torch.equal(chain.forward(entered), left)
    other.forward(entered)
    for at in range(13, 18):
        entered, left, _ = whole.step(ids[:, at : at + 1], cache)
        close(decode_together([chain], [entered])[0], left)
        assert torch.equal(other.forward(entered), left)
    entered, left, _ = whole.step(ids[:, 18:], cache)
    close(chain.forward(entered), left)
    assert torch.equal(other.forward(entered), left)

    # Back to token 15, and the same tokens again: exactly what they were.
    for span_cache in other.caches:
        span_cache.rollback(15)
    again = whole.cache()
    whole.step(ids[:, :13], again)
    for at in (13, 14):
        whole.step(ids[:, at : at + 1], again)
    entered, left, _ = whole.step(ids[:, 15:21], again)
    close(other.forward(entered), left, tolerance=3e-5)  # torch's sums over other cuts: with AVX2 1.7e-5 in Zamba2


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_left_padded_rows_equal_the_whole_model(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    spans = [loaded(folder, cut) for cut in CUTS.get(architecture, USUAL)]
    whole = whole_of(folder)
    ids, padding = tokens(3, 18), [0, 5, 2]
    mask = (torch.arange(18) >= torch.tensor(padding)[:, None]).long()
    cache, chain = whole.cache(), Chain(spans, batch=3, padding=padding)
    entered, left, _ = whole.step(ids[:, :10], cache, mask[:, :10])
    out = chain.forward(entered)
    for row, pad in enumerate(padding):
        close(out[row, pad:], left[row, pad:])
    for at in range(10, 15):
        entered, left, _ = whole.step(ids[:, at : at + 1], cache, mask[:, : at + 1])
        close(decode_together([chain], [entered])[0], left)
    entered, left, _ = whole.step(ids[:, 15:], cache, mask)
    close(chain.forward(entered), left)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_sessions_decoded_together_equal_sessions_alone(architecture: str, tiny: Tiny) -> None:
    spans = [loaded(tiny(architecture), cut) for cut in CUTS.get(architecture, USUAL)]
    shapes = [(1, 3, None), (2, 11, None), (1, 19, None), (3, 7, [4, 0, 1])]
    together = [Chain(spans, batch, padding) for batch, _, padding in shapes]
    alone = [Chain(spans, batch, padding) for batch, _, padding in shapes]
    generator = torch.Generator().manual_seed(1)
    for (batch, length, _), first, second in zip(shapes, together, alone, strict=True):
        hidden = torch.randn(batch, length, spans[0].stack.width(), generator=generator)
        first.forward(hidden)
        second.forward(hidden)
    for _ in range(3):
        hidden = [torch.randn(batch, 1, spans[0].stack.width(), generator=generator) for batch, _, _ in shapes]
        for got, chain, state in zip(decode_together(together, hidden), alone, hidden, strict=True):
            # States carry on what a batch rounds otherwise.
            close(got, chain.forward(state), 5 * TOLERANCE if architecture in HYBRIDS else TOLERANCE)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_reordered_rows_continue_rows_they_were_taken_from(architecture: str, tiny: Tiny) -> None:
    span = loaded(tiny(architecture), Span(1, 6 if architecture in CROSSING else 4))
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 9, span.stack.width(), generator=generator)
    order, padding = [2, 2, 0], [1, 0, 3]
    moved = span.make_cache(3, 12, padding)
    span.forward(hidden, moved)
    moved.reorder(order)
    expected = span.make_cache(3, 12, [padding[row] for row in order])
    span.forward(hidden[order], expected)
    last = torch.randn(3, 1, span.stack.width(), generator=generator)
    close(span.forward(last, moved), span.forward(last, expected))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_part_computes_what_its_span_alone_does(architecture: str, tiny: Tiny) -> None:
    """A session may run through a part of what a server holds: routes are cut where servers overlap."""
    folder = tiny(architecture)
    whole = load_span(folder, Span(0, NUM_BLOCKS))
    generator = torch.Generator().manual_seed(1)
    sessions = []
    for part in (Span(0, 2), Span(1, 4), Span(3, 6), Span(0, NUM_BLOCKS)):
        alone = loaded(folder, part)
        prompt = torch.randn(2, 11, whole.hidden_size, generator=generator)
        token = torch.randn(2, 1, whole.hidden_size, generator=generator)
        cache = whole.make_cache(2, 12, [3, 0], part)
        expected = alone.make_cache(2, 12, [3, 0])
        assert cache.nbytes == expected.nbytes
        torch.testing.assert_close(
            whole.forward(prompt, cache)[1], alone.forward(prompt, expected)[1], rtol=0, atol=1e-5
        )
        sessions.append((token, cache, alone.decode([(token, expected)])[0]))
    outputs = whole.decode([(token, cache) for token, cache, _ in sessions])
    for output, (_, _, expected_output) in zip(outputs, sessions, strict=True):
        torch.testing.assert_close(output, expected_output, rtol=1e-4, atol=1e-4)


def test_blocks_that_are_not_here_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="blocks 1:3 are wanted, 2:3 are here"):
        loaded(tiny("llama"), Span(2, 3)).make_cache(1, 4, None, Span(1, 3))


def test_another_layer_or_position_would_be_noticed(tiny: Tiny) -> None:
    """The tolerance of this file tells a right span from a wrong one."""
    folder = tiny("llama")
    right, wrong = load_span(folder, Span(2, 3)), load_span(folder, Span(3, 4))
    hidden = torch.randn(1, 6, right.hidden_size)
    expected = right.forward(hidden, right.make_cache(1, 8))
    with pytest.raises(AssertionError):
        close(wrong.forward(hidden, wrong.make_cache(1, 8)), expected, 1e-2)
    # Rotary positions are relative: only a gap between two chunks shows.
    gap = right.make_cache(1, 8)
    right.forward(hidden[:, :3], gap)
    gap.advance(2)
    with pytest.raises(AssertionError):
        close(right.forward(hidden[:, 3:], gap), expected[:, 3:], 1e-2)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gemma3", "gpt2", "deepseek_v3"])
def test_bfloat16_spans_equal_the_whole_model(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    whole = Whole(folder, torch.bfloat16)
    chain = Chain([load_span(folder, cut, dtype="bfloat16") for cut in USUAL])
    entered, left, _ = whole.step(tokens(1, 13), whole.cache())
    assert entered.dtype == torch.bfloat16
    assert torch.equal(chain.forward(entered), left)
