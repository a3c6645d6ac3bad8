"""Groups of tokens that see each other both ways, as those of one picture do in some models.

Other tokens see what stands before them, all of it or a window. Which attention has groups is the model's affair.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import blockwise_overlay, create_causal_mask, sliding_window_overlay

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
GROUPED: Final = {"gemma3_text": (_FULL, _SLIDING), "gemma4_text": (_SLIDING,)}
"""By the type of the language part, which of its kinds of attention have groups."""


def masks_of_groups(
    config: PreTrainedConfig,
    hidden: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor,
    groups: torch.Tensor,
) -> dict[str, Any]:
    """What a decoder takes for its attention mask.

    Args:
        groups: int64 [rows, all tokens], as `SpanCache.groups_of` has them.
    """
    given = {
        "config": config,
        "inputs_embeds": hidden,
        "attention_mask": attention_mask,
        "past_key_values": cache,
        "position_ids": position_ids,
        "allow_is_causal_skip": False,
    }
    masks = {}
    for kind in set(config.layer_types):
        own = {"or_mask_function": blockwise_overlay(groups)} if kind in GROUPED[config.model_type] else {}
        if kind == _SLIDING:
            sliding = getattr(cache, "is_sliding", None) or [True]
            own["and_mask_function"] = sliding_window_overlay(config.sliding_window)
            own["layer_idx"] = sliding.index(True) if True in sliding else 0
        masks[kind] = create_causal_mask(**given, **own)
    return masks


def groups_in(
    masks: Any, config: PreTrainedConfig, hidden: torch.Tensor, attention_mask: torch.Tensor, position_ids: Any
) -> torch.Tensor | None:
    """The groups that masks of a whole prompt show: int64 [rows, tokens], of each token how many of its group are left,
    this one included; 0 for one outside of groups. None: there are none.

    Raises:
        ValueError: the masks are others than these groups have.
    """
    given = masks if isinstance(masks, dict) else {_FULL: masks}
    shown = [mask for mask in given.values() if mask is not None]
    if not shown:
        return None
    tokens = attention_mask.shape[1]
    seen = torch.stack([_seen(mask) for mask in shown]).any(0) & (attention_mask != 0).unsqueeze(2)
    places = torch.arange(tokens)
    ahead = torch.where(seen, places, -1).amax(2) - places
    left = torch.where(ahead > 0, ahead + 1, 0)
    ends = torch.nn.functional.pad(left[:, :-1] == 2, (1, 0))
    left = torch.where(ends & (left == 0), 1, left)
    ids = torch.where(left > 0, left + places, -1)
    if config.model_type in GROUPED:
        made = masks_of_groups(config, hidden, attention_mask, None, position_ids, ids)
        if all(_is(given[kind], own, attention_mask, kind in GROUPED[config.model_type]) for kind, own in made.items()):
            return left if bool(left.any()) else None
    raise ValueError("its masks are not those of groups of tokens")


def _is(given: torch.Tensor | None, own: torch.Tensor, attention_mask: torch.Tensor, grouped: bool) -> bool:
    """Whether two masks are equal. A model leaves out one by which tokens see all before them."""
    if given is None:
        return not grouped
    shows = (attention_mask != 0).unsqueeze(2)
    return torch.equal(_seen(given) & shows, _seen(own) & shows)


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """[rows, queries, keys]."""
    one = mask[:, 0].cpu()
    return one if one.dtype == torch.bool else one == 0
