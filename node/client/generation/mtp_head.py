"""Drafts by a model's MTP head for the token after the next one, which stands behind its last block.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): its input is what left the last block at a token,
behind the final norm, and the embedding of the next token. Each is normed; both go through a projection and one block
of the model's own class. From its output, normed, the model's head makes the logits of the token after that. The output
also stands for what will leave the last block at the next token, until that is known: so one head drafts several
tokens. transformers leaves these tensors out when it loads a model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import nn

from ....protocols.ids import Span
from ...blocks.architecture import cache_specs, open_skeleton, windows_of
from ...blocks.client_part import ClientModel
from ...blocks.skeleton import Skeleton, build, fill
from ...blocks.span import BlockSpan
from ...blocks.stack import BlockStack
from ...errors import ModelError, reason_of
from ...models.checkpoint import Checkpoint
from ...models.folder import read_config, scheme_of
from ...models.parts import COPIES
from ...models.quantisation import Numerics
from ..chunks import from_chunks
from ..request import WireTensor
from ..session.prefixes import common_prefix
from .draft_model import MOST_DRAFTED, PREFILL_TOKENS

_log = logging.getLogger(__name__)

_NAMES: Final = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "shared_head.norm": "norm",
    "final_layernorm": "norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_OUTER: Final = ("enorm.weight", "hnorm.weight", "norm.weight", "eh_proj.weight")
_KINDS: Final = {"mimo_v2_flash": {"layer_types": "sliding_attention", "mlp_layer_types": "dense"}}
"""The kind of the head's block, where it is not that of full attention and else that of the last block."""


@dataclass(frozen=True)
class MtpLimits:
    """What is kept and asked for.

    Attributes:
        kept: hidden states of servers that wait until the head reads them; what is older is not read.
        prompt: tokens of a prompt that it reads: their hidden states travel, 1 MiB for 2,048 values of 16 bits.
        free_share: of the free memory, that it may take.
    """

    kept: int = 1024
    prompt: int = 256
    free_share: float = 0.5


_LIMITS: Final = MtpLimits()


@dataclass(eq=False)
class MtpHead:
    """The head's layers. Several conversations take turns."""

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Linear
    norm: nn.Module
    blocks: BlockSpan
    turn: threading.Lock = field(default_factory=threading.Lock)

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor, embedded: torch.Tensor, cache: Any) -> torch.Tensor:
        """[tokens, hidden size] of the same shape: `hidden` behind the final norm, `embedded` of the tokens after."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output: torch.Tensor = self.norm(self.blocks.forward(joined.unsqueeze(0), cache)[0])
        return output


class _BlockWeights(Checkpoint):
    """The tensors of the head's block, under their names in a model of one block."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._names = names

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._names)

    def slice(self, key: str) -> Any:
        return super().slice(self._names[key])


def _tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """The key of each tensor of the first such head, by its name in it; empty if there is none."""
    layout = checkpoint.layout
    for place in (f"{layout.blocks}{layout.num_blocks}.", f"{layout.base}mtp.", "mtp."):
        found = {}
        for key in checkpoint.keys if layout.num_blocks and not checkpoint.gguf else ():
            name = key.removeprefix(place).removeprefix("layers.0.")
            old = next((old for old in _NAMES if name.startswith(f"{old}.")), None)
            if key.startswith(place) and not name.startswith(("layers.", *COPIES)):
                found[name if old is None else _NAMES[old] + name.removeprefix(old)] = key
        if "eh_proj.weight" in found or "enorm.weight" in found:
            return found
    return {}


def _one_block(whole: Skeleton) -> Skeleton:
    """A model of one block of the head's kind, of the class of `whole`."""
    config, kinds = deepcopy(whole.config), _KINDS.get(whole.config.model_type, {})
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == whole.num_blocks and "layer" in name:
            usual = "full_attention" if "full_attention" in value else value[-1]
            setattr(config, name, [kinds.get(name, usual)])
    config.num_hidden_layers = 1
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return build(config, whole.dtype)


def _load(part: ClientModel) -> MtpHead | None:
    with Checkpoint(part.folder) as checkpoint:
        keys = _tensors(checkpoint)
        if not keys:
            return None
        if scheme_of(part.folder, read_config(part.folder)) is not None:
            raise ModelError("its tensors are quantised")
        if not part.has_plain_head:
            raise ModelError("what the model does between its last block and its logits is not known")
        if missing := [name for name in _OUTER if name not in keys]:
            raise ModelError(f"the checkpoint misses its {', '.join(missing)}")
        free, nbytes = psutil.virtual_memory().available, sum(checkpoint.tensor(key).nbytes for key in keys.values())
        if nbytes > _LIMITS.free_share * free:
            raise ModelError(f"it takes {nbytes >> 20:,} MiB, and {free >> 20:,} MiB of memory are free")
        whole = open_skeleton(part.folder, str(part.dtype).removeprefix("torch."))
        norms = [deepcopy(whole.decoder.get_submodule("norm")) for _ in range(3)]
        project = nn.Linear(2 * part.hidden_size, part.hidden_size, bias=False, device="meta")
        for module, name in zip((*norms, project), _OUTER, strict=True):
            value = checkpoint.slice(keys.pop(name))[:].to(part.device, part.dtype)
            if value.shape != module.weight.shape:
                raise ModelError(f"its {name} has the shape {tuple(value.shape)}, not {tuple(module.weight.shape)}")
            module.weight = nn.Parameter(value, requires_grad=False)
    skeleton, span = _one_block(whole), Span(0, 1)
    windows, blocks = windows_of(skeleton), skeleton.keep_only(span)
    with _BlockWeights(part.folder, {skeleton.parameter(0, name): key for name, key in keys.items()}) as weights:
        fill(skeleton, weights, lambda block: block == 0, part.device)
    stack = BlockStack(skeleton.decoder, blocks, skeleton.boundaries, 0)
    specs = cache_specs(stack, skeleton, windows, part.device)
    loaded = BlockSpan(span, 1, stack, specs, skeleton, part.device, Numerics())
    return MtpHead(norms[0], norms[1], project, norms[2], loaded)


_LOADED: Final[WeakKeyDictionary[ClientModel, MtpHead | None]] = WeakKeyDictionary()
_LOADING: Final = threading.Lock()


def mtp_head(part: ClientModel) -> MtpHead | None:
    """The head of the model of which `part` is, loaded when this is asked for the first time; None if it has none, or
    one that cannot be used, which is said once. For worker threads."""
    with _LOADING:
        if part not in _LOADED:
            try:
                _LOADED[part] = _load(part)
            except Exception as error:  # transformers breaks in its own ways, and answers come all the same
                _log.warning("no drafts by the MTP head of the model in %s: %s", part.folder, reason_of(error))
                _LOADED[part] = None
        return _LOADED[part]


def mtp_reader(part: ClientModel, max_length: int) -> MtpReader | None:
    """For a conversation of up to `max_length` tokens; None where the model has no such head. For worker threads."""
    head = mtp_head(part)
    return None if head is None else MtpReader(part, head, max_length)


class MtpReader:
    """What the head has read of one conversation, as `DraftReader`.

    Its cache begins where what left the last block is known: not of a part of a prompt that servers had kept, nor of
    one that nobody asked for. Rotary positions count from there, which makes no difference: only distances matter.
    """

    def __init__(self, part: ClientModel, head: MtpHead, max_length: int) -> None:
        self._part, self._head = part, head
        self.max_length, self.reads = min(max_length, head.blocks.max_positions), _LIMITS.prompt
        self._cache = head.blocks.make_cache(1, self.max_length)
        self._first = 0  # position in the text of the first one in the cache
        self._held: list[int] = []  # the text up to the last token that was read
        self._sure = 0  # up to here, the cache is of what left the last block
        self._outputs: dict[int, torch.Tensor] = {}  # of the last positions
        self._noting = threading.Lock()
        self._text: list[int] = []
        self._known: dict[int, tuple[WireTensor | torch.Tensor, int]] = {}

    def note(self, tokens: Sequence[int], hidden: Sequence[WireTensor] | torch.Tensor) -> None:
        """What left the last block for the last of `tokens`: [tokens, hidden size], or as it came. For any thread."""
        if isinstance(hidden, torch.Tensor):
            places: list[tuple[WireTensor | torch.Tensor, int]] = [(hidden, index) for index in range(len(hidden))]
        else:
            places = [(chunk, index) for chunk in hidden for index in range(chunk.tokens)]
        start = len(tokens) - len(places)
        with self._noting:
            same = min(common_prefix(self._text, tokens), start)
            self._text = list(tokens)
            kept = {place: found for place, found in self._known.items() if place < same}
            new = {start + index: found for index, found in enumerate(places) if start + index >= 0}
            self._known = dict(list((kept | new).items())[-_LIMITS.kept :])

    def read(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """As `DraftReader.read` does it."""
        with self._noting:
            said = common_prefix(self._text, tokens)
            known = {place: found for place, found in self._known.items() if place < min(said, len(tokens) - 1)}
        with self._head.turn, torch.inference_mode():
            last = len(tokens) - 2  # behind whose output the next token stands
            place = self._go_back(tokens, known, last)
            while place <= last:
                end = place + 1
                while end <= last and end in known and end - place < PREFILL_TOKENS and place in known:
                    end += 1
                output = self._head.run(self._given(known, place, end), self._embedded(tokens, place, end), self._cache)
                self._sure = end if place in known else self._sure
                self._outputs[end - 1] = output[-1]
                self._held = list(tokens[: end + 1])
                if end - place == PREFILL_TOKENS and end <= last:
                    return None
                place = end
            self._forget(last - MOST_DRAFTED)
            return torch.nan_to_num(self._part.logits_of(self._outputs[last].view(1, 1, -1))[0, 0])

    def _forget(self, end: int) -> None:
        """What was read of positions before `end` is in the cache, and no draft goes back so far."""
        self._outputs = {place: output for place, output in self._outputs.items() if place >= end}
        with self._noting:
            self._known = {place: found for place, found in self._known.items() if place >= end}

    def _go_back(self, tokens: Sequence[int], known: Mapping[int, Any], last: int) -> int:
        """Takes out of the cache what is of other tokens, of guesses where more is known now, and the last position;
        returns the position to go on from."""
        end = min(common_prefix(self._held, tokens) - 1, self._first + self._cache.length, last)
        end = next((place for place in range(self._sure, end) if place in known), end)
        run = max(known, default=last)
        while run - 1 in known:
            run -= 1
        if end < max(self._first, run):
            self._first = self._sure = end = run
        self._cache.rollback(end - self._first)
        self._sure = min(self._sure, end)
        return end

    def _given(self, known: Mapping[int, tuple[WireTensor | torch.Tensor, int]], start: int, end: int) -> torch.Tensor:
        """What left the last block at these positions, behind the final norm, or what stands for it."""
        part = self._part
        if start not in known:
            nothing = torch.zeros(part.hidden_size, device=part.device, dtype=part.dtype)
            return self._outputs.get(start - 1, nothing).unsqueeze(0)
        rows: list[torch.Tensor] = []
        opened: tuple[Any, torch.Tensor] | None = None
        for place in range(start, end):
            chunk, index = known[place]
            if opened is None or opened[0] is not chunk:
                opened = (chunk, chunk if isinstance(chunk, torch.Tensor) else from_chunks([chunk])[0])
            rows.append(opened[1][index])
        return part.normed(torch.stack(rows).unsqueeze(0))[0]

    def _embedded(self, tokens: Sequence[int], start: int, end: int) -> torch.Tensor:
        return self._part.embed(torch.tensor([tokens[start + 1 : end + 1]]), start + 1)[0]
