"""Which architectures can be served, and what their blocks keep for each token between steps.

`open_skeleton` decides for servers, clients, validators and plans, from the whole model's configuration alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ...protocols.ids import Span
from ..errors import ModelError, raise_for_memory, reason_of
from ..models.checkpoint import GGUF_NOTE, Checkpoint
from ..models.folder import read_config as read_raw_config
from ..models.folder import scheme_of
from ..models.quantisation import Kernels, Quantisation, held_bytes
from .cache import BlockCacheSpec
from .caches.own_states import COMPRESSED
from .caches.pages import lets_go
from .caches.states import StateRing, StateView
from .config import choose_device, choose_dtype, read_config
from .kernels.choice import native_kernels
from .kernels.packing import packed_bytes, planned_bytes
from .skeleton import Skeleton, build, stored_weights
from .span_adapter import linear_shapes
from .stack import BlockStack

_CACHE_WINDOW: Final = frozenset({"moshi"})
"""Architectures whose cache drops what is beyond the window, while their masks let a piece of a prompt see all of
it."""

BY_TOKEN: Final = frozenset({"bamba", "falcon_mamba", "jamba", "mamba", "recurrent_gemma"})
"""Architectures of which transformers forgets, at the second piece of a prompt, what the first one left: they take the
tokens behind it one by one."""
_STATES: Final = frozenset(
    (
        *BY_TOKEN,
        "bailing_hybrid",
        "falcon_h1",
        "granitemoehybrid",
        "inkling_text",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "zamba",
        "zamba2",
    )
)
"""Architectures whose states go by the calls of transformers' caches alone: tried by `make sweep`."""
_INDEXED: Final = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"})
"""Those whose blocks choose the tokens for attention by an index."""
_SHARING: Final = frozenset({"gemma3n_text", "gemma4_text"})
"""Those whose last blocks take keys and values of earlier ones, which hand them on within a pass."""
_KEPT: Final = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)
_KEPT_OF_WINDOW: Final = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""What a block may keep between tokens: transformers' classes, which name it."""


def open_skeleton(folder: Path, dtype: str = "auto") -> Skeleton:
    """The whole model in `folder` without memory, if a swarm can run it; no weights have to be there.

    Raises:
        ModelError: the folder is no model, or servers of some of its blocks, or clients, cannot run it.
        BadInput: an unknown dtype.
    """
    config = read_config(folder)
    skeleton = build(config, choose_dtype(dtype, config))
    # A hybrid has blocks that could be served alone, but nobody could complete such a chain.
    windows_of(skeleton)
    return skeleton


def check_download(coming: Mapping[Path, int], needed: Collection[Path]) -> None:
    """For `resolve` to call: no weights are downloaded of a model that no swarm can run.

    Raises:
        ModelError: as `open_skeleton`.
    """
    for folder in {file.parent for file in coming}:
        open_skeleton(folder)


def linear_layers(folder: Path) -> list[dict[str, tuple[int, int]]]:
    """Per block of the model in `folder`, (values in, values out) of its linear layers by path; no weights are read.

    Raises:
        ModelError: as `open_skeleton`.
    """
    return [linear_shapes(block) for block in open_skeleton(folder).blocks]


def windows_of(skeleton: Skeleton) -> list[int | None]:
    """Per block of the whole model, how far back it looks.

    Raises:
        ModelError: a block keeps something else than attention keys and values, or nothing; or how a prompt is cut
            would change what it computes.
    """
    named = repr(skeleton.config.model_type)
    if "past_key_values" not in inspect.signature(skeleton.decoder.forward).parameters:
        raise ModelError(
            f"{named} has no cache of attention keys and values as other decoders have, but something of its own: "
            "petalnode cannot serve it yet"
        )
    shared = [block for block, mode in enumerate(getattr(skeleton.config, "kv_sharing_modes", None) or ()) if mode]
    if shared and (
        skeleton.config.model_type not in _SHARING
        or skeleton.boundaries.undivided != (Span(min(shared), skeleton.num_blocks),)
    ):
        raise ModelError(_shares(named))
    windows: list[int | None] = []
    for layer in DynamicCache(config=skeleton.config).layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin) and skeleton.config.model_type not in _STATES:
            raise ModelError(
                f"{named} keeps more than attention keys and values between tokens, in a way that was not tried "
                f"({type(layer).__name__}): petalnode cannot serve it yet"
            )
        compressed = skeleton.config.model_type in COMPRESSED and isinstance(layer, DynamicSlidingWindowLayer)
        if compressed or type(layer) in _KEPT_OF_WINDOW:
            windows.append(int(layer.sliding_window))
            if skeleton.config.model_type in _CACHE_WINDOW and windows[-1] < skeleton.config.max_position_embeddings:
                raise ModelError(
                    f"{named} with a window of {windows[-1]} tokens has, in transformers, other answers to a longer "
                    "prompt in one piece than in several: petalnode cannot serve it"
                )
        elif type(layer) in _KEPT or (type(layer) is DynamicIndexedLayer and skeleton.config.model_type in _INDEXED):
            windows.append(None)
        else:
            raise ModelError(
                f"{named} keeps more than attention keys and values and states between tokens "
                f"({type(layer).__name__}): petalnode cannot serve it yet"
            )
    return windows


def _shares(named: str) -> str:
    return f"some blocks of {named} use the attention cache of others: petalnode cannot serve it yet"


class _Recorder(StateView):
    """Sees which keys, values and states the blocks want to keep."""

    def __init__(self, count: int) -> None:
        self.ring = StateRing()
        super().__init__(self.ring)
        self.seen: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * count
        self.index_dims = [0] * count
        self.entries: list[tuple[int, ...]] = [()] * count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.index_dims[layer_idx] = indexer_key_states.shape[2]
        return indexer_key_states

    def update_entries(self, layer_idx: int, kind: int, entries: torch.Tensor, rate: int) -> torch.Tensor:
        self.entries[layer_idx] += (-(-entries.shape[2] // rate),)
        return entries

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@torch.inference_mode()
def cache_specs(
    stack: BlockStack, skeleton: Skeleton, windows: Sequence[int | None], device: torch.device
) -> list[BlockCacheSpec]:
    """What each block keeps, found by running one token: no configuration says it for all."""
    recorder = _Recorder(len(windows))
    hidden = torch.zeros(1, 1, stack.width(), dtype=skeleton.dtype, device=device)
    try:
        stack.run(hidden, recorder, torch.zeros(1, 1, dtype=torch.long, device=device))
    except Exception as error:  # other architectures break in their own ways
        raise_for_memory(error, "Running blocks for the first time")
        raise ModelError(
            f"blocks of {skeleton.config.model_type!r} do not run apart from the rest of the model, or as its "
            f"config.json has them ({reason_of(error)}): petalnode cannot serve it yet"
        ) from error
    specs, layers = [], DynamicCache(config=skeleton.config).layers
    for block, (seen, window) in enumerate(zip(recorder.seen, windows, strict=True)):
        states = recorder.ring.specs(block)
        if seen is not None:
            keys, values = seen
            forgets = window is not None and lets_go(device)
            one = skeleton.config.model_type in COMPRESSED  # tensor for both
            dims = keys.shape[1], keys.shape[3], 0 if one else values.shape[3]
            behind = recorder.index_dims[block], recorder.entries[block]
            specs.append(BlockCacheSpec(*dims, window, states, forgets, *behind))
        elif states or type(layers[block]) is DummyLayer:
            specs.append(BlockCacheSpec(0, 0, 0, None, states))
        else:
            raise ModelError(_shares(repr(skeleton.config.model_type)))
    return specs


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of each block of a model as a server holds it, and of the whole block, opened. `item`: of one
    value of an attention cache. `experts`: what of `held` may be left on the disk."""

    held: tuple[int, ...]
    whole: tuple[int, ...]
    item: int
    experts: tuple[int, ...] = ()


def block_sizes(
    folder: Path,
    dtype: str,
    quantisation: Quantisation,
    kernels: Kernels = "torch",
    device: str = "cpu",
    stored_block: int = 0,
) -> BlockSizes:
    """The sizes of the blocks of the model in `folder`. Only the configuration has to be there, and of GGUF files the
    headers; or else `stored_block`, the bytes of a block in such a file.

    Raises:
        ModelError, BadInput: as `open_skeleton`.
        MachineError: as `native_kernels`.
    """
    skeleton = open_skeleton(folder, dtype)
    stored = scheme = native = None
    if quantisation == "none":
        native = native_kernels(kernels, choose_device(device), skeleton.dtype)
        scheme = scheme_of(folder, read_raw_config(folder))
    if quantisation == "none" and (folder / GGUF_NOTE).is_file():
        stored = None if native is None else stored_weights(skeleton, Checkpoint(folder, skeleton.num_blocks))
    held, whole, experts = [], [], []
    for number, block in enumerate(skeleton.blocks):
        values = list(block.parameters())
        whole.append(sum(value.nbytes for value in values))
        if scheme is not None:
            held.append(planned_bytes(scheme, block, native=native is not None))
        elif stored is None and native is not None and stored_block:
            held.append(stored_block)
        elif stored is None:
            held.append(sum(held_bytes(quantisation, tuple(value.shape), value.nbytes) for value in values))
        else:
            nbytes, of_experts = packed_bytes(stored, skeleton, number, block)
            held.append(nbytes)
            experts.append(of_experts)
    return BlockSizes(tuple(held), tuple(whole), skeleton.dtype.itemsize, tuple(experts))
