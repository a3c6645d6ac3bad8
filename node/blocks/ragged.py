"""Whether an architecture's decode steps may run as one ragged batch: tried once, when its blocks are loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .span import BlockSpan

_log = logging.getLogger(__name__)

# Largest relative rms difference between a ragged step and separate ones. Kernels differ in the last bits; a
# wrong mask or position differs by tens of percent.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_QUANTISED_TOLERANCE = 6e-2  # they round what comes in, so that the last bits decide over the eighth


def agrees_with_single_steps(span: BlockSpan) -> bool:
    """Runs two tiny sessions both ways, one of them with two rows and left padding, and compares."""
    generator = torch.Generator().manual_seed(0)
    sessions = []
    for batch, length, padding in ((1, 3, None), (2, 2, [1, 0])):
        cache = span.make_cache(batch, length + 1, padding)
        hidden = torch.randn(batch, length + 1, span.hidden_size, generator=generator)
        span.forward(hidden[:, :length], cache)
        sessions.append((hidden[:, length:], cache))
    try:
        span.supports_ragged = True
        together = span.decode(sessions)
    except Exception as error:  # other architectures break in their own ways
        _log.debug("decode steps run one by one: %s", error)
        return False
    finally:
        span.supports_ragged = False
    tolerance = _TOLERANCE[span.dtype] if span.quantisation == "none" else _QUANTISED_TOLERANCE
    for (hidden, cache), ragged in zip(sessions, together, strict=True):
        cache.rollback(cache.max_length - 1)
        single = span.forward(hidden, cache)
        difference = float((ragged - single).norm() / single.norm())
        if not difference <= tolerance:
            _log.warning("decode steps run one by one: a batch of them differs by %.1g", difference)
            return False
    return True
