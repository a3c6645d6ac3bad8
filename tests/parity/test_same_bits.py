"""The compiled kernels give the same bits on all instruction sets that this processor has (docs/exact.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from petalnode.node.blocks.kernels.library import VECTORS, Library
from tests.parity.same_bits import digests


def test_the_vectors_are_those_of_the_page(kernels: Library) -> None:
    """By which a server knows, before it announces the kind, that its kernels compute it."""
    found = digests(kernels, VECTORS.seed, VECTORS.products, VECTORS.steps)
    assert {last for name, (_, last) in found.items() if name != "plain"} == {f"{VECTORS.digest:016x}"}
    page = (Path(__file__).parents[2] / "docs" / "exact.md").read_text()
    assert f"`{VECTORS.digest:016x}`" in page
    assert kernels.is_exact


@pytest.mark.parametrize("seed", [1, 2])
def test_products_and_steps_have_the_same_bits_everywhere(kernels: Library, seed: int) -> None:
    found = digests(kernels, seed, 190, 20)
    apart = found.pop("plain")
    assert len(set(found.values())) == 1, found
    assert apart not in found.values()  # a product and a sum that are rounded apart are seen
