"""Linear layers for a few rows at a time, as dot products.

A decode step multiplies every weight matrix with one row, which is bound by memory: each weight is read once. The
matrix product that torch calls for it is made for many rows. On some processors it reaches a third of what the memory
gives. `numpy.vecdot` takes the rows of the weights one by one, in order. Which of the two is quicker here is measured
when a model is loaded, per shape of matrix.

A row's result does not depend on the rows beside it, as it does in a matrix product.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

_ROWS = (4, 1)  # how many rows to try it for, most first
_SMALL = 1 << 16  # values; a smaller matrix is in the processor's cache and not worth a measurement
_SAMPLE_BYTES = 32 << 20  # how much weight a measurement reads, so that it comes from memory
_WORTH = 0.9  # of the time that torch needs: less is noise


class DotLinear(nn.Linear):
    """An `nn.Linear` over the same parameters that takes up to `max_rows` rows as dot products.

    Only where no gradient is wanted; else, and for more rows, it is what `nn.Linear` is.
    """

    def __init__(self, original: nn.Linear, max_rows: int) -> None:
        nn.Module.__init__(self)  # the parameters exist already
        self.in_features = original.in_features
        self.out_features = original.out_features
        self.weight = original.weight
        self.bias = original.bias
        self.max_rows = max_rows
        self._matrix = original.weight.detach().numpy()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if rows > self.max_rows or input.dtype != torch.float32 or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        output = dot_rows(self._matrix, input.reshape(rows, self.in_features))
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)


def dot_rows(matrix: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
    """float32 [rows, in] times the transpose of float32 `matrix` [out, in]: [rows, out]."""
    values = rows.numpy()
    if len(values) == 1:
        return torch.from_numpy(np.vecdot(matrix, values[0])).unsqueeze(0)
    # Rows inside, so that each row of the matrix is fetched once.
    return torch.from_numpy(np.vecdot(matrix[:, None], values[None])).t().contiguous()


def use_dots(modules: Iterable[nn.Module]) -> None:
    """Puts a `DotLinear` in the place of every linear layer in `modules` for which it is quicker here."""
    places = defaultdict(list)
    for root in modules:
        for parent in root.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and is_large(child.weight):
                    places[tuple(child.weight.shape)].append((parent, name, child))
    for same_shape in places.values():
        max_rows = _quicker_up_to([child.weight.detach() for _, _, child in same_shape])
        if max_rows:
            for parent, name, child in same_shape:
                setattr(parent, name, DotLinear(child, max_rows))


def is_large(weight: torch.Tensor) -> bool:
    """Whether float32 weights of a CPU are worth a measurement of who multiplies them."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= _SMALL
    )


@torch.no_grad()
def _quicker_up_to(weights: list[torch.Tensor]) -> int:
    """For how many rows dot products are quicker than torch's product with weights like these; 0 for none."""
    nbytes = weights[0].numel() * weights[0].element_size()
    sample = weights[: max(1, _SAMPLE_BYTES // nbytes)]
    matrices = [weight.numpy() for weight in sample]
    for rows in _ROWS:
        values = torch.ones(rows, weights[0].shape[1])
        dots = best_time(lambda v=values: [dot_rows(matrix, v) for matrix in matrices])  # type: ignore[misc]
        product = best_time(lambda v=values: [linear(v, weight) for weight in sample])  # type: ignore[misc]
        if dots < _WORTH * product:
            return rows
    return 0


def best_time(work: Callable[[], object]) -> float:
    """Seconds of the quickest of a few runs: what else goes on can only make it slower."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
