"""The attention cache of one session on one server: keys and values of its tokens for every block of the span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockCacheSpec:
    """What one block keeps for one token of one row.

    Attributes:
        heads: key-value heads.
        key_dim, value_dim: values per head.
        window: tokens a query may look back at, its own included; None is all of them.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def values_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class SpanCache:
    """Buffers for `max_length` tokens of `batch` rows, allocated once; memory is used as tokens come in.

    Sliding-window blocks keep the whole history too: only so can a session be rolled back exactly.

    Not thread-safe: the compute thread owns it.

    Attributes:
        batch: rows.
        max_length: tokens that a row can hold.
        length: tokens that every row holds now.
        left_padding: per row, how many of its first tokens are padding that nothing attends to.
        nbytes: size of the buffers, 0 once freed.
        specs: of the blocks that the session runs through, one each.
        first: number of the first of them within the hosted span; `write` and `window` count from the span's start.
    """

    def __init__(
        self,
        specs: Sequence[BlockCacheSpec],
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        left_padding: Sequence[int] | None = None,
        first: int = 0,
    ) -> None:
        if batch < 1 or max_length < 1:
            raise ValueError(f"a cache holds at least one row and one token, not {batch} and {max_length}")
        padding = [0] * batch if left_padding is None else list(left_padding)
        if len(padding) != batch or any(not 0 <= pad < max_length for pad in padding):
            raise ValueError(f"left padding takes one number of 0 .. {max_length - 1} for each of {batch} rows")
        self.batch = batch
        self.max_length = max_length
        self.length = 0
        self.left_padding = padding
        self.specs = tuple(specs)
        self.first = first
        # One allocation for all blocks: big enough that the allocator maps it lazily and gives it back when freed.
        size = batch * max_length * sum(spec.values_per_token for spec in specs)
        memory = torch.empty(size, dtype=dtype, device=device)
        self.nbytes = memory.numel() * memory.element_size()
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        taken = 0
        for spec in specs:
            for buffers, dim in ((self._keys, spec.key_dim), (self._values, spec.value_dim)):
                count = batch * spec.heads * max_length * dim
                buffers.append(memory[taken : taken + count].view(batch, spec.heads, max_length, dim))
                taken += count

    @property
    def padded(self) -> bool:
        """Whether any row has left padding."""
        return any(self.left_padding)

    def window(self, block: int) -> int | None:
        """The window of the `block`-th block of the span."""
        return self.specs[block - self.first].window

    def write(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts keys and values [batch, heads, tokens, dim] behind what is held and returns all of both.

        `length` stays as it is until `advance`, so that a step that fails half-way leaves no trace. What comes
        back are views of the buffers, [batch, heads, length + tokens, dim].

        Raises:
            ValueError: it would not fit.
        """
        start, end = self.length, self.length + keys.shape[2]
        if end > self.max_length or not self.nbytes:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.max_length if self.nbytes else 0}")
        held_keys = self._keys[block - self.first].narrow(2, 0, end)
        held_values = self._values[block - self.first].narrow(2, 0, end)
        held_keys.narrow(2, start, end - start).copy_(keys)
        held_values.narrow(2, start, end - start).copy_(values)
        return held_keys, held_values

    def advance(self, tokens: int) -> None:
        """Counts the tokens that every block has written."""
        self.length += tokens

    def rollback(self, length: int) -> None:
        """Forgets all tokens from `length` on.

        Raises:
            ValueError: it holds fewer than `length`.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} tokens: {self.length} are held")
        self.length = length

    def reorder(self, rows: Sequence[int]) -> None:
        """Row r continues what row `rows[r]` held: beam search drops rows and doubles others.

        Raises:
            ValueError: not one row number for each row.
        """
        if len(rows) != self.batch or any(not 0 <= row < self.batch for row in rows):
            raise ValueError(f"a reorder names one of {self.batch} rows for each of them, not {list(rows)}")
        moved = [row for row, source in enumerate(rows) if row != source]
        if not moved:
            return
        self.left_padding = [self.left_padding[row] for row in rows]
        if not self.length or not self.nbytes:
            return
        device = self._keys[0].device
        into = torch.tensor(moved, device=device)
        source = torch.tensor([rows[row] for row in moved], device=device)
        for buffer in (*self._keys, *self._values):
            held = buffer.narrow(2, 0, self.length)
            held.index_copy_(0, into, held.index_select(0, source))

    def free(self) -> None:
        """Gives the memory back at once; the cache holds nothing afterwards and takes nothing more."""
        self._keys = [buffer.new_empty(0) for buffer in self._keys]
        self._values = [buffer.new_empty(0) for buffer in self._values]
        self.length = 0
        self.nbytes = 0
