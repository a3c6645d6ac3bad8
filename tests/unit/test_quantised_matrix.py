"""Quantised matrices stand for the values that the papers say, and multiply with just these, both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from petalnode.node.blocks.quantisation import matrix as quantised_matrix
from petalnode.node.blocks.quantisation.matrix import (
    Int8Matrix,
    Nf4Matrix,
    PackedNf4Matrix,
    QuantisedLinear,
    QuantisedMatrix,
    nf4_kind,
)

# QLoRA (Dettmers et al. 2023), appendix E.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
SHAPES = [(64, 128), (96, 96), (100, 160), (70, 90), (1, 2), (33, 64), (1500, 576), (7, 1000)]

# bitsandbytes has its packed product for some processors, and there for some shapes.
KINDS: list[type[QuantisedMatrix]] = [Int8Matrix, Nf4Matrix]
if PackedNf4Matrix.suits((64, 64)):
    KINDS.append(PackedNf4Matrix)
MATRICES = [
    (kind, shape) for kind in KINDS for shape in SHAPES if kind is not PackedNf4Matrix or PackedNf4Matrix.suits(shape)
]
# How far a product may be from that with the dequantised matrix, relative rms: of float32; of inputs rounded to
# sixteen bits; of bfloat16.
TOLERANCE = {Nf4Matrix: 1e-5, Int8Matrix: 2e-4, PackedNf4Matrix: 8e-3}


def weights(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / scale)).round() * scale / 127


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    flat = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    scale = flat.abs().amax(1, keepdim=True)
    nearest = (flat.unsqueeze(2) / scale.unsqueeze(2).clamp(min=1e-30) - NF4).abs().argmin(2)
    return (NF4[nearest] * scale).view(-1)[: weight.numel()].view(weight.shape)


def values_of(matrix: QuantisedMatrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return matrix.rows(0, matrix.shape[0], dtype)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def made(kind: type[QuantisedMatrix], shape: tuple[int, int]) -> QuantisedMatrix:
    return kind.quantise(weights(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "reference"), [(Int8Matrix, in_int8), (Nf4Matrix, in_nf4)])
def test_stands_for_what_the_paper_says(
    kind: type[QuantisedMatrix], reference: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]
) -> None:
    got, expected = values_of(made(kind, shape)), reference(weights(shape))
    # A weight in the middle between two values may fall to either side.
    assert ((got - expected).abs() > 1e-6).float().mean() < 1e-3
    assert relative(got, expected) < 3e-3


@pytest.mark.parametrize(("kind", "shape"), MATRICES)
def test_multiplies_with_what_it_stands_for(kind: type[QuantisedMatrix], shape: tuple[int, int]) -> None:
    matrix = made(kind, shape)
    held = values_of(matrix)
    for count in (1, 2, 37):
        values = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(1))
        assert relative(matrix.product(values), values @ held.t()) < TOLERANCE[kind]
        assert relative(matrix.product_in_pieces(values), values @ held.t()) < 1e-5
        assert relative(matrix.transposed_product(values @ held.t()), values @ held.t() @ held) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right_after_gradientless_steps(kind: type[QuantisedMatrix]) -> None:
    """bitsandbytes' own 4-bit module repacks its weights in the first such step and is wrong from then on."""
    matrix = made(kind, (128, 192))
    layer = QuantisedLinear(matrix, torch.nn.Parameter(torch.ones(128), requires_grad=False), torch.float32)
    values = torch.randn(2, 3, 192, generator=torch.Generator().manual_seed(2), requires_grad=True)
    gradient = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = layer(values.detach())
        layer(values.detach()[:1, :1])
    output = layer(values)
    output.backward(gradient)
    assert torch.equal(output, before)
    assert values.grad is not None
    assert relative(values.grad, gradient @ values_of(matrix)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: type[QuantisedMatrix]) -> None:
    matrix = made(kind, (64, 128))
    values = torch.randn(9, 128, generator=torch.Generator().manual_seed(4))
    together = matrix.product(values)
    alone = torch.cat([matrix.product(values[row : row + 1]) for row in range(9)])
    assert torch.allclose(together, alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(kind: type[QuantisedMatrix], dtype: torch.dtype) -> None:
    matrix = made(kind, (96, 64))
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    output = matrix.product(values)
    assert output.dtype == values_of(matrix, dtype).dtype == dtype
    assert relative(output, values.float() @ values_of(matrix).t()) < 1e-2
    assert relative(matrix.transposed_product(output), output.float() @ values_of(matrix)) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: type[QuantisedMatrix]) -> None:
    weight = weights((64, 64))
    weight[:2] = 0
    if kind is PackedNf4Matrix:
        made(kind, (64, 64))
    matrix = kind.quantise(weight)
    assert not values_of(matrix)[:2].any()
    assert not matrix.product(torch.zeros(2, 64)).any()
    assert matrix.product(torch.ones(1, 64))[0, 2:].all()


def test_large_values_do_not_overflow() -> None:
    """bitsandbytes' own product goes through float16, which ends at 65504."""
    matrix = Int8Matrix.quantise(weights((32, 64)))
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(6)) * 1e6
    assert relative(matrix.product(values), values @ values_of(matrix).t()) < TOLERANCE[Int8Matrix]


@pytest.mark.parametrize("kind", KINDS)
def test_is_what_it_was_after_it_was_kept(kind: type[QuantisedMatrix]) -> None:
    shape = (96, 128)
    matrix = made(kind, shape)
    again = kind.restore(matrix.tensors(), shape, torch.device("cpu"))
    values = torch.randn(4, 128)
    assert torch.equal(again.product(values), matrix.product(values))
    for other in ((96, 64), (128, 96)):
        with pytest.raises(ValueError, match=r"no .* matrix"):
            kind.restore(matrix.tensors(), other, torch.device("cpu"))


def test_damage_shows_in_the_error() -> None:
    for kind, usual in ((Int8Matrix, 0.02), (Nf4Matrix, 0.12)):
        weight = weights((64, 128))
        assert kind.quantise(weight).error(weight) < usual
        assert kind.quantise(weights((64, 128), seed=1)).error(weight) > 1
        weight[3, 5] = torch.nan
        assert not kind.quantise(weight).error(weight) < usual


def test_without_a_quick_kernel_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_matrix, "_multiplies_bytes", lambda: False)
    matrix = Int8Matrix.quantise(weights((64, 128)))
    values = torch.randn(3, 128)
    assert torch.equal(matrix.product(values), matrix.product_in_pieces(values))
    assert nf4_kind((65, 128), torch.device("cpu")) is Nf4Matrix
