"""Messages in which all is right but what a test says."""

from __future__ import annotations

import math
from typing import Any

from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span

_BOTH = {
    "protocol_version": 1,
    "model_version": b"m" * 32,
    "codec": "none",
    "activation_dtype": "float32",
    "nonce": b"n" * 16,
}


def opening(blocks: Span = Span(2, 5), **fields: Any) -> wire.Open:  # noqa: B008  (is not changed)
    """Of a session of one row and 64 tokens."""
    usual = {"span": wire.Span(start=blocks.start, end=blocks.end), "max_length": 64, "batch": 1, "route_epoch": 1}
    return wire.Open(**_BOTH | usual | fields)


def batch_opening(blocks: Span = Span(2, 5), **fields: Any) -> wire.BatchOpen:  # noqa: B008
    """Of a stream for batch requests."""
    return wire.BatchOpen(**_BOTH | {"span": wire.Span(start=blocks.start, end=blocks.end)} | fields)


def tensor(*shape: int, nbytes: int | None = None, **fields: Any) -> wire.Tensor:
    """The header of float32 values as they are, and of as many bytes as they take."""
    usual = {"shape": shape, "dtype": "float32", "codec": "none"}
    return wire.Tensor(**usual | fields, nbytes=4 * math.prod(shape) if nbytes is None else nbytes)
