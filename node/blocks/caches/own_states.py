"""Models of transformers that keep states in a way of their own, made to keep them in the cache that they are given."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

from torch import nn
from transformers.modeling_utils import PreTrainedModel

_OWN_CACHES: Final = {"minimax": "MiniMaxCache"}
"""Models that take caches of one class only, and its name."""
_IN_BLOCKS: Final = frozenset({"recurrent_gemma"})
"""Models whose states are attributes of their blocks."""


def keep_states_in_caches(decoder: PreTrainedModel, blocks: Sequence[nn.Module]) -> None:
    """To be called before blocks are cut out of the decoder."""
    kind = decoder.config.model_type
    if kind in _OWN_CACHES:
        wanted = getattr(sys.modules[type(decoder).__module__], _OWN_CACHES[kind])
        decoder.register_forward_pre_hook(functools.partial(_give_its_class, wanted), with_kwargs=True)
    for number, block in enumerate(blocks if kind in _IN_BLOCKS else ()):
        recurrent: Any = block.get_submodule("temporal_block")
        if hasattr(recurrent, "rg_lru"):
            recurrent.layer_idx = number
            recurrent.register_forward_pre_hook(_take_states, with_kwargs=True)
            recurrent.register_forward_hook(_put_states, with_kwargs=True)


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
