"""The cache of one session on one server: keys and values of its tokens, and states, for every block of the span; and
what a model of transformers sees as its cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ...protocols.ids import AXES, Layout, next_cut
from ...protocols.inference import STEP_TOKENS
from .caches.form import CacheForm
from .caches.pages import WINDOWS, let_go
from .caches.states import SNAPSHOT, STATE_CHUNK, WINDOW, HeldTokens, StateRing, StatesLost, StateSpec, StateView


@dataclass(frozen=True)
class BlockCacheSpec:
    """What one block keeps for one token of one row, and for all tokens of a row.

    Attributes:
        heads: key-value heads; 0 in a block without attention.
        key_dim, value_dim: values per head; a `value_dim` of 0: of the keys alone.
        window: tokens a query may look back at, its own included; None is all of them.
        states: of its convolutions and its linear attention.
        forgets: whether the memory of tokens far behind the window is given back while the session goes on.
        index_dim: values of the key by which a token is chosen for attention (DeepSeek Sparse Attention, arXiv
            2512.02556); 0: all tokens get it.
        entries: values of a token's part in each kind of entry that stands for several tokens (`caches/own_states.py`).
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None
    states: tuple[StateSpec, ...] = ()
    forgets: bool = False
    index_dim: int = 0
    entries: tuple[int, ...] = ()

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """(heads, values per head) of what is kept of a token: key, value, the key of its index if there is one, and
        its parts of entries."""
        behind = (self.index_dim, *self.entries) if self.index_dim else self.entries
        return ((self.heads, self.key_dim), (self.heads, self.value_dim), *((1, dim) for dim in behind))

    def bytes_per_token(self, form: CacheForm) -> int:
        return sum(heads * form.width(dim) for heads, dim in self.buffers) * form.dtype.itemsize

    def bytes_per_row(self, form: CacheForm, max_length: int, batch: int) -> int:
        """At the most, of a session of `max_length` tokens in each of `batch` rows; states of the past are among it."""
        tokens, entries = max_length, sum(map(form.width, self.entries)) * form.dtype.itemsize
        if self.forgets and self.window is not None:
            tokens = min(tokens, self.window + WINDOWS.back + WINDOWS.at_once + max(STEP_TOKENS // batch, 1))
        growing = tokens * (self.bytes_per_token(form) - entries) + max_length * entries
        return growing + StateRing.bytes_per_row(self.states)


class SpanCache:
    """Buffers for `max_length` tokens of `batch` rows, allocated once; memory is used as tokens come in.

    Of blocks with windows (`caches/pages.py`) or states (`caches/states.py`) only the last tokens or a few states are
    kept. So an older position cannot be gone back to.

    Not thread-safe: the compute thread owns it.

    Attributes:
        batch: rows.
        max_length: tokens that a row can hold.
        length: tokens that every row holds now.
        left_padding: per row, how many of its first tokens are padding that nothing attends to.
        nbytes: of keys, values and states that may be kept at once, 0 once freed.
        states: of the blocks; None where they keep none.
        form: how keys and values are held.
        memory: all buffers behind one another: for each block keys, then values, of [batch, heads, max_length, width],
            then keys of its index and entries likewise.
        specs: of the blocks that the session runs through, one each.
        first: number of the first of them within the hosted span; `write` and `window` count from the span's start.
        long_factors: as `BlockStack.run`, of the step that is computed now.
        positions: int64 [axes, batch, max_length] as far as `length`, once a step has said where its tokens stand.
    """

    def __init__(
        self,
        specs: Sequence[BlockCacheSpec],
        batch: int,
        max_length: int,
        form: CacheForm,
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
        self.long_factors = False
        self.positions: torch.Tensor | None = None
        # Of the present step, whose cuts these are, counted from its first token.
        self._groups, self._cuts = torch.empty(batch, 0, dtype=torch.long), list[int]()
        self._begun = 0
        self.specs = tuple(specs)
        self.first = first
        # One allocation for all blocks: big enough that the allocator maps it lazily and gives it back when freed.
        self.form = form
        in_buffers = batch * max_length * sum(spec.bytes_per_token(form) for spec in specs)
        self.nbytes = batch * sum(spec.bytes_per_row(form, max_length, batch) for spec in specs)
        self._reach = max((spec.window or 0 for spec in specs if spec.forgets), default=0)
        self._forgotten = 0  # tokens, where there is such a window
        self.states = StateRing() if any(spec.states for spec in specs) else None
        self.memory = memory = torch.empty(in_buffers // form.dtype.itemsize, dtype=form.dtype, device=device)
        self._held: list[list[torch.Tensor]] = [[] for _ in specs]  # for each block as `spec.buffers` has it
        taken = 0
        for spec, buffers in zip(specs, self._held, strict=True):
            for heads, dim in spec.buffers:
                width = form.width(dim)
                count = batch * heads * max_length * width
                buffers.append(memory[taken : taken + count].view(batch, heads, max_length, width))
                taken += count

    @property
    def padded(self) -> bool:
        """Whether any row has left padding."""
        return any(self.left_padding)

    @property
    def settled(self) -> bool:
        """Whether nothing that is held for a token changes with those behind it, or goes by where it stands: `read`
        leaves that out."""
        placed = self.positions is not None
        return not any(spec.entries or (placed and spec.index_dim) for spec in self.specs)

    @property
    def lacks_states(self) -> bool:
        return self.states is not None and (not self.length or self.states.begin(self.length) is not None)

    def passes(self, tokens: int) -> tuple[int, ...]:
        """How many of the next tokens to compute at a time: first none of them where much comes once more, whose state
        is kept then. Together with them it would grow, as long as drafts are wrong."""
        again = None if self.states is None else self.states.begin(self.length)
        return (0, tokens) if again is not None and again.shape[1] > WINDOW // 4 else (tokens,)

    def window(self, block: int) -> int | None:
        """The window of the `block`-th block of the span."""
        return self.specs[block - self.first].window

    def write(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts keys and values [batch, heads, tokens, dim] behind what is held and returns all of both.

        `length` stays as it is until `advance`, so that a step that fails half-way leaves no trace. What comes
        back are views of the buffers, [batch, heads, length + tokens, width]; `opened` has their values.

        Raises:
            ValueError: it would not fit.
        """
        values = values[..., : self.specs[block - self.first].value_dim]
        return self._put(block, 0, keys), self._put(block, 1, values)

    def _put(self, block: int, place: int, given: torch.Tensor) -> torch.Tensor:
        """Puts them into the buffer at this place of `BlockCacheSpec.buffers`, and returns all that it holds then."""
        end = self.length + given.shape[2]
        if end > self.max_length or not self.nbytes:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.max_length if self.nbytes else 0}")
        held = self._held[block - self.first][place].narrow(2, 0, end)
        self.form.put(given, held.narrow(2, self.length, given.shape[2]))
        return held

    def write_index(self, block: int, keys: torch.Tensor) -> torch.Tensor:
        """As `write`, of the block's index: keys [batch, tokens, dim] in, the values of all of them out."""
        dim = self.specs[block - self.first].index_dim
        return self.form.opened(self._put(block, 2, keys.unsqueeze(1)), dim).squeeze(1)

    def write_entries(self, block: int, kind: int, entries: torch.Tensor, rate: int) -> torch.Tensor:
        """Puts entries [batch, entries, dim], each for the next `rate` tokens, behind those that are held, and returns
        all of this kind. One lies where these tokens have their parts of it."""
        spec, before = self.specs[block - self.first], self.length - self.length % rate
        part, count = spec.entries[kind], entries.shape[1] * rate
        if before + count > self.max_length or not self.nbytes:
            raise ValueError(f"entries for {before + count} tokens do not fit")
        buffer = self._held[block - self.first][-len(spec.entries) + kind].narrow(2, 0, before + count)
        padded = torch.nn.functional.pad(entries, (0, rate * part - entries.shape[2]))
        self.form.put(padded.reshape(self.batch, 1, count, part), buffer.narrow(2, before, count))
        opened = self.form.opened(buffer, part).reshape(self.batch, (before + count) // rate, rate * part)
        return opened[:, :, : entries.shape[2]]

    def opened(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of what `write` returned for this block, [..., dim]; copies unless the dtype is computed in."""
        spec = self.specs[block - self.first]
        return self.form.opened(keys, spec.key_dim), self.form.opened(values, spec.value_dim)

    def keep_all(self) -> None:
        """No memory of tokens behind a window is given back, so that every rollback of another's session can be."""
        self._reach = 0

    def begin_step(self, tokens: int) -> None:
        """The next `tokens` tokens of a row are one step, which may be computed in several parts."""
        end = self.length - self._reach - WINDOWS.back
        if self._reach and end >= self._forgotten + WINDOWS.at_once:
            for spec, buffers in zip(self.specs, self._held, strict=True):
                for buffer in buffers[:2] if spec.forgets else ():
                    let_go(buffer, max(self._forgotten - WINDOWS.at_once, 0), end)
            self._forgotten = end
        if self.states is not None:
            self.states.mark(self.length, tokens)

    def place(self, tokens: int, layout: Layout) -> None:
        """How the next tokens of each row, a whole step, are laid out."""
        self._begun, self._cuts = self.length, layout.cuts(self.batch, tokens) if layout.groups else []
        self._groups = torch.tensor(layout.groups, dtype=torch.long).view(self.batch, len(layout.groups) // self.batch)
        positions = layout.positions
        if self.positions is None:
            if not positions:
                return
            shape = AXES, self.batch, self.max_length
            self.positions = torch.empty(shape, dtype=torch.long, device=self.memory.device)
            self.positions.copy_(self._counted(0, self.max_length))
        following = self.positions[:, :, self.length : self.length + tokens]
        placed = torch.tensor(positions).view(following.shape) if positions else self._counted(self.length, tokens)
        following.copy_(placed)

    def positions_of(self, tokens: int, held: int = 0) -> torch.Tensor:
        """Those of the next tokens, behind the last `held` that are here: int64 [batch, held + tokens], or [axes,
        batch, held + tokens] once steps have given some."""
        first, end = self.length - held, self.length + tokens
        if self.positions is not None:
            return self.positions[:, :, first:end]
        return self._counted(first, end - first).to(self.memory.device)

    def whole_groups(self, tokens: int) -> int:
        """How many of the next tokens to compute at once where `tokens` would do: no group is cut, and states come to
        where later sessions may begin."""
        done = self.length - self._begun
        if self.states is not None and self.length % STATE_CHUNK == 0:
            tokens = min(tokens, SNAPSHOT - self.length % SNAPSHOT)
        return next_cut(self._cuts, done + tokens) - done if self._cuts else tokens

    def groups_of(self, tokens: int) -> torch.Tensor | None:
        """The groups of all tokens up to the next ones, int64 [batch, length + tokens]: equal numbers are of those that
        see each other, -1 is of those that see what is before them. None: all do."""
        done = self.length - self._begun
        left = self._groups[:, done : done + tokens]
        if not left.any():
            return None
        ids = torch.where(left > 0, left + torch.arange(tokens), -1)
        return torch.nn.functional.pad(ids, (self.length, 0), value=-1).to(self.memory.device)

    def _counted(self, start: int, tokens: int) -> torch.Tensor:
        """The positions of the tokens from `start` on, [batch, tokens]: padding does not count."""
        return (torch.arange(start, start + tokens) - torch.tensor(self.left_padding).unsqueeze(1)).clamp(min=0)

    @contextmanager
    def replaying(self) -> Iterator[torch.Tensor | None]:
        """Tokens are computed within it. What it gives, [rows, tokens, hidden size], has to be computed ahead of them
        once more. `length` is where that begins; None: nothing."""
        length = self.length
        if self.states is None:
            yield None
            return
        again = self.states.begin(length)
        self.length -= 0 if again is None else again.shape[1]
        try:
            yield again
        except BaseException:
            self.states.abandon()
            raise
        finally:
            self.length = length

    def advance(self, tokens: int, entered: torch.Tensor | None = None) -> None:
        """Counts the tokens that every block has written. `entered`: what was computed, with what was once more."""
        self.length += tokens
        if self.states is not None:
            if entered is None or not self.nbytes:
                raise ValueError("states follow from what entered the blocks, of a cache that is not freed")
            self.states.commit(self.length, entered)

    def count_alone(self) -> None:
        """Within `replaying`, which sets `length` back: a token was computed alone. Models mask no padding there."""
        if self.states is not None and self.padded:
            self.states.blank([row for row, padding in enumerate(self.left_padding) if self.length < padding])
        self.length += 1

    def rollback(self, length: int) -> None:
        """Forgets all tokens from `length` on.

        Raises:
            ValueError: it holds fewer than `length`.
            StatesLost: it cannot go back so far, and holds what it held.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} tokens: {self.length} are held")
        again = 0 if self.states is None else 2 * WINDOW  # tokens before that are computed once more, at the most
        if length and max(length + 1 - self._reach - again, 0) < self._forgotten:
            raise StatesLost(
                f"keys and values that {length} tokens look at are not kept: send again what led there, from the first "
                "token on"
            )
        if self.states is not None:
            self.states.rollback(length)
        self.length = length
        self._forgotten = min(self._forgotten, length)

    def read(self, start: int, end: int) -> Sequence[HeldTokens]:
        """A copy of what is held for the tokens `start` .. `end` of every row, for `restore`: one of each device.

        Raises:
            ValueError: not all of them are held.
        """
        if not self._forgotten <= start < end <= self.length:
            raise ValueError(f"tokens {start} .. {end} are wanted: {self.length} are held")
        values = torch.cat([buffer[:, :, start:end].reshape(-1) for buffer in chain(*self._held)])
        return (HeldTokens(values, {} if self.states is None else self.states.snapshots.get(end)),)

    def restore(self, parts: Sequence[Sequence[HeldTokens]], tokens: int) -> None:
        """Begins with what `read` gave of caches of the same blocks, rows and dtype: parts of `tokens` tokens each. At
        the end of the last one states were kept, where there are any.

        Raises:
            ValueError: something is held already, or they do not fit.
        """
        if self.length or tokens * len(parts) > self.max_length or not self.nbytes:
            raise ValueError(f"{len(parts)} x {tokens} tokens cannot begin a cache of {self.max_length}")
        buffers = list(chain(*self._held))
        sizes = [tokens * buffer.numel() // self.max_length for buffer in buffers]
        for number, (part,) in enumerate(parts):
            for buffer, values in zip(buffers, torch.split(part.values, sizes), strict=True):
                into = buffer[:, :, number * tokens : (number + 1) * tokens]
                into.copy_(values.view(into.shape))
        self.length = tokens * len(parts)
        if self.states is not None:
            self.states.restore({end * tokens: part.states for end, (part,) in enumerate(parts, 1) if part.states})

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
        self.positions = None if self.positions is None else self.positions[:, list(rows)]
        if not self.length or not self.nbytes:
            return
        if self.states is not None:
            self.states.reorder(rows)
        device = self.memory.device
        into = torch.tensor(moved, device=device)
        source = torch.tensor([rows[row] for row in moved], device=device)
        for spec, buffers in zip(self.specs, self._held, strict=True):
            for place, buffer in enumerate(buffers):
                first = self._forgotten if spec.forgets and place < 2 else 0
                held = buffer.narrow(2, first, self.length - first)
                held.index_copy_(0, into, held.index_select(0, source))

    def free(self) -> None:
        """Gives the memory back at once; the cache holds nothing afterwards and takes nothing more."""
        self.memory = self.memory.new_empty(0)
        self._held = [[] for _ in self.specs]
        self.length = 0
        self.nbytes = 0
        self.positions = None
        if self.states is not None:
            self.states.rollback(0)


class SessionView(StateView):
    """A `SpanCache` as transformers' models see it. Blocks count from 0 within the span."""

    def __init__(self, cache: SpanCache) -> None:
        super().__init__(cache.states)
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [batch, heads, tokens, dim] and returns what the mask of `get_mask_sizes` is made for."""
        keys, values = self.cache.write(layer_idx, key_states, value_states)
        window = self.cache.window(layer_idx)
        first = 0 if window is None else max(self.cache.length - window + 1, 0)
        return self.cache.opened(layer_idx, keys[:, :, first:], values[:, :, first:])

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores [batch, tokens, dim] and returns those of all tokens."""
        return self.cache.write_index(layer_idx, indexer_key_states)

    def update_entries(self, layer_idx: int, kind: int, entries: torch.Tensor, rate: int) -> torch.Tensor:
        """As `SpanCache.write_entries`."""
        return self.cache.write_entries(layer_idx, kind, entries, rate)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys returned by `update`, number of the first of them)."""
        # Asked with an index into `is_sliding`, which starts at the session's first block.
        held, window = self.cache.length, self.cache.specs[layer_idx].window
        first = 0 if window is None else max(held - window + 1, 0)
        return held + query_length - first, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.max_length

    @property
    def is_sliding(self) -> list[bool]:
        return [spec.window is not None for spec in self.cache.specs]

    @property
    def is_linear(self) -> list[bool]:
        return [bool(spec.states) and not spec.heads for spec in self.cache.specs]

    @property
    def is_dummy(self) -> list[bool]:
        return [not spec.states and not spec.heads for spec in self.cache.specs]

    def __len__(self) -> int:
        return len(self.cache.specs)
