"""A session may run through a part of what a server holds: routes are cut where servers overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span
from tests.tiny_models import ARCHITECTURES, NUM_BLOCKS, save_tiny


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_part_computes_what_its_span_alone_does(folder: Path) -> None:
    whole = load_span(folder, Span(0, NUM_BLOCKS))
    generator = torch.Generator().manual_seed(1)
    sessions = []
    for part in (Span(0, 2), Span(1, 5), Span(5, 6), Span(0, NUM_BLOCKS)):
        alone = load_span(folder, part)
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


def test_blocks_that_are_not_here_are_refused(folder: Path) -> None:
    span = load_span(folder, Span(2, 4))
    with pytest.raises(ValueError, match="blocks 1:3 are wanted, 2:4 are here"):
        span.make_cache(1, 4, None, Span(1, 3))
