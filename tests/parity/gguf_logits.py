"""Logits of models that were read from GGUF files."""

from __future__ import annotations

from typing import Any

import torch

from petalnode.node.blocks.span import BlockSpan

TOKENS = 12


def logits(client: Any, spans: list[BlockSpan], ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt but for its last two tokens, then of one token at a time."""
    caches = [span.make_cache(1, ids.shape[1]) for span in spans]
    found = []
    for start, end in ((0, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)):
        hidden = client.embed(ids[:, start:end], start)
        for span, cache in zip(spans, caches, strict=True):
            hidden = span.forward(hidden, cache) if start == 0 else span.decode([(hidden, cache)])[0]
        found.append(client.head(hidden))
    return torch.cat(found, 1)
