"""Coarser weights are told from rounding by the direction of the error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.verification.judging import share_of

HIDDEN, TOKENS = 128, 60


def tensors(seed: int, rounding: float, step: float) -> tuple[torch.Tensor, ...]:
    """(what is exact, what other weights make of it, two roundings)."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    other = exact + step * torch.randn(exact.shape, generator=generator)
    return exact, other, *(rounding * torch.randn(exact.shape, generator=generator) for _ in range(3))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 0.02), st.floats(0.008, 0.2))
def test_an_honest_error_is_no_substitution(seed: int, rounding: float, step: float) -> None:
    """Whatever rounding does: also where it is larger than what is looked for."""
    exact, other, one, two, three = tensors(seed, rounding, step)
    share = share_of(exact + one, exact + two, other + three)
    assert not share.is_substitution, share


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 0.7), st.floats(0.008, 0.2))
def test_coarser_weights_are_found_in_large_rounding(seed: int, rounding: float, step: float) -> None:
    exact, other, one, two, three = tensors(seed, rounding * step, step)
    share = share_of(other + one, exact + two, other + three)
    assert share.share > 0.6, share
    if rounding < 0.5:
        assert share.is_substitution, share


def test_what_is_wrong_otherwise_is_no_substitution() -> None:
    exact, other, *_ = tensors(0, 0.0, 0.01)
    towards = other - exact
    wrong = exact + towards + 30 * towards.flip(1)
    assert not share_of(wrong, exact, other).is_substitution


def test_few_values_say_nothing() -> None:
    exact, other, *_ = tensors(0, 0.0, 0.01)
    assert not share_of(other[:, :2], exact[:, :2], other[:, :2]).is_substitution


def test_shapes_must_agree() -> None:
    exact, other, *_ = tensors(0, 0.0, 0.01)
    with pytest.raises(ValueError, match="not compared"):
        share_of(exact, exact[:, :3], other)
