"""The layers outside of the blocks, called alone: embeddings, the norm behind the last block, and the head.

What transformers does around them in a forward pass (masks, positions, cosines, outputs) takes longer than the layers
of a small model. Where they alone give the same values to the bit, nothing else is called for a step. That is tried
once on random input. Models that scale their logits, or add positions to their embeddings, go the long way.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Protocol

import torch
from torch import nn

from ...protocols.ids import Boundaries
from .kernels.packing import TiledLinear
from .kernels.tiles import MOST_ROWS, TiledMatrix
from .quantisation.matrix import QuantisedLinear

_PLACES: Final = (0, 7)  # tokens before those whose embeddings are compared
_SHORT: Final = 0.004  # seconds


class WholeModel(Protocol):
    """The model with all that it computes around its blocks."""

    boundaries: Boundaries

    def embedded(self, ids: torch.Tensor, position: int = 0, mask: torch.Tensor | None = None) -> torch.Tensor:
        """What the decoder makes of ids at this position, for its blocks."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states [batch, tokens, hidden size] in the place of what the blocks give."""
        ...


class OuterLayers:
    """Of `model`, in whose `decoder` the module `layer` stands in the place of all blocks.

    Attributes:
        embeds: whether `embed` gives what the decoder gives its blocks; false before `compare_embeddings`.
        are_short: whether `embed` and `head` may be called, and are quicker for one token on a CPU than another thread;
            false before `heads` was asked.
    """

    def __init__(self, whole: WholeModel, model: Any, decoder: nn.Module, layer: nn.Module) -> None:
        self.embeds = False
        self.are_short = False
        self._whole = whole
        self._model = model
        self._decoder = decoder
        self._layer = layer
        self._behind: list[nn.Module] = []
        self._heads: bool | None = None
        self._comparing = threading.Lock()

    @torch.no_grad()
    def compare_embeddings(self) -> None:
        """Sets `embeds`."""
        table, padding = self._model.get_input_embeddings(), getattr(self._model.config, "pad_token_id", None)
        rows = int(table.weight.shape[0])
        chosen = [number for number in range(rows - 1, max(-1, rows - 8), -1) if number != padding][:6]
        ids = torch.tensor([chosen], device=table.weight.device)
        self.embeds = all(_same(self.embed(ids), self._whole.embedded(ids, place)) for place in _PLACES)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden size] of ids int64 [batch, tokens]."""
        hidden: torch.Tensor = self._model.get_input_embeddings()(ids)
        return hidden

    def heads(self) -> bool:
        """Whether `head` gives what the model does, which is compared when this is asked for the first time."""
        if self._heads is None:
            with self._comparing:
                if self._heads is None:
                    self._heads = self._compare_head()
        return self._heads

    @torch.no_grad()
    def _compare_head(self) -> bool:
        weight = self._model.get_input_embeddings().weight
        hidden = torch.randn(1, 2, self._whole.boundaries.of_streams, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(weight.device, weight.dtype)
        called: list[nn.Module] = []
        own = threading.get_ident()  # others may use the model meanwhile

        def note(module: nn.Module, given: Any, output: Any) -> None:
            if threading.get_ident() == own:
                called.append(module)

        hooks = [module.register_forward_hook(note) for module in (*self._decoder.children(), self._layer)]
        try:
            expected = self._whole.logits(hidden)
        finally:
            for hook in hooks:
                hook.remove()
        if self._model.get_output_embeddings() is None or called.count(self._layer) != 1:
            return False
        self._behind = called[called.index(self._layer) + 1 :]
        try:
            same = _same(self.head(hidden), expected)
            self.are_short = same and self.embeds and weight.device.type == "cpu" and self._seconds(hidden) < _SHORT
            return same
        except (TypeError, RuntimeError):  # what stands behind the blocks is not called like this
            return False

    def _seconds(self, hidden: torch.Tensor) -> float:
        """The least of a few calls of `head` for one token."""
        taken = []
        for _ in range(5):
            begun = time.perf_counter()
            self.head(hidden[:, :1])
            taken.append(time.perf_counter() - begun)
        return min(taken)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary] of hidden states [batch, tokens, hidden size]."""
        logits: torch.Tensor = self._model.get_output_embeddings()(self.normed(hidden))
        return logits

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands between the blocks and the head; of the shape of `hidden`."""
        for module in self._behind:
            hidden = module(hidden)
        return hidden

    def logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """The rest of `head`: the kernel, if there is one, begins without a call in which torch lets others run."""
        output = self._model.get_output_embeddings()
        matrix = output.matrix if isinstance(output, (TiledLinear, QuantisedLinear)) else None
        if isinstance(matrix, TiledMatrix) and output.bias is None:
            flat = normed.reshape(-1, normed.shape[-1]).contiguous()
            if flat.dtype == torch.float32 and len(flat) <= MOST_ROWS and not torch.is_grad_enabled():
                return matrix.by_kernels(flat).view(*normed.shape[:-1], -1)
        logits: torch.Tensor = output(normed)
        return logits


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
