from __future__ import annotations

import pytest
import torch
from torch import nn

from petalnode.node.blocks.dot import DotLinear, use_dots


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(300, 130, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300,), (1, 1, 300), (3, 1, 300), (4, 300), (2, 2, 300), (5, 300)])
def test_equals_the_product(shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(bias)
    rows = torch.randn(shape)
    with torch.inference_mode():
        got, expected = DotLinear(plain, 4)(rows), plain(rows)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    dots = DotLinear(layer(True), 4)
    rows = torch.randn(4, 300)
    with torch.inference_mode():
        together = dots(rows)
        assert all(torch.equal(dots(rows[row : row + 1])[0], together[row]) for row in range(4))


def test_more_rows_and_gradients_are_left_to_torch() -> None:
    plain = layer(True)
    dots = DotLinear(plain, 1)
    rows = torch.randn(1, 300, requires_grad=True)
    dots(rows).sum().backward()
    assert rows.grad is not None
    with torch.inference_mode():
        assert torch.equal(dots(rows.detach().expand(3, -1)), plain(rows.detach().expand(3, -1)))


def test_parameters_stay_the_same_objects() -> None:
    root = nn.Sequential(nn.Linear(512, 512), nn.Linear(16, 16))
    before = dict(root.named_parameters())
    use_dots([root])
    assert {name: id(p) for name, p in root.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert type(root[1]) is nn.Linear  # too small to matter
