"""A matrix that GGUF files hold in two: `kv_b` of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ...models.gguf.weights import GgufWeights
from ..quantisation.matrix import QuantisedMatrix
from .tiles import FORMS, TiledMatrix, held_as

Forms: TypeAlias = tuple[tuple[str, tuple[int, int]], ...]
"""Names of forms and shapes of what a matrix is held as: itself, or the two of `HeadMatrices`."""


def forms_of(stored: Sequence[tuple[str, tuple[int, int]]]) -> Forms:
    """The same of matrices of these kinds and shapes; nothing if the kernels do not hold one of them."""
    found = [(held_as(kind, shape), shape) for kind, shape in stored]
    known = tuple((form, shape) for form, shape in found if form is not None)
    return known if len(known) == len(found) else ()


def nbytes_of(forms: Forms) -> int:
    return sum(FORMS[form].nbytes(shape) for form, shape in forms)


class HeadMatrices(QuantisedMatrix):
    """What makes keys and values of latents, a head after the other: of each its keys' rows, then its values'.

    Args:
        keys: those of keys the other way round, [heads * latent, values of a key].
        values: [heads * values of a value, latent].
        shape: [heads * (values of a key and a value), latent].
    """

    def __init__(self, keys: TiledMatrix, values: TiledMatrix, shape: tuple[int, int]) -> None:
        self.keys, self.values, self.shape = keys, values, shape
        self.form = f"{keys.form}, {values.form}"

    @classmethod
    def of_stored(cls, stored: GgufWeights, name: str, shape: tuple[int, int]) -> HeadMatrices:
        """As `TiledMatrix.of_stored`, of a parameter that has `GgufWeights.of_heads`."""
        parts = enumerate(stored.of_heads(name))
        keys, values = (TiledMatrix.of_stored(kind, [stored.stored_heads(name, at)], own) for at, (kind, own) in parts)
        return cls(keys, values, shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        parts = (("keys", self.keys), ("values", self.values))
        return {f"{part}.{name}": tensor for part, of in parts for name, tensor in of.tensors().items()}

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        plain, latent = self.keys.shape[1], self.shape[1]
        heads = self.keys.shape[0] // latent
        wide, each = self.values.shape[0] // heads, self.shape[0] // heads
        first, last = start // each, -(-end // each)
        keys = self.keys.rows(first * latent, last * latent, dtype).view(-1, latent, plain).transpose(1, 2)
        values = self.values.rows(first * wide, last * wide, dtype).view(-1, wide, latent)
        return torch.cat([keys, values], 1).view(-1, latent)[start - first * each : end - first * each]

    def product(self, values: torch.Tensor) -> torch.Tensor:
        return self.product_in_pieces(values)
