"""A run of consecutive blocks inside the decoder that they come from.

The decoder's own `forward` stays in charge: it makes rotary embeddings, masks and whatever else its blocks want.
Only modules before the first block and after the last are taken out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from ...protocols.ids import ID_DIGITS, PLAIN, Boundaries, Layout
from .cache import SpanCache
from .caches.ragged import RAGGED, expand_by_session
from .config import original_length
from .images.groups import GROUPED, masks_of_groups
from .images.layout import takes_positions


class BlockStack:
    """Runs hidden states through `blocks`, from the model's block `first` on, by calling the decoder that owns them.

    Not thread-safe.

    Attributes:
        boundaries: of the model's blocks.
        blocks: the modules, in their order.
        original_length: as `config.original_length`.
        takes_positions: whether tokens may stand in a picture, and have positions along three axes.
        takes_groups: whether tokens may be in groups that see each other both ways.
    """

    def __init__(
        self, decoder: PreTrainedModel, blocks: Sequence[nn.Module], boundaries: Boundaries, first: int
    ) -> None:
        self._decoder = decoder
        self.boundaries, self._first = boundaries, first
        if boundaries.per_block:
            cast(Any, decoder).project_per_layer_inputs = _made_by_the_client
        self._takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
        self._implementation = decoder.config._attn_implementation
        self.original_length = original_length(decoder.config)
        self.takes_positions = takes_positions(decoder)
        self.takes_groups = decoder.config.model_type in GROUPED
        self._rotaries = _growing_rotaries(decoder)
        self._long_factors = False
        for rotary in _rotaries(decoder) if self.original_length is not None else ():
            rotary.register_forward_pre_hook(self._lengthen, with_kwargs=True)
            rotary.register_forward_hook(self._shorten)
        self.blocks = tuple(blocks)
        expand_by_session(blocks)
        self._parts = 0  # of the tuple that a block returns; 0: a tensor alone
        self._ids: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._ids_at_once = "ple_input_ids" in inspect.signature(decoder.forward).parameters
        for block in blocks if boundaries.ids and not self._ids_at_once else ():
            block.register_forward_pre_hook(self._put_ids, with_kwargs=True)
        blocks[0].register_forward_pre_hook(self._put_input, with_kwargs=True)
        blocks[-1].register_forward_hook(self._take_output)

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary frequencies depend on how long a sequence is by now (dynamic NTK, longrope).

        Then sessions of different lengths cannot share a batch.
        """
        return any(kind in ("dynamic", "longrope") for kind in _rotary_kinds(self._decoder.config))

    def width(self, index: int = 0) -> int:
        """Of what enters the block at this index."""
        return self.boundaries.width(self._first + index)

    def begin_step(self, cache: SpanCache, tokens: int, long_factors: bool, layout: Layout = PLAIN) -> None:
        """To be called before the next `tokens` tokens of a row, a whole step, are computed in parts or together.

        `long_factors`: the step is a part of a text beyond `original_length`, wherever it ends.

        Raises:
            ValueError: a layout that such blocks do not know.
        """
        if (layout.positions and not self.takes_positions) or (layout.groups and not self.takes_groups):
            raise ValueError("positions along axes or groups of tokens for blocks that know none")
        cache.place(tokens, layout)
        end = cache.length + tokens - min(cache.left_padding)
        cache.begin_step(tokens)
        cache.long_factors = long_factors or (self.original_length is not None and end > self.original_length)

    def frequencies(self, layer_type: str | None = None) -> tuple[torch.Tensor, float]:
        """Of the decoder's rotary positions, float32 [rotated dim / 2], and what cosines and sines are multiplied with.
        For blocks of `layer_type` where these have their own; a decoder without them raises `AttributeError`."""
        rotary: Any = self._decoder.get_submodule("rotary_emb")
        prefix = "" if layer_type is None else f"{layer_type}_"
        return getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling"))

    def weight_storages(self) -> set[int]:
        """Where the memory of the weights begins: what autograd keeps of them it does not copy."""
        return {weight.untyped_storage().data_ptr() for block in self.blocks for weight in block.parameters()}

    def run(
        self,
        hidden: torch.Tensor,
        cache: Cache | None,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        *,
        ragged: bool = False,
        part: range | None = None,
        long_factors: bool = False,
    ) -> torch.Tensor:
        """What the last block makes of `hidden` [rows, tokens, width], without what these blocks got for themselves.

        Args:
            hidden: as wide as `width` has it before the first block that computes.
            cache: None keeps nothing, and lets gradients through.
            position_ids: int64 [rows or 1, tokens], or [axes, rows, tokens].
            attention_mask: bool or int [rows, tokens held + new], 0 where there is padding; or what `masks` makes.
            ragged: `cache` returns one entry per session; one token per row.
            part: indices of the blocks that compute; the others return their input. None is all.
            long_factors: rotary frequencies are those of a text beyond `original_length`, if the model has such.
        """
        arguments: dict[str, Any] = {"position_ids": position_ids} if self._takes_positions else {}
        part = range(len(self.blocks)) if part is None else part
        self._input, ahead = opened(self.boundaries, hidden)
        if self.boundaries.per_block:
            mine = len(part) * self.boundaries.per_block
            own = ahead[:, :, :mine].reshape(*hidden.shape[:2], len(part), self.boundaries.per_block)
            ahead = ahead[:, :, mine:]
            arguments["per_layer_inputs"] = pad(own, (0, 0, part.start, len(self.blocks) - part.stop))
        apart = self.boundaries.streams > 1 and self.boundaries.axis < 3
        first = self._input.select(self.boundaries.axis, 0) if apart else self._input[:, :, : self.boundaries.hidden]
        embedded = first.detach()
        if self._first + part.start < self.boundaries.carried:
            embedded = ahead
        if self.boundaries.ids:
            self._ids = read_ids(ahead).clamp(max=int(self._decoder.config.vocab_size) - 1)
            arguments.update({"ple_input_ids": self._ids} if self._ids_at_once else {})
        if not self.boundaries.per_block:
            ahead = ahead[:, :, : self.boundaries.width(self._first + part.stop) - self.boundaries.of_streams]
        self._long_factors = long_factors and self.original_length is not None
        config = self._decoder.config
        for rotary in self._rotaries:
            _forget_length(rotary)
        if ragged:
            config._attn_implementation = RAGGED
        # Idle blocks stay in the list, because decoders count per-layer settings by their place in it.
        idle = [block for index, block in enumerate(self.blocks) if index not in part]
        for block in idle:
            block.forward = self._hand_on
        try:
            self._decoder(
                inputs_embeds=embedded.clone(),  # some decoders scale it in place
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=cache is not None,
                **arguments,
            )
            output = self._output
        finally:
            self._ids = self._input = self._output = None
            self._long_factors = False
            for block in idle:
                del block.forward
            if ragged:
                config._attn_implementation = self._implementation
        if output is None:
            raise RuntimeError("the decoder did not run its last block")
        return closed(self.boundaries, output, ahead)

    def masks(
        self,
        hidden: torch.Tensor,
        cache: Cache,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        groups: torch.Tensor,
    ) -> dict[str, Any]:
        """What `run` takes in the place of a mask where tokens see each other, as `SpanCache.groups_of` has it."""
        return masks_of_groups(self._decoder.config, hidden, attention_mask, cache, position_ids, groups)

    @contextmanager
    def adding(self, features: Sequence[torch.Tensor], first: int) -> Iterator[None]:
        """Within it, the blocks from the `first` on add these to what leaves them, [rows, tokens, hidden size] each."""
        hooks = []
        for block, added in zip(self.blocks[first:], features, strict=False):
            hooks.append(block.register_forward_hook(partial(self._add, added), prepend=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, features: torch.Tensor, block: nn.Module, args: Any, output: Any) -> Any:
        if self.is_idle(block):
            return None
        return output + features if isinstance(output, torch.Tensor) else (output[0] + features, *output[1:])

    def _put_input(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        # Some decoders scale or normalise their input; the client has done that already.
        if args:
            return (self._input, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._input}

    def _put_ids(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": self._ids}

    def _lengthen(self, rotary: nn.Module, args: Any, kwargs: Any) -> Any:
        """Adds a token beyond `original_length`: transformers chooses the factors by the largest position of a call."""
        if not self._long_factors:
            return None
        given = args[1] if len(args) > 1 else kwargs["position_ids"]
        longer = torch.cat([given, given.new_full((given.shape[0], 1), self.original_length)], dim=1)
        if len(args) > 1:
            return (args[0], longer, *args[2:]), kwargs
        return args, {**kwargs, "position_ids": longer}

    def _shorten(self, rotary: nn.Module, args: Any, output: Any) -> Any:
        return tuple(part[:, :-1] for part in output) if self._long_factors else None

    def is_idle(self, block: nn.Module) -> bool:
        """Whether a block of a run that is under way returns its input."""
        return "forward" in vars(block)

    def _hand_on(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self._parts - 1)) if self._parts else hidden_states

    def _take_output(self, block: nn.Module, args: Any, output: Any) -> None:
        # The first run, while loading, is of all blocks: it shows what form this decoder expects.
        self._parts = 0 if isinstance(output, torch.Tensor) else len(output)
        self._output = output if isinstance(output, torch.Tensor) else output[0]


def opened(boundaries: Boundaries, travelling: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what travels between blocks, [rows, tokens, width]: hidden states as blocks take them, [rows, tokens, hidden
    size], with the streams at `Boundaries.axis`; and what is for single blocks."""
    hidden, ahead = travelling[:, :, : boundaries.of_streams], travelling[:, :, boundaries.of_streams :]
    if boundaries.streams > 1 and boundaries.axis < 3:
        apart = hidden.reshape(*hidden.shape[:2], boundaries.streams, boundaries.hidden)
        hidden = apart.movedim(2, boundaries.axis).contiguous()
    return hidden, ahead


def closed(boundaries: Boundaries, hidden: torch.Tensor, ahead: torch.Tensor | None) -> torch.Tensor:
    """What travels: the inverse of `opened`."""
    if boundaries.streams > 1 and boundaries.axis < 3:
        hidden = hidden.movedim(boundaries.axis, 2).flatten(2)
    return hidden if ahead is None or not ahead.shape[2] else torch.cat([hidden, ahead.to(hidden.dtype)], dim=2)


def of_each_stream(boundaries: Boundaries, added: torch.Tensor) -> torch.Tensor:
    """`added` [rows, tokens, hidden size] for every stream of what blocks take."""
    if boundaries.axis == 3:
        return added.repeat(1, 1, boundaries.streams)
    return added.unsqueeze(2) if boundaries.axis == 2 else added


def written_ids(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The digits [rows, tokens, digits] of ids [rows, tokens]."""
    places = torch.tensor(ID_DIGITS, device=ids.device)
    return (ids.unsqueeze(2) // places % ID_DIGITS[1]).to(dtype)


def read_ids(digits: torch.Tensor) -> torch.Tensor:
    """The ids [rows, tokens]; 0 where none travel."""
    places = torch.tensor(ID_DIGITS[: digits.shape[2]], device=digits.device)
    return (digits.nan_to_num().clamp(0, ID_DIGITS[1] - 1).round().long() * places).sum(2)


def _made_by_the_client(embedded: torch.Tensor, per_block: torch.Tensor) -> torch.Tensor:
    """In the place of what makes the values for single blocks of tokens."""
    return per_block


def _rotary_kinds(config: Any) -> list[str]:
    """The kinds of rotary embedding in a configuration; some have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [entry["rope_type"] for entry in parts if "rope_type" in entry]


def _growing_rotaries(decoder: PreTrainedModel) -> list[nn.Module]:
    """Rotary embeddings that keep the frequencies of the longest sequence they have seen."""
    if "dynamic" not in _rotary_kinds(decoder.config):
        return []
    return _rotaries(decoder)


def _rotaries(decoder: PreTrainedModel) -> list[nn.Module]:
    return [module for module in decoder.modules() if hasattr(module, "original_max_seq_len")]


def _forget_length(rotary: Any) -> None:
    """Undoes what another, longer session has left in a rotary embedding."""
    for name, original in list(rotary.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            rotary.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
