"""Which arguments of transformers a model of the swarm honours. What would be ignored is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from transformers.generation.configuration_utils import GenerationConfig

from ...blocks.images.encoder import ImageEncoder
from ...errors import BadInput

_HONOURED: Final = frozenset(
    ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "token_type_ids", "labels",
     "use_cache", "logits_to_keep", "output_hidden_states", "return_dict", "num_items_in_batch")
)  # fmt: skip
"""Arguments of `forward` that concern the embeddings, the head and the loss, which are here, or that are sent."""
_NAMELESS: Final = frozenset(("num_items_in_batch", "return_dict", "output_hidden_states"))
"""Those among them that a model's forward need not name: the loss, a decorator or `DistributedModel` takes them."""
_OF_BLOCKS: Final = frozenset(
    ("output_attentions", "output_router_logits", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
     "is_causal", "seq_idx", "cache_position", "head_mask")
)  # fmt: skip
"""Arguments that models of transformers hand on to their blocks, whether their signature names them or not."""
_OF_IMAGES: Final = frozenset(
    ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "spatial_shapes", "image_position_ids",
     "mm_token_type_ids", "token_type_ids", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
)  # fmt: skip
"""What processors of models that take pictures make beside tokens: for the encoder, which is here."""
_PIXELS: Final = frozenset(("pixel_values", "pixel_values_videos"))
_OWN_BLOCKS: Final = "it needs the model's own blocks on this machine"
_OWN_CACHE: Final = "the servers hold the cache, in the form that they announce"
_NOT_IN_A_SESSION: Final = {
    "output_hidden_states": "call the model with the tokens that generate returns",
    "output_attentions": "servers do not return the weights of their attention",
    "guidance_scale": "it would need a second session, for the negative prompt",
    "assistant_early_exit": _OWN_BLOCKS,
    "dola_layers": _OWN_BLOCKS,
    "cache_implementation": _OWN_CACHE,
    "cache_config": _OWN_CACHE,
}
"""What a generation configuration may hold that a session does not honour, and why not."""
_IGNORED: Final = (("guidance_scale", 1), ("cache_implementation", "hybrid"))
"""Values of those that transformers ignores as well. Checkpoints of Gemma 2 and 3 have the latter."""


def forward_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `function`, a model's forward, by their names, if it uses all of them.

    None passes, and what says that nothing is wanted.

    Raises:
        TypeError: an argument that the model does not have, or one given twice, by its name.
        BadInput: one that it has and that would not reach the servers' blocks.
    """
    signature = inspect.signature(function)
    parameters, placed = signature.parameters, signature.bind_partial(*args).arguments
    if twice := placed.keys() & kwargs.keys():
        raise TypeError(f"forward() got multiple values for argument {min(twice)!r}")
    given = {**placed, **kwargs}
    for name, value in given.items():
        if _changes_nothing(name, value):
            continue
        if name in _HONOURED and (name in parameters or name in _NAMELESS):
            continue
        if name in parameters or name in _OF_BLOCKS:
            raise BadInput(f"{name} is not supported: the servers' blocks do not get it, and do not return it")
        raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
    return {name: value for name, value in given.items() if value is not None or name in parameters}


def take_images(kwargs: dict[str, Any], encoder: ImageEncoder) -> dict[str, Any]:
    """Takes what a processor made of pictures out of the arguments. Empty where there are none, though it named types
    of tokens. Empty for a model that takes none, which does not know such arguments."""
    images = {name: kwargs[name] for name in _OF_IMAGES & kwargs.keys() if kwargs[name] is not None}
    if not images.keys() & _PIXELS:
        kwargs.pop("mm_token_type_ids", None)
        return {}
    if not encoder.is_there:
        return {}
    for name in images:
        del kwargs[name]
    return images


def check_generate(kwargs: Mapping[str, Any], default: GenerationConfig) -> None:
    """Whether `generate` honours its arguments; `default` is the model's own configuration of it.

    Names that transformers does not know are left to it: its `generate` refuses them.

    Raises:
        BadInput: an argument that would be ignored, by its name, or that a session cannot honour.
    """
    for name in ("inputs_embeds", "past_key_values"):
        if kwargs.get(name) is not None:
            raise BadInput(f"generate takes no {name}: give input_ids, and session= to go on where a session is")
    for name in _OF_BLOCKS - {"output_attentions"}:
        if not _changes_nothing(name, kwargs.get(name)):
            raise BadInput(f"{name} is not supported: the servers' blocks do not get it, and do not return it")
    config = kwargs.get("generation_config") or default
    for name, why in _NOT_IN_A_SESSION.items():
        value = getattr(config, name, None) if kwargs.get(name) is None else kwargs[name]
        if not _changes_nothing(name, value) and (name, value) not in _IGNORED:
            raise BadInput(f"{name} is not supported: {why}")


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or (isinstance(value, bool) and value == (name == "is_causal"))
