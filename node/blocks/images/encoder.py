"""What a client runs of a model that takes pictures: the encoder of the pictures, and what puts them among the tokens.

The whole model of transformers is built without its language part, in whose place stands one module that sees with what
it is called: by then pictures are embeddings among those of the tokens. So no picture leaves this machine. What a model
hands to its language part beside embeddings and positions is refused, if it is not known here.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ....protocols.ids import MAX_GROUP, Boundaries, LayoutNeeds
from ...errors import BadInput, ModelError, memory_needed, reason_of
from ...models.checkpoint import Checkpoint
from ..config import deepstack_of
from ..skeleton import BUILDING, Skeleton, fill
from .groups import groups_in
from .layout import TEXT, TokenLayout, placed

_LANGUAGE_PARTS: Final = frozenset({"language_model", "text_model"})
_HARMLESS: Final = frozenset(
    {
        *("inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "labels"),
        "per_layer_inputs",
    }
)
"""What a language part may be called with: what travels, and what concerns its cache and its outputs."""
_FEATURES: Final = frozenset({"visual_pos_masks", "deepstack_visual_embeds"})


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with pictures.

    Attributes:
        embeddings: [rows, tokens, embedding size]: in the place of those of its tokens.
        whole: the layout of all its tokens.
        per_block: [rows, tokens, blocks, values]: likewise in the place of what each block gets for itself alone, where
            they get such.
    """

    embeddings: torch.Tensor
    whole: TokenLayout = TEXT
    per_block: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of a row, padding and placeholders of pictures included."""
        return self.embeddings.shape[1]

    @property
    def needs(self) -> LayoutNeeds:
        """What servers have to know for it."""
        return self.whole.needs

    def layout(self, position: int, rows: int, tokens: int) -> TokenLayout:
        """Of `tokens` tokens of a row behind `position` others."""
        whole = self.whole.of_rows(rows)
        own, behind = whole.part(position, tokens), max(position + tokens - max(self.tokens, position), 0)
        positions = None if whole.positions is None else placed(whole.positions, position, tokens)
        if behind == tokens:
            return TokenLayout(positions)
        groups, features = own.groups, own.features
        if behind:
            groups = None if groups is None else pad(groups, (0, behind))
            features = None if features is None else pad(features, (0, 0, 0, 0, 0, behind))
        return TokenLayout(positions, groups, features)

    def bytes_of(self, token: int) -> bytes:
        """All that a token of the first row is by, its number in the row aside."""
        own = self.whole.part(token, 1)
        per_block = None if self.per_block is None else self.per_block[:1, token]
        parts = (self.embeddings[:1, token], own.positions, own.groups, own.features, per_block)
        return b"".join(part.double().cpu().numpy().tobytes() for part in parts if part is not None)

    def put(self, embedded: torch.Tensor, position: int) -> torch.Tensor:
        """The embeddings of the tokens from `position` on, of this prompt as far as it goes."""
        return _put(self.embeddings, embedded, position)

    def put_per_block(self, made: torch.Tensor, position: int) -> torch.Tensor:
        """The same for what is for single blocks, [rows, tokens, blocks, values]."""
        return made if self.per_block is None else _put(self.per_block, made, position)


def _put(whole: torch.Tensor, made: torch.Tensor, position: int) -> torch.Tensor:
    own = whole[:, position : position + made.shape[1]].to(made.device, made.dtype)
    own = own.repeat_interleave(made.shape[0] // len(own), dim=0)  # beams
    return torch.cat([own, made[:, own.shape[1] :]], dim=1)


class _Entered(Exception):
    """The language part was called with these arguments."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


class _Entrance(nn.Module):
    """In the place of a language part."""

    def __init__(self, part: Any, embeddings: nn.Module, decoder: Any) -> None:
        super().__init__()
        self.config = part.config
        self.embed_tokens = embeddings
        self._decoder = [decoder]  # which has no weights here

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Entered(kwargs)

    def get_per_layer_inputs(self, *args: Any) -> Any:
        return self._decoder[0].get_per_layer_inputs(*args)


class ImageEncoder:
    """Of the model in `folder`. Its weights are loaded when the first picture comes. For any thread.

    Args:
        embeddings: the language part's, of tokens.
        decoder: the language part.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, embeddings: nn.Module, decoder: Any
    ) -> None:
        self._folder = folder
        self._decoder = decoder
        self._dtype = dtype
        self._device = device
        self._embeddings = embeddings
        self._model: Any = None
        self._lock = threading.Lock()

    @property
    def is_there(self) -> bool:
        """Whether the model takes pictures."""
        return _takes_pictures(_config(self._folder))

    @torch.no_grad()
    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, images: Mapping[str, Any]
    ) -> ImagePrompt:
        """The prompt that the tokens and pictures make.

        Args:
            input_ids: int64 [rows, tokens], with the tokens that stand for pictures.
            attention_mask: [rows, tokens], 0 at padding.
            images: what the model's processor makes of the pictures, such as `pixel_values`.

        Raises:
            ModelError: the model takes no pictures, or its blocks want something that does not travel.
            BadInput: an argument that it does not have, or pictures and tokens do not fit each other.
        """
        with self._lock:
            self._load()
            return self._encode(input_ids, attention_mask, images)

    def load(self) -> None:
        """Loads the weights, if they are not.

        Raises:
            ModelError: the model takes no pictures, or its files do not fit it.
        """
        with self._lock:
            self._load()

    def _load(self) -> None:
        if self._model is None:
            self._model = _load(self._folder, self._dtype, self._device, self._embeddings, self._decoder)

    def _encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, images: Mapping[str, Any]
    ) -> ImagePrompt:
        model, kind = self._model, self._model.config.model_type
        known = inspect.signature(model.forward).parameters
        if unknown := images.keys() - known.keys():
            raise BadInput(f"a model of type {kind!r} takes no {min(unknown)}: give what its processor makes")
        given = {name: self._here(value) for name, value in images.items()}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        try:
            model(input_ids=input_ids.to(self._device), attention_mask=mask.to(self._device), **given)
        except _Entered as entered:
            prompt, per_block = _prompt_of(entered.given, model.config, mask), entered.given.get("per_layer_inputs")
            made = (
                per_block if per_block is None else self._decoder.project_per_layer_inputs(prompt.embeddings, per_block)
            )
            return replace(prompt, per_block=made)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise BadInput(f"these pictures and tokens do not fit each other: {reason_of(error)}") from error
        raise ModelError(
            f"a model of type {kind!r} does not call its language part: petalnode takes no pictures for it"
        )

    def _here(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)


def _prompt_of(given: Mapping[str, Any], config: Any, mask: torch.Tensor) -> ImagePrompt:
    refused = f"petalnode takes no pictures for models of type {config.model_type!r}, which"
    text = config.get_text_config(decoder=True)
    known = _HARMLESS | (_FEATURES if deepstack_of(config) else frozenset())
    for name, value in given.items():
        if value is not None and name not in known:
            raise ModelError(f"{refused} give their blocks {name}")
    embeddings: torch.Tensor = given["inputs_embeds"]
    if embeddings.shape[:2] != mask.shape:
        raise ModelError(f"{refused} make other tokens of pictures")
    positions, masks = given.get("position_ids"), given.get("attention_mask")
    try:
        shown = isinstance(masks, dict) or (masks is not None and masks.dim() == 4)
        groups = groups_in(masks, text, embeddings, mask, positions) if shown else None
    except ValueError as error:
        raise ModelError(f"{refused} have masks that are not known here") from error
    if groups is not None and int(groups.max()) > MAX_GROUP:
        raise BadInput(f"{int(groups.max())} tokens of a picture see each other: {MAX_GROUP} are the most")
    if positions is not None:
        positions = positions[-3:] if positions.dim() == 3 else None  # before these, some have those of text
    return ImagePrompt(embeddings.clone(), TokenLayout(positions, groups, _features(given, embeddings)))


def _features(given: Mapping[str, Any], embeddings: torch.Tensor) -> torch.Tensor | None:
    """What blocks add: [rows, tokens, blocks, hidden size]."""
    parts = given.get("deepstack_visual_embeds")
    if not parts:
        return None
    features = embeddings.new_zeros(*embeddings.shape[:2], len(parts), embeddings.shape[2])
    features[given["visual_pos_masks"]] = torch.stack(list(parts), dim=1).to(features.dtype)
    return features


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _takes_pictures(config: Any) -> bool:
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config(decoder=True) is not config


@memory_needed("Loading the encoder of pictures")
def _load(folder: Path, dtype: torch.dtype, device: torch.device, embeddings: nn.Module, decoder: Any) -> Any:
    """The whole model without its language part, which is `decoder` and whose embeddings are these.

    Raises:
        ModelError: it takes no pictures, or its files do not fit it.
    """
    config = _config(folder)
    if not _takes_pictures(config):
        raise ModelError(f"a model of type {config.model_type!r} takes no pictures")
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    try:
        with BUILDING, torch.device("meta"):
            model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config, dtype=dtype)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a model of type {config.model_type!r}: {reason_of(error)}"
        ) from error
    model.eval()
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in _LANGUAGE_PARTS]
    if not paths:
        raise ModelError(f"petalnode cannot tell the language part of a {config.model_type!r} model")
    path = min(paths, key=len)
    parameters = model.state_dict()
    part = model.get_submodule(path)
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), path)
    model.set_submodule(path, _Entrance(part, nn.Identity(), decoder))
    if not head.startswith(path):
        model.set_submodule(head, nn.Identity())
    gone = {name for name in parameters if name.startswith((f"{path}.", f"{head}."))}
    model.all_tied_weights_keys = {}
    blocks = int(config.get_text_config(decoder=True).num_hidden_layers)
    skeleton = Skeleton(model, part, path, "layers", dtype, parameters, {}, Boundaries(0, blocks), takes_pictures=True)
    with Checkpoint(folder, blocks) as weights:
        fill(skeleton, weights, lambda block: block is None, device, gone)
    model.get_submodule(path).embed_tokens = embeddings
    return model
