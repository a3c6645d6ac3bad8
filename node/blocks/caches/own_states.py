"""Has models of transformers with states of their own keep them in the cache that they are given.

DeepSeek-V4 has keys and values that stand for several tokens each. Of tokens in windows of `rate`, one behind the
other, a block makes an entry when a window is full. Entries grow with the session, as keys and values do. What the next
entry is made of are states: projections of tokens in the window that is not full, and, where windows overlap, of some
in the last full one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicIndexedLayer
from transformers.modeling_utils import PreTrainedModel

from ....protocols.ids import AXES
from .states import StateView

_OWN_CACHES: Final = {"minimax": "MiniMaxCache"}
"""Models that take caches of one class only, and its name."""
MAMBAS: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
"""Models that have a name of their own for a cache."""
_OWN_POSITIONS: Final = frozenset({"qwen4_exp_text"})
"""Models that look up in their cache where the tokens stand that it holds."""
COMPRESSED: Final = frozenset({"deepseek_v4"})
"""Models whose blocks keep entries for several tokens each, beside keys and values of a window. They ask their cache
for these themselves."""
PADDING_COUNTS: Final = COMPRESSED | {"recurrent_gemma"}
"""Models that compute with left padding: it begins the windows that are compressed, and states take it in."""

_KINDS: Final = {"compressor": 0, "indexer": 1}
"""Of entries, in the order in which a block makes them."""
_LAST: Final = {"compressor": "last compressor", "indexer": "last indexer"}
"""The names of what the last full window hands on."""


def keep_states_in_caches(decoder: PreTrainedModel, blocks: Sequence[nn.Module]) -> None:
    """To be called before blocks are cut out of the decoder."""
    kind = decoder.config.model_type
    if kind in _OWN_CACHES:
        wanted = getattr(sys.modules[type(decoder).__module__], _OWN_CACHES[kind])
        decoder.register_forward_pre_hook(functools.partial(_give_its_class, wanted), with_kwargs=True)
    if kind in COMPRESSED:
        decoder.register_forward_pre_hook(_give_compressed, with_kwargs=True)
    if kind in _OWN_POSITIONS:
        decoder.register_forward_pre_hook(_give_positions, with_kwargs=True)
    for number, block in enumerate(blocks):
        recurrent: Any = getattr(block, "temporal_block", None)
        if hasattr(recurrent, "rg_lru"):  # RecurrentGemma's states are its attributes
            recurrent.layer_idx = number
            recurrent.register_forward_pre_hook(_take_states, with_kwargs=True)
            recurrent.register_forward_hook(_put_states, with_kwargs=True)


def take_usual_arguments(decoder: Any) -> None:
    """Has one of Mamba's decoders called like all others."""
    decoder.forward = functools.partial(_with_usual_arguments, decoder.forward)


def _with_usual_arguments(
    forward: Callable[..., Any],
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The mask of the new tokens alone is what `forward` wants; a token that comes alone is no padding."""
    given: Any = input_ids if inputs_embeds is None else inputs_embeds
    tokens = given.shape[1]
    mask = None if attention_mask is None or tokens == 1 else attention_mask[:, -tokens:]
    kwargs.pop("position_ids", None)
    return forward(input_ids, inputs_embeds, cache_params=past_key_values, attention_mask=mask, **kwargs)


def _give_positions(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    cache, given, embedded = (kwargs.get(name) for name in ("past_key_values", "position_ids", "inputs_embeds"))
    if given is not None and embedded is not None:  # for each row, where they are the same for all
        kwargs = {**kwargs, "position_ids": given.expand(*given.shape[:-2], len(embedded), -1)}
    held = getattr(cache, "cache", None)  # a session's, on its server
    layer = DynamicIndexedLayer()
    if held is not None and held.length:
        positions = held.positions_of(0, held.length)
        layer.indexer_position_ids = positions.expand(AXES, *positions.shape[-2:])
    if cache is not None:
        cache.layers = [layer] * len(decoder.config.layer_types)
    return args, kwargs


def _give_compressed(decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(view := kwargs.get("past_key_values"), StateView):
        view.layers = [CompressedBlock(view, block, decoder.config) for block in range(len(decoder.config.layer_types))]


def _give_its_class(wanted: type, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if cache is not None and not isinstance(cache, wanted):
        own: Any = type(cache)
        cache.__class__, cache.linear_cache = _both(own, wanted), []


@functools.cache
def _both(own: type, wanted: type) -> type:
    return type(own.__name__, (own, wanted), {})


def _take_states(recurrent: Any, args: Any, kwargs: dict[str, Any]) -> None:
    cache, place = kwargs.get("past_key_values"), recurrent.layer_idx
    recurrent.conv1d_state = None if cache is None else cache.kept(place, "inputs")
    recurrent.rg_lru.recurrent_states = None if cache is None else cache.kept(place, "recurrent")


def _put_states(recurrent: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if cache is not None:
        cache.keep(recurrent.layer_idx, "inputs", recurrent.conv1d_state.clone())
        cache.keep(recurrent.layer_idx, "recurrent", recurrent.rg_lru.recurrent_states)
    recurrent.conv1d_state = recurrent.rg_lru.recurrent_states = None


class CompressedBlock:
    """One block's part of the cache `view`, with the calls of transformers' `DeepseekV4CSACache`."""

    is_sliding = True

    def __init__(self, view: Any, block: int, config: Any) -> None:
        self._view, self._block, kind = view, block, config.layer_types[block]
        self._rate, self._overlaps = config.compress_rates.get(kind, 1), kind == "compressed_sparse_attention"

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Takes projections [rows, tokens, dim]. Returns those of windows that are full now, [rows, windows * rate,
        dim] each, and their first token's number."""
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
        """Takes full windows [rows, windows, rate, 2 * head_dim]. Keeps what the last one hands on, returns what the
        one before the first has."""
        kv, gate = self._view.kept(self._block, _LAST[name]).chunk(2, dim=2)
        last = torch.cat([part[:, -1, :, :head_dim] for part in (chunk_kv, chunk_gate)], dim=2)
        self._view.keep(self._block, _LAST[name], last)
        return kv, gate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Takes entries [rows, windows, dim], and returns all that the session has."""
        entries: torch.Tensor = self._view.update_entries(self._block, _KINDS[name], compressed, self._rate)
        return entries
