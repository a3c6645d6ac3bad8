"""Keys and values that stand for several tokens each (DeepSeek-V4), in a session's cache.

Of tokens in windows of `rate`, one behind the other, a block makes an entry when a window is full. Entries grow with
the session, as keys and values do. What the next entry is made of are states: projections of the tokens in the window
that is not full, and where windows overlap a part of those in the last full one.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import pad

_KINDS: Final = {"compressor": 0, "indexer": 1}
"""Of entries, in the order in which a block makes them."""
_LAST: Final = {"compressor": "last compressor", "indexer": "last indexer"}
"""The names of what the last full window hands on."""


class CompressedBlock:
    """One block's part of the cache `view`, with the calls of transformers' `DeepseekV4CSACache`."""

    is_sliding = True

    def __init__(self, view: Any, block: int, config: Any) -> None:
        self._view, self._block, kind = view, block, config.layer_types[block]
        self._rate, self._overlaps = config.compress_rates.get(kind, 1), kind == "compressed_sparse_attention"

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Takes projections [rows, tokens, dim], and returns those of windows that are full now, [rows, windows * rate,
        dim] each, and the number of the first token in them."""
        length = self._view.get_seq_length(self._block)
        held, given = length % self._rate, torch.cat([kv, gate], dim=2)
        if held:
            given = torch.cat([self._view.kept(self._block, name)[:, :held], given], dim=1)
        usable = given.shape[1] - given.shape[1] % self._rate
        full, rest = given[:, :usable], given[:, usable:]
        self._view.keep(self._block, name, pad(rest, (0, 0, 0, self._rate - rest.shape[1])))
        if self._overlaps and self._view.kept(self._block, _LAST[name]) is None:  # of what weighs nothing
            empty = kv.new_zeros(kv.shape[0], self._rate, kv.shape[2] // 2, dtype=torch.float32)
            self._view.keep(self._block, _LAST[name], torch.cat([empty, empty - torch.inf], dim=2))
        full_kv, full_gate = full.chunk(2, dim=2)
        return full_kv, full_gate, length - held

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes full windows [rows, windows, rate, 2 * head_dim], keeps what the last one hands on, and returns what
        the one before the first has."""
        kv, gate = self._view.kept(self._block, _LAST[name]).chunk(2, dim=2)
        last = torch.cat([part[:, -1, :, :head_dim] for part in (chunk_kv, chunk_gate)], dim=2)
        self._view.keep(self._block, _LAST[name], last)
        return kv, gate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Takes entries [rows, windows, dim], and returns all that the session has."""
        entries: torch.Tensor = self._view.update_entries(self._block, _KINDS[name], compressed, self._rate)
        return entries
