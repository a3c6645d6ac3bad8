"""The attention cache of one session on one server: keys and values of its tokens for every block of the span; what a
model of transformers sees as its cache, and ragged attention over it.

Ragged: one decode step of many sessions is one batch for all linear layers, while attention runs per session on
keys and values of its own length. No padding, no copy of the cache, no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from ..models.quantisation import CACHE_BLOCK, CacheDtype, key_bytes

RAGGED = "petalnode_ragged"
_LEAST = 1e-30  # blocks of nothing larger become zeros in eight bits: no scale is subnormal, which may count as zero

# What models hand to an attention function and that changes nothing here: positions are in the rotated query and
# key already, the window is in what `RaggedView.update` returns, and one query needs no causal mask.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "sliding_window", "is_causal", "layer_idx", "cache_position", "max_length_q"}
)


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

    def bytes_per_token(self, form: CacheForm) -> int:
        return self.heads * (form.width(self.key_dim) + form.width(self.value_dim)) * form.dtype.itemsize


@dataclass(frozen=True)
class CacheForm:
    """How keys and values of dtype `computed` are held.

    auto: as they are. bfloat16: rounded to the nearest, ties to even. int8: each `CACHE_BLOCK` values of a key or value
    as whole multiples, -127 to 127, of a bfloat16 scale, which is their largest magnitude / 127, rounded up: as in
    GGUF's Q8_0, with a scale that has float32's range. What they stand for is exact in float32, and the compiled
    kernels (`hold_key` and `open_keys` in `kernels/`) give the same bits. A block with a value that is not finite
    becomes NaN.
    """

    held: CacheDtype
    computed: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the memory."""
        if self.held == "int8":
            return torch.uint8
        return torch.bfloat16 if self.held == "bfloat16" else self.computed

    def width(self, dim: int) -> int:
        """Elements of the memory that a key or value of `dim` values takes."""
        return key_bytes(self.held, dim, self.computed.itemsize) // self.dtype.itemsize

    def put(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Holds `values` [..., dim] in `into` [..., width]."""
        if self.held != "int8":
            into.copy_(values)
            return
        dim = values.shape[-1]
        padded = torch.nn.functional.pad(values.float(), (0, -dim % CACHE_BLOCK))
        blocks = padded.view(*values.shape[:-1], -(-dim // CACHE_BLOCK), CACHE_BLOCK)
        most = blocks.abs().amax(-1)
        finite = most <= torch.finfo(torch.float32).max
        scales = torch.where(finite & (most > _LEAST), most / 127.0, 0.0)
        scales = ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        codes = torch.where(scales.unsqueeze(-1) > 0, blocks / scales.unsqueeze(-1), 0.0).round_()
        scales = torch.where(finite, scales, torch.nan)
        into[..., :dim].view(torch.int8).copy_(codes.flatten(-2)[..., :dim])
        into[..., dim + dim % 2 :].view(torch.bfloat16).copy_(scales)

    def opened(self, held: torch.Tensor, dim: int) -> torch.Tensor:
        """The values [..., dim] that `held` [..., width] stands for, in the dtype that is computed in."""
        if self.held != "int8":
            return held.to(self.computed)
        codes = held[..., :dim].view(torch.int8).to(torch.float32)
        scales = held[..., dim + dim % 2 :].view(torch.bfloat16).to(torch.float32)
        if dim % CACHE_BLOCK:
            return (codes * scales.repeat_interleave(CACHE_BLOCK, -1)[..., :dim]).to(self.computed)
        blocks = codes.view(*scales.shape, CACHE_BLOCK) * scales.unsqueeze(-1)
        return blocks.view(codes.shape).to(self.computed)


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
        form: how keys and values are held.
        memory: all buffers behind one another: for each block keys, then values, of [batch, heads, max_length, width].
        specs: of the blocks that the session runs through, one each.
        first: number of the first of them within the hosted span; `write` and `window` count from the span's start.
        long_factors: as `BlockStack.run`, of the step that is computed now.
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
        self.specs = tuple(specs)
        self.first = first
        # One allocation for all blocks: big enough that the allocator maps it lazily and gives it back when freed.
        self.form = form
        self.nbytes = batch * max_length * sum(spec.bytes_per_token(form) for spec in specs)
        self.memory = memory = torch.empty(self.nbytes // form.dtype.itemsize, dtype=form.dtype, device=device)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        taken = 0
        for spec in specs:
            for buffers, dim in ((self._keys, spec.key_dim), (self._values, spec.value_dim)):
                width = form.width(dim)
                count = batch * spec.heads * max_length * width
                buffers.append(memory[taken : taken + count].view(batch, spec.heads, max_length, width))
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
        back are views of the buffers, [batch, heads, length + tokens, width]; `opened` has their values.

        Raises:
            ValueError: it would not fit.
        """
        start, end = self.length, self.length + keys.shape[2]
        if end > self.max_length or not self.nbytes:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.max_length if self.nbytes else 0}")
        held_keys = self._keys[block - self.first].narrow(2, 0, end)
        held_values = self._values[block - self.first].narrow(2, 0, end)
        self.form.put(keys, held_keys.narrow(2, start, end - start))
        self.form.put(values, held_values.narrow(2, start, end - start))
        return held_keys, held_values

    def opened(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of what `write` returned for this block, [..., dim]; copies unless the dtype is computed in."""
        spec = self.specs[block - self.first]
        return self.form.opened(keys, spec.key_dim), self.form.opened(values, spec.value_dim)

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

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy of what is held for the tokens `start` .. `end` of every row, for `restore`: flat, in the dtype of the
        memory.

        Raises:
            ValueError: not all of them are held.
        """
        if not 0 <= start < end <= self.length:
            raise ValueError(f"tokens {start} .. {end} are wanted: {self.length} are held")
        return torch.cat([buffer[:, :, start:end].reshape(-1) for buffer in (*self._keys, *self._values)])

    def restore(self, parts: Sequence[torch.Tensor], tokens: int) -> None:
        """Begins with what `read` gave of caches of the same blocks, rows and dtype: parts of `tokens` tokens each.

        Raises:
            ValueError: something is held already, or they do not fit.
        """
        if self.length or tokens * len(parts) > self.max_length or not self.nbytes:
            raise ValueError(f"{len(parts)} x {tokens} tokens cannot begin a cache of {self.max_length}")
        buffers = (*self._keys, *self._values)
        sizes = [tokens * buffer.numel() // self.max_length for buffer in buffers]
        for number, part in enumerate(parts):
            for buffer, values in zip(buffers, torch.split(part, sizes), strict=True):
                into = buffer[:, :, number * tokens : (number + 1) * tokens]
                into.copy_(values.view(into.shape))
        self.length = tokens * len(parts)

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
        self.memory = self.memory.new_empty(0)
        self._keys = [buffer.new_empty(0) for buffer in self._keys]
        self._values = [buffer.new_empty(0) for buffer in self._values]
        self.length = 0
        self.nbytes = 0


class NotRagged(Exception):
    """This architecture's attention needs something that ragged attention does not do."""


class SessionView(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `SpanCache` as transformers' models see it. Blocks count from 0 within the span."""

    def __init__(self, cache: SpanCache) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [batch, heads, tokens, dim] and returns what the mask of `get_mask_sizes` is made for."""
        keys, values = self._cache.write(layer_idx, key_states, value_states)
        window = self._cache.window(layer_idx)
        first = 0 if window is None else max(self._cache.length - window + 1, 0)
        return self._cache.opened(layer_idx, keys[:, :, first:], values[:, :, first:])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys returned by `update`, number of the first of them)."""
        # Asked with an index into `is_sliding`, which starts at the session's first block.
        held, window = self._cache.length, self._cache.specs[layer_idx].window
        first = 0 if window is None else max(held - window + 1, 0)
        return held + query_length - first, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._cache.max_length

    @property
    def is_sliding(self) -> list[bool]:
        return [spec.window is not None for spec in self._cache.specs]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def __len__(self) -> int:
        return len(self._cache.specs)


class Rows(list[torch.Tensor]):
    """Keys or values of several sessions as these hold them: [rows, heads, their length, width] each.

    They are opened a session at a time, so that no more of them is in memory twice.
    """

    def __init__(self, form: CacheForm, dim: int, window: int | None) -> None:
        super().__init__()
        self.form, self.dim, self.window = form, dim, window

    def opened(self, held: torch.Tensor) -> torch.Tensor:
        """The values of one of them, [rows, heads, length, dim]."""
        return self.form.opened(held, self.dim)


class RaggedView(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The caches of several sessions as one cache that takes one token for every row of all of them."""

    def __init__(self, caches: Sequence[SpanCache]) -> None:
        super().__init__(layers=[])
        self._caches = caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Stores [all rows, heads, 1, dim] and returns each session's own keys and values (`Rows`).

        A session with left padding comes back as one entry for each row, without its padding.
        """
        form, window = self._caches[0].form, self._caches[0].window(layer_idx)
        all_keys = Rows(form, key_states.shape[-1], window)
        all_values = Rows(form, value_states.shape[-1], window)
        taken = 0
        for cache in self._caches:
            rows = cache.batch
            keys, values = cache.write(layer_idx, key_states[taken : taken + rows], value_states[taken : taken + rows])
            taken += rows
            first = 0 if window is None else max(cache.length + 1 - window, 0)
            if cache.padded:
                for row, padding in enumerate(cache.left_padding):
                    skip = min(max(first, padding), cache.length)
                    all_keys.append(keys[row : row + 1, :, skip:])
                    all_values.append(values[row : row + 1, :, skip:])
            elif first:
                all_keys.append(keys[:, :, first:])
                all_values.append(values[:, :, first:])
            else:
                all_keys.append(keys)
                all_values.append(values)
        return all_keys, all_values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are given to the model: no length is right for all rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        raise NotRagged("it builds an attention mask")


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row on `Rows` of keys and values.

    Query heads that share a key-value head are packed as if they were tokens ([rows, kv heads, group, dim]), so
    that no key is repeated; `enable_gqa` is ten times slower in bfloat16 on CPUs.

    Args:
        query: [all rows, heads, 1, dim].
        kwargs: `softcap`, with which scores become softcap * tanh(score / softcap) (Gemma 2); `s_aux`, per head a score
            that takes part in the softmax and has no value (GPT-OSS); nothing else that changes the outcome.

    Returns:
        [all rows, 1, heads, value dim], None.

    Raises:
        NotRagged: the model wants more than this.
    """
    if not isinstance(key, Rows) or query.shape[2] != 1:
        raise NotRagged("it does not hand on what the cache returned")
    if attention_mask is not None:
        raise NotRagged("it builds an attention mask")
    softcap, s_aux = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    for name, argument in kwargs.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            raise NotRagged(f"its attention takes {name!r}")
    if kwargs.get("sliding_window", key.window) != key.window:
        raise NotRagged("its window is not the one of its cache")
    heads = query.shape[1]
    outputs = []
    taken = 0
    for held_keys, held_values in zip(key, value, strict=True):
        keys, values = key.opened(held_keys), value.opened(held_values)
        rows, kv_heads = keys.shape[:2]
        packed = query[taken : taken + rows].reshape(rows, kv_heads, heads // kv_heads, -1)
        taken += rows
        if softcap is None and s_aux is None:
            output = scaled_dot_product_attention(packed, keys, values, scale=scaling)
        else:
            output = _written_out(packed, keys, values, scaling, softcap, s_aux)
        outputs.append(output.reshape(rows, 1, heads, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), None


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what the fused kernel has no argument for; [rows, kv heads, group, value dim]."""
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if s_aux is not None:
        sinks = s_aux.view(1, keys.shape[1], -1, 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[2]] @ values


AttentionInterface.register(RAGGED, ragged_attention)
