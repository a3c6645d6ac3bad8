"""Sizes of integers."""

from __future__ import annotations


def int_bytelen(x: int) -> int:
    """How many bytes `x` takes."""
    return (x.bit_length() + 7) // 8
