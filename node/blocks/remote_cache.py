"""A session's cache as transformers sees it, and what a step tells the remote blocks beside the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..errors import BadInput
from .images.layout import TEXT, TokenLayout


class RemoteCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A session's cache as transformers' `generate` sees it: the tokens are counted here and held by servers.

    Attributes:
        session: whatever the owner of the remote blocks wants to find again at the next step.
        last: what left the blocks in the last step, [rows, tokens, hidden size]; of a prompt, for its last tokens.
    """

    last: torch.Tensor

    def __init__(self, session: Any = None) -> None:
        super().__init__(layers=[])
        self.session = session
        self._length = 0
        self._reorder: list[int] | None = None

    def __bool__(self) -> bool:
        return True  # as transformers' caches, whose length is that of their layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def advance(self, tokens: int) -> None:
        """Counts tokens that the servers hold now."""
        self._length += tokens

    def rollback(self, length: int) -> None:
        """Forgets all tokens from `length` on; the next step's position says so to the servers.

        Raises:
            ValueError: it holds fewer than `length`.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot roll back to {length} tokens: {self._length} are held")
        self._length = length

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers means it: -n forgets the last n tokens; n > 0 keeps the first n."""
        length = tokens_to_remove if tokens_to_remove > 0 else self._length + tokens_to_remove
        self.rollback(min(length, self._length))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row r continues row `beam_idx[r]`; sent with the next step."""
        rows = [int(row) for row in beam_idx]
        self._reorder = rows if self._reorder is None else [self._reorder[row] for row in rows]

    def take_reorder(self) -> list[int] | None:
        """The reorder to be sent with this step, once; None if all rows stay where they are."""
        rows, self._reorder = self._reorder, None
        return None if rows == list(range(len(rows or ()))) else rows

    def reset(self) -> None:
        self._length = 0
        self._reorder = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("a swarm's cache cannot grow rows: give generate() the rows it needs")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("a swarm's cache cannot drop rows")

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_croppable(self) -> bool:
        return True


@dataclass(frozen=True)
class RemoteCall:
    """What remote blocks are told beside the hidden states of a step.

    Attributes:
        cache: of the session; None for a forward pass that keeps nothing.
        position: tokens of a row that the session holds before this step.
        attention_mask: [batch, position + tokens], 0 at padding; None if nothing is padded.
        position_ids: [batch or 1, tokens], or [axes, batch, tokens]; None counts on, padding included.
        outputs: of how many of the last tokens of a row the output is needed; None: of all.
        layout: of the tokens of a prompt with pictures.
    """

    cache: RemoteCache | None
    position: int
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None = None
    outputs: int | None = None
    layout: TokenLayout = TEXT

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Per row, how many of its first tokens are padding; None if there is none.

        Raises:
            BadInput: tokens are masked elsewhere than at the left.
        """
        if self.attention_mask is None:
            return None
        kept = self.attention_mask != 0
        padding = (~kept).sum(-1)
        expected = torch.arange(kept.shape[1], device=kept.device) >= padding.unsqueeze(1)
        if not torch.equal(kept, expected):
            raise BadInput("an attention mask may only hide tokens at the left of each row: pad on the left")
        return tuple(padding.tolist()) if bool(padding.any()) else None


def positions(tokens: int, position: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Position ids [rows or 1, tokens] as transformers' `generate` makes them: padding does not count."""
    if mask is None:
        return torch.arange(position, position + tokens).unsqueeze(0)
    counted = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return counted[:, -tokens:]
