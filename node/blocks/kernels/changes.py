"""LoRA (Hu et al. 2021) of some rows of a step, as `struct change` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..span_adapter import AdapterRows, SpanAdapter
from .library import Change, Matrix
from .tiles import LANES

FORM_F32: Final = 0
FORM_F32_COLUMNS: Final = 10


@dataclass(frozen=True, eq=False)
class _Adapted:
    """An adapter's layers, by block and layer of the span, and the tensors that they point into."""

    changes: tuple[Change, ...]
    kept: tuple[torch.Tensor, ...]


class Changes:
    """What adapters change of a span. Not thread-safe.

    Args:
        layers: the modules that may be changed, to block and layer.
    """

    def __init__(self, layers: Mapping[nn.Module, tuple[int, int]]) -> None:
        self._layers = layers
        self._adapters: WeakKeyDictionary[SpanAdapter, _Adapted | None] = WeakKeyDictionary()

    def knows(self, adapter: SpanAdapter) -> bool:
        """Whether all layers that it changes are known."""
        return self._adapted(adapter) is not None

    def of(self, adapters: Sequence[AdapterRows], first: int, blocks: int, tokens: int) -> Any:
        """An array of `Change` for the blocks from the `first` on, and `tokens` tokens of each row."""
        found = []
        for use in adapters:
            adapted = self._adapted(use.adapter)
            for change in adapted.changes if adapted is not None else ():
                if first <= change.block < first + blocks:
                    own = Change.from_buffer_copy(change)
                    own.block, own.first = change.block - first, use.start * tokens
                    own.rows = (use.end - use.start) * tokens
                    found.append(own)
        found.sort(key=lambda change: (change.block, change.layer, change.first))
        return (Change * len(found))(*found)

    def _adapted(self, adapter: SpanAdapter) -> _Adapted | None:
        """What `adapter` changes; None if the kernels do not know a layer of it."""
        if adapter not in self._adapters:
            self._adapters[adapter] = self._described(adapter)
        return self._adapters[adapter]

    def _described(self, adapter: SpanAdapter) -> _Adapted | None:
        changes, kept = [], []
        for module, (down, up) in adapter.pairs:
            place = self._layers.get(module)
            sizes = (*down.shape[1:], *up.shape[:1])
            if place is None or down.dtype != torch.float32 or any(size % LANES for size in sizes):
                return None
            rows, columns = down.contiguous(), up.t().contiguous()
            kept += [rows, columns]
            described = Change(*place)
            described.down = Matrix(FORM_F32, *down.shape, down.shape[1], rows.data_ptr())
            described.up = Matrix(FORM_F32_COLUMNS, *up.shape, up.shape[0], columns.data_ptr())
            changes.append(described)
        return _Adapted(tuple(changes), tuple(kept))
