"""Ragged attention: one decode step of many sessions is one batch for all linear layers. Attention runs per session, on
keys and values of its own length. No padding, no copy of the cache, no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from ..cache import SpanCache
from .form import CacheForm
from .states import JoinedStates, StateView

RAGGED = "petalnode_ragged"

# What models hand to an attention function and that changes nothing here: positions are in the rotated query and
# key already, the window is in what `RaggedView.update` returns, and one query needs no causal mask.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "sliding_window", "is_causal", "layer_idx", "cache_position", "max_length_q"}
)

_KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class NotRagged(Exception):
    """This architecture's attention needs something that ragged attention does not do."""


class RaggedRows(list[torch.Tensor]):
    """Keys or values of several sessions as these hold them: [rows, heads, their length, width] each.

    They are opened a session at a time, so that no more of them is in memory twice.
    """

    def __init__(self, form: CacheForm, dim: int, window: int | None) -> None:
        super().__init__()
        self.form, self.dim, self.window = form, dim, window

    def opened(self, held: torch.Tensor) -> torch.Tensor:
        """The values of one of them, [rows, heads, length, dim]."""
        return self.form.opened(held, self.dim)

    def with_values(self, held: torch.Tensor, values: RaggedRows, held_values: torch.Tensor) -> _KeysValues:
        """Keys and values of a session, where this is of keys."""
        return self.opened(held), values.opened(held_values)


class LatentRows(RaggedRows):
    """The same of what keys and values are made of (multi-head latent attention, arXiv 2405.04434), a session at a
    time: `attention` makes them of latents and turned keys."""

    def __init__(self, latents: RaggedRows, attention: Any) -> None:
        super().__init__(latents.form, latents.dim, latents.window)
        self.extend(latents)
        self._attention = attention

    def with_values(self, held: torch.Tensor, values: RaggedRows, held_values: torch.Tensor) -> _KeysValues:
        made = type(self._attention).expand_kv(self._attention, self.opened(held), values.opened(held_values))
        return cast(_KeysValues, made)


def expand_by_session(blocks: Iterable[torch.nn.Module]) -> None:
    """Has blocks with latents take those of several sessions."""
    for module in (module for block in blocks for module in block.modules()):
        if hasattr(type(module), "expand_kv"):
            cast(Any, module).expand_kv = partial(_expanded, module)


def _expanded(attention: Any, latents: Any, turned: Any) -> Any:
    if isinstance(latents, RaggedRows):
        return LatentRows(latents, attention), turned
    return type(attention).expand_kv(attention, latents, turned)


class RaggedView(StateView):
    """The caches of several sessions as one cache that takes one token for every row of all of them."""

    def __init__(self, caches: Sequence[SpanCache]) -> None:
        rings = [cache.states for cache in caches if cache.states is not None]
        self._joined = JoinedStates(rings, [cache.batch for cache in caches]) if rings else None
        super().__init__(self._joined)
        self._caches = caches

    def part_states(self) -> None:
        """After the step: gives each session the states of its rows."""
        if self._joined is not None:
            self._joined.part()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Stores [all rows, heads, 1, dim] and returns each session's own keys and values (`RaggedRows`).

        A session with left padding comes back as one entry for each row, without its padding.
        """
        form, window = self._caches[0].form, self._caches[0].window(layer_idx)
        all_keys = RaggedRows(form, key_states.shape[-1], window)
        all_values = RaggedRows(form, value_states.shape[-1], window)
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
    """Attention of one new token per row on `RaggedRows` of keys and values.

    Query heads that share a key-value head are packed as if they were tokens ([rows, kv heads, group, dim]). So no key
    is repeated; `enable_gqa` is ten times slower in bfloat16 on CPUs.

    Args:
        query: [all rows, heads, 1, dim].
        kwargs: `softcap`, with which scores become softcap * tanh(score / softcap) (Gemma 2); `s_aux`, per head a score
            that takes part in the softmax and has no value (GPT-OSS); nothing else that changes the outcome.

    Returns:
        [all rows, 1, heads, value dim], None.

    Raises:
        NotRagged: the model wants more than this.
    """
    if not isinstance(key, RaggedRows) or query.shape[2] != 1:
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
        keys, values = key.with_values(held_keys, value, held_values)
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
