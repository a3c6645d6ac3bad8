"""One model of transformers, built without memory and then filled with the part of its weights that is wanted.

The whole model is always built from its full configuration (on the meta device, where it costs nothing) and cut
afterwards: a configuration with fewer layers gives other layers in many architectures, without any error.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import logging

from ...protocols.ids import Boundaries, Span
from ..errors import ModelError, reason_of
from ..models.checkpoint import Checkpoint
from ..models.folder import boundaries_of, scheme_of
from ..models.folder import read_config as read_raw_config
from ..models.gguf.weights import GgufWeights
from .caches.chosen_tokens import settle_choices
from .caches.own_states import keep_states_in_caches
from .config import refuse_outside_inputs
from .images.language_part import Uninitialised, causal_model
from .kernels.library import library
from .kernels.tiles import LANES, STORED, TiledMatrix, held_as
from .quantisation.stored import StoredQuantised

_OPENED_ROWS: Final = 256  # of a matrix, at a time
_FILLS_BLOCKS: Final = frozenset({"falcon_h1"})
_OTHER_PART = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_LANGUAGE_PART = re.compile(r"^(model\.)?(language_model|text_model)\.")


class BlockList(nn.ModuleList):
    """The blocks that are here, under their numbers in the whole model, indexed by their place in this list."""

    def __init__(self, blocks: dict[int, nn.Module]) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._in_order = list(blocks.values())

    def __getitem__(self, index: Any) -> Any:
        return self._in_order[index]  # a slice is a plain list: models slice in every forward

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._in_order)


@dataclass
class Skeleton:
    """A causal language model on the meta device, with its blocks found.

    Attributes:
        model: the whole model.
        decoder: the module inside it that owns the blocks and runs them one after the other.
        decoder_path: its name in `model`, "" if it is the model itself.
        list_name: the path of the list of blocks in `decoder`.
        dtype: what the model computes in.
        parameters: everything that the whole model wants from a checkpoint, on the meta device.
        tied: of those that are others of them, their names and whose they are.
        boundaries: of its blocks.
        takes_pictures: whether `decoder` is the language part of a model that takes pictures or sound, with its names.
    """

    model: PreTrainedModel
    decoder: PreTrainedModel
    decoder_path: str
    list_name: str
    dtype: torch.dtype
    parameters: dict[str, Any]
    tied: Mapping[str, str]
    boundaries: Boundaries
    takes_pictures: bool = False

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration that the blocks were built from."""
        return self.decoder.config

    @property
    def fills_blocks(self) -> bool:
        """Whether the decoder computes constants of its blocks from the configuration."""
        return self.config.model_type in _FILLS_BLOCKS

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.decoder.get_submodule(self.list_name)))

    def set_blocks(self, blocks: nn.Module) -> None:
        kept = {name: source for name, source in self.tied.items() if self.block_of(name) is None}
        self.model.all_tied_weights_keys = kept if self.model.all_tied_weights_keys else {}
        owner, _, name = self.list_name.rpartition(".")
        setattr(self.decoder.get_submodule(owner), name, blocks)

    def keep_only(self, span: Span) -> list[nn.Module]:
        """Takes all out of the model but the blocks of `span`, and what makes their positions and masks. Returns these
        blocks, which keep their numbers. In the blocks, their numbers count from the start of the span: so they find
        their place in its cache.
        """
        names = _names_of_numbers(self.blocks)
        blocks = self.blocks[span.start : span.end]
        for block in blocks:
            for module in block.modules():
                for name in names & vars(module).keys():
                    number = getattr(module, name)
                    setattr(module, name, number - span.start if type(number) is int else number)
                own = vars(module).get("layer_dic")  # Zamba2's, whose blocks look up in it what is theirs alone
                if own is not None:
                    vars(module)["layer_dic"] = {number - span.start: place for number, place in own.items()}
        _strip(self.model, self.decoder_path, self.list_name)
        self.model.all_tied_weights_keys = {}
        self.set_blocks(BlockList(dict(zip(range(span.start, span.end), blocks, strict=True))))
        return blocks

    def parameter(self, block: int, name: str) -> str:
        """The name in the whole model of what is called `name` in the block of this number."""
        return f"{self._blocks_prefix}{block}.{name}"

    def block_of(self, parameter: str) -> int | None:
        """The number of the block that a parameter of this name belongs to, None if to none."""
        if not parameter.startswith(self._blocks_prefix):
            return None
        number = parameter.removeprefix(self._blocks_prefix).partition(".")[0]
        return int(number) if number.isdecimal() else None

    def copies_in_blocks(self, parameter: str) -> list[str]:
        """The parameters of blocks that are this one, which another block has."""
        return [name for name, source in self.tied.items() if source == parameter and self.block_of(name) is not None]

    @property
    def _blocks_prefix(self) -> str:
        return f"{self.decoder_path}.{self.list_name}." if self.decoder_path else f"{self.list_name}."


class _ZeroEmbedding(nn.Module):
    """In the place of an embedding that the client has added already: adds nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


class _PassThrough(nn.Module):
    """In the place of a norm or projection, or of a list of them, that the client applies: returns its input."""

    def __getitem__(self, index: int) -> _PassThrough:
        return self

    def forward(self, hidden: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.get("inputs_embeds") if hidden is None else hidden
        if given is None:
            raise TypeError("a stand-in for embeddings or a norm was called without hidden states")
        return given


def _names_of_numbers(blocks: list[nn.Module]) -> set[str]:
    """The attributes by which modules know the number of their block: `layer_idx` in most, `layer_id` in GPT-Neo."""
    fits: dict[str, bool] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            for name, value in vars(module).items():
                if type(value) is int and "layer" in name and value >= 0:
                    fits[name] = fits.get(name, True) and value == number
    return {name for name, fit in fits.items() if fit}


def _strip(root: nn.Module, path: str, keep: str) -> None:
    """Takes every module with weights out of `root`, except those on the way to `path` and what is at `keep`."""
    module: Any = root
    for step in [*(path.split(".") if path else []), *keep.split(".")]:
        for name, child in module.named_children():
            if name != step and next(child.parameters(), None) is not None:
                setattr(module, name, _ZeroEmbedding() if isinstance(child, nn.Embedding) else _PassThrough())
        if not module._parameters and not module._buffers:
            module._is_hf_initialized = True  # transformers would initialise weights that are gone
        module = getattr(module, step)


BUILDING: Final = threading.Lock()
"""Held while transformers builds a model: for so long it sets torch's default dtype, which is that of all threads. Of
two that build at once, one would make its weights in the other's dtype, and leave that as the default."""


def build(config: PreTrainedConfig, dtype: torch.dtype) -> Skeleton:
    """The whole model of `config` without memory.

    Raises:
        ModelError: transformers has no causal language model for it, or its blocks cannot be told.
    """
    refuse_outside_inputs(config)
    try:
        with BUILDING, torch.device("meta"), Uninitialised():
            try:
                model = causal_model(config, dtype)
            except NotImplementedError:
                _ = torch._meta_registrations.activate_meta  # commands import it when something of it is used
                model = causal_model(config, dtype)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a causal language model of type {config.model_type!r}: {reason_of(error)}"
        ) from error
    model.eval()
    found = _lists_of_blocks(model, getattr(config, "num_hidden_layers", None))
    if len(found) != 1:
        raise ModelError(f"petalnode cannot tell which layers of a {config.model_type!r} model are its blocks")
    decoder_path, list_name = found[0]
    decoder = cast(PreTrainedModel, model.get_submodule(decoder_path))
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    boundaries = boundaries_of(config.to_dict(), int(config.hidden_size), int(config.num_hidden_layers))
    skeleton = Skeleton(model, decoder, decoder_path, list_name, dtype, model.state_dict(), tied, boundaries)
    keep_states_in_caches(decoder, skeleton.blocks)
    settle_choices(decoder)
    return skeleton


def _lists_of_blocks(model: PreTrainedModel, count: int | None) -> list[tuple[str, str]]:
    """(the decoder's path, the list's path in it) of each list of `count` modules that is a decoder's own, or, where
    there is none, stands inside a part of one that its configuration calls a decoder."""
    modules = dict(model.named_modules())
    inside: list[tuple[str, str]] = []
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            owner = path.rpartition(".")[0]
            while not isinstance(modules[owner], PreTrainedModel):
                owner = owner.rpartition(".")[0]
            inside.append((owner, path.removeprefix(owner).lstrip(".")))
    own = [place for place in inside if "." not in place[1]]
    return own or (inside if getattr(model.config, "is_decoder", False) else [])


def cut_config(config: PreTrainedConfig, span: Span, num_blocks: int) -> None:
    """Lets the decoder's own loop over its blocks see the span as if it were a whole model."""
    kind = type(config)
    counted = [name for name in ("layer_types", "layers_block_type") if isinstance(vars(kind).get(name), property)]
    if counted:  # by the numbers of the blocks in the whole model
        cut = {name: getattr(config, name)[span.start : span.end] for name in counted}
        config.__class__ = type(kind.__name__, (kind,), cut)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == num_blocks and ("layer" in name or "block" in name):
            setattr(config, name, value[span.start : span.end])
    config.num_hidden_layers = len(span)
    if span.end < num_blocks:
        vars(config).update({name: 0 for name in ("num_kv_shared_layers",) if name in vars(config)})


def fill(
    skeleton: Skeleton,
    weights: Checkpoint,
    wanted: Callable[[int | None], bool],
    device: torch.device,
    there: Collection[str] = (),
) -> None:
    """Loads the weights of every part for which `wanted(block number, or None outside the blocks)` is true.

    Parts that are not wanted must have been taken out of the model before, as must the parameters that `there` names:
    quantised modules replace them. A tensor that needs no conversion stays memory-mapped. Call it once for a model: a
    second call would leave its rotary frequencies undefined.

    Raises:
        ModelError: weights are missing, unexpected or of another shape; it names them.
    """
    model, mapping = skeleton.model, _conversions(skeleton.model)
    stored, quantised = stored_weights(skeleton, weights), quantised_weights(skeleton, weights)
    keys = tuple(quantised.sources) if quantised is not None else weights.keys

    def lazily(key: str) -> Any:
        if stored is not None:
            return _Opened(stored, key)
        return weights.slice(key) if quantised is None else _OpenedQuantised(quantised, key)

    chosen = {
        name if used == place else used: lazily(key)
        for key, name, place in _places(skeleton, keys if stored is None else tuple(stored.sources), mapping)
        for used in (place, *skeleton.copies_in_blocks(place))
        if wanted(skeleton.block_of(used)) and used not in there
    }
    load = LoadStateDictConfig(
        dtype=skeleton.dtype,
        dtype_plan=model._get_dtype_plan(skeleton.dtype),
        weight_mapping=mapping,
        device_map={"": device},
    )
    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, chosen, load)
    finally:
        if progress:
            logging.enable_progress_bar()
    model._adjust_missing_and_unexpected_keys(info)
    _check(model, info)
    model._finalize_model_loading(model, load, info)  # ties weights, computes rotary frequencies
    if skeleton.fills_blocks and next(skeleton.blocks[0].parameters(), None) is not None:
        with torch.no_grad():
            model._init_weights(skeleton.decoder)
    model.requires_grad_(False)
    model.eval()


def stored_weights(skeleton: Skeleton, weights: Checkpoint) -> GgufWeights | None:
    """The weights as parameters of the model, if they are those of GGUF files.

    Raises:
        ModelError: the files do not fit the model.
    """
    if not weights.gguf:
        return None
    shapes = {name: tuple(weight.shape) for name, weight in skeleton.parameters.items()}
    stored = GgufWeights(weights.gguf, read_raw_config(weights.folder), shapes, skeleton.tied)
    stored.check_shapes()
    return stored


def quantised_weights(skeleton: Skeleton, weights: Checkpoint) -> StoredQuantised | None:
    """The tensors of a safetensors checkpoint whose matrices are quantised; None for plain ones.

    Raises:
        ModelError: they are in a way that is not loaded here.
    """
    scheme = None if weights.gguf else scheme_of(weights.folder, read_raw_config(weights.folder))
    if scheme is None:
        return None
    plain = tuple(StoredQuantised(weights, scheme).sources)
    mapping = _conversions(skeleton.model)
    places = [(place, key) for key, _, place in _places(skeleton, plain, mapping)]
    count = Counter(place for place, _ in places)
    shapes = {name: tuple(weight.shape) for name, weight in skeleton.parameters.items()}
    return StoredQuantised(weights, scheme, {key: place for place, key in places if count[place] == 1}, shapes)


@dataclass(frozen=True)
class _OpenedQuantised:
    """A tensor of such a checkpoint as a lazy handle: `[...]` reads and opens it."""

    stored: StoredQuantised
    key: str

    def __getitem__(self, place: object) -> torch.Tensor:
        return self.stored.values(self.key)


@dataclass(frozen=True)
class _Opened:
    """A parameter of GGUF files as a lazy handle: `[...]` reads and opens it."""

    stored: GgufWeights
    name: str

    def __getitem__(self, place: object) -> torch.Tensor:
        kind = self.stored.kind(self.name)
        if kind is not None and kind in STORED and kind not in ("F16", "BF16") and library() is not None:
            shape = self.stored.shape(self.name)
            if len(shape) == 2:
                return self.stored.turned(self._by_kernels(kind, (shape[0], shape[1])), self.name)
        return self.stored.values(self.name)

    def _by_kernels(self, kind: str, shape: tuple[int, int]) -> torch.Tensor:
        """The same values, to the bit, in a tenth of the time: of the matrix [out, in]."""
        if held_as(kind, shape) is None:
            return self.stored.turned(self.stored.values(self.name), self.name)
        matrix = TiledMatrix.of_stored(kind, self.stored.pieces(self.name, None, LANES), shape)
        opened = torch.empty(shape)
        for start in range(0, shape[0], _OPENED_ROWS):
            end = min(start + _OPENED_ROWS, shape[0])
            opened[start:end] = matrix.rows(start, end, torch.float32)
        return opened


def _conversions(model: PreTrainedModel) -> list[Any]:
    """What transformers does to a checkpoint's tensors; to those of a language part, what it does to the model's."""
    found: list[Any] = get_model_conversion_mapping(model)
    kind = str(model.config.model_type)
    if kind.endswith("_text") and get_checkpoint_conversion_mapping(kind) is None:
        outer = get_checkpoint_conversion_mapping(kind.removesuffix("_text")) or []
        found += [step for step in outer if isinstance(step, WeightConverter)]
    return found


def _places(skeleton: Skeleton, keys: Sequence[str], mapping: list[Any]) -> Iterator[tuple[str, str, str]]:
    """Every one of a checkpoint's keys that is the language model's: the key, its name there, the parameter that it
    fills (the first, if several).
    """
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    wrapped = not skeleton.takes_pictures and any(_LANGUAGE_PART.match(key) for key in keys)
    for key in keys:
        name = _inner_name(key) if wrapped else key
        if name is not None and (skeleton.takes_pictures or not _OTHER_PART.match(name)):
            place, _ = rename_source_key(
                name, renamings, converters, skeleton.model.base_model_prefix, skeleton.parameters
            )
            yield key, name, place


def _inner_name(key: str) -> str | None:
    """The name in the language model alone of a key of a model that also takes pictures or sound."""
    if key.startswith("lm_head."):
        return key
    inner = _LANGUAGE_PART.match(key)
    if inner is None:
        return None
    rest = key[inner.end() :]
    return rest if rest.startswith(("lm_head.", "model.")) else f"model.{rest}"


def _check(model: PreTrainedModel, info: Any) -> None:
    tied: dict[str, str] = model.all_tied_weights_keys
    there = {tied.get(key, key) for key in (*tied, *tied.values()) if key not in info.missing_keys}
    missing = {key for key in info.missing_keys if tied.get(key, key) not in there}
    problems = [
        ("misses", sorted(missing)),
        ("has unexpected", sorted(info.unexpected_keys)),
        (
            "has wrongly shaped",
            [f"{key} {tuple(has)}, not {tuple(wants)}" for key, has, wants in sorted(info.mismatched_keys)],
        ),
        ("has unusable", sorted(info.conversion_errors)),
    ]
    said = [f"{verb} {_some(names)}" for verb, names in problems if names]
    if said:
        raise ModelError(
            f"the checkpoint does not fit a {model.config.model_type!r} model: it {'; it '.join(said)}. "
            "Either config.json belongs to another model, or files are missing"
        )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
