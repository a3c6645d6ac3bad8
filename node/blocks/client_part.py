"""A client's part of a model: the whole object of transformers, with a stand-in for its blocks, which are remote."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from ..errors import BadInput, ModelError, memory_needed
from ..models.checkpoint import Checkpoint
from ..models.quantisation import Kernels
from .architecture import open_skeleton
from .caches.ragged import RAGGED
from .config import choose_device, original_length
from .dot import use_dots
from .images.encoder import ImageEncoder, ImagePrompt
from .images.layout import TEXT, TokenLayout
from .kernels.choice import native_kernels
from .kernels.packing import hold_ends, use_packed_head
from .outer_layers import OuterLayers
from .remote_cache import RemoteCache, RemoteCall, positions
from .skeleton import BlockList, Skeleton, fill
from .span_adapter import linear_shapes
from .stack import closed, opened, written_ids

_log = logging.getLogger(__name__)

_OF_A_STEP: Final = frozenset(
    ("input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep")
)
"""What `generate` gives the model's `forward` in a step of an ordinary session."""

Remote = Callable[[torch.Tensor, RemoteCall], torch.Tensor]
"""All blocks of the model: hidden states [batch, tokens, hidden size] in, the same shape out."""


class RemoteBlocks(nn.Module):
    """The one layer in the place of all blocks.

    Attributes:
        inner: the module that runs the blocks, so that its trainable parameters are among the model's.
    """

    inner: nn.Module | None

    def __init__(self, client: ClientModel, first: nn.Module) -> None:
        super().__init__()
        self._client = client
        self.inner = None
        self.parts = 0  # newer decoders take the tensor, older ones `layer(...)[0]`, or a tuple of two
        # By the kind of a block, of the first one here, decoders choose its mask.
        vars(self).update({name: kind for name, kind in vars(first).items() if isinstance(kind, str)})

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = self._client.run_blocks(hidden_states)
        return (hidden, *[None] * (self.parts - 1)) if self.parts else hidden


@dataclass(frozen=True)
class SoftPrompt:
    """Embeddings [prefix, embedding size] for the first `prefix` tokens of every row, or for those from `starts` [rows]
    on."""

    embeddings: torch.Tensor
    starts: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens of a row have them."""
        return self.embeddings.shape[0]

    def layout(self, position: int, rows: int, tokens: int) -> TokenLayout:
        """Text has no layout of its own."""
        return TEXT

    def put(self, embedded: torch.Tensor, position: int) -> torch.Tensor:
        """The embeddings [rows, tokens, embedding size] of tokens behind `position` others, with these among them."""
        if position:
            return embedded
        rows = self.embeddings.to(embedded.device, embedded.dtype).expand(embedded.shape[0], -1, -1)
        if self.starts is None:
            return torch.cat([rows, embedded[:, rows.shape[1] :]], dim=1)
        starts = self.starts.repeat_interleave(embedded.shape[0] // len(self.starts))  # beams
        places = starts.unsqueeze(1) + torch.arange(rows.shape[1])
        return embedded.scatter(1, places.to(embedded.device).unsqueeze(2).expand_as(rows), rows)


class ClientModel:
    """Embeddings, final norm and head of a model, with one replaceable layer in place of all blocks.

    `bind` says what runs the blocks. `embed` and `head` may be called from several threads at once.

    Attributes:
        model: the causal language model; `forward` and `generate` work as in transformers.
        num_blocks: blocks of the whole model.
        hidden_size: values per token of a stream of hidden states.
        boundaries: of the model's blocks.
        dtype, device: of the weights here.
        layer: the module in the place of the blocks.
        blocks_path: the name of the list of blocks in the model.
        linears: per block, (values in, values out) of its linear layers, by their paths in it.
        any_token: an id that is not the padding's, where only the number of tokens matters.
        max_positions: tokens that the architecture can tell apart, None if it says nothing.
        original_length: as `config.original_length`.
        encoder: of pictures, if the model takes any.
        folder: that it was loaded from.
    """

    def __init__(self, skeleton: Skeleton, device: torch.device, folder: Path) -> None:
        self.folder = folder
        self.model: Any = skeleton.model  # transformers mixes `generate` in at class level
        self.num_blocks = skeleton.num_blocks
        self.boundaries = skeleton.boundaries
        self.hidden_size = self.boundaries.hidden
        self.dtype = skeleton.dtype
        self.device = device
        self.max_positions: int | None = getattr(skeleton.config, "max_position_embeddings", None)
        self._decoder: PreTrainedModel = skeleton.decoder
        self._signature = inspect.signature(skeleton.decoder.forward)
        self._takes_positions = "position_ids" in self._signature.parameters
        self.any_token = 1 if getattr(skeleton.config, "pad_token_id", None) == 0 else 0
        self.blocks_path = ".".join(filter(None, (skeleton.decoder_path, skeleton.list_name)))
        self.linears = [linear_shapes(block) for block in skeleton.blocks]
        self._remote: Remote | None = None
        self._here = threading.local()  # .call: of the step in progress; .instead: what runs instead of the remote
        self.layer = RemoteBlocks(self, skeleton.blocks[0])
        skeleton.set_blocks(BlockList({0: self.layer}))
        skeleton.decoder._is_hf_initialized = skeleton.fills_blocks  # which are not here
        skeleton.decoder.register_forward_pre_hook(self._note_call, with_kwargs=True)
        skeleton.decoder.register_forward_hook(self._note_last)
        self.model.get_input_embeddings().register_forward_hook(self._put_prompts)
        self._prepare_cache = self.model._prepare_cache_for_generation
        self.model._prepare_cache_for_generation = self._prepare_remote_cache
        if self.boundaries.per_block:
            self._made_per_block = skeleton.decoder.project_per_layer_inputs
            skeleton.decoder.project_per_layer_inputs = self._note_per_block
        self._outer = OuterLayers(self, self.model, skeleton.decoder, self.layer)
        self.encoder = ImageEncoder(folder, self.dtype, device, self.model.get_input_embeddings(), skeleton.decoder)
        self.original_length = original_length(skeleton.config)
        self._prepare_inputs = self.model.prepare_inputs_for_generation
        if self.original_length is not None:
            self.model.prepare_inputs_for_generation = wraps(self._prepare_inputs)(
                lambda *args, **kwargs: self._prepare_remote_inputs(*args, **kwargs)
            )
        self._whole_forward = self.model.forward
        self.model.forward = wraps(self._whole_forward)(lambda *args, **kwargs: self._forward(*args, **kwargs))

    def finish(self) -> None:
        """Once the weights are here: finds out in which form the decoder wants its layer's output; ModelError: none."""
        ids = torch.full((2, 3), self.any_token, device=self.device)
        # With the first no masks are built, which nothing here needs; MPT cannot do without.
        for implementation, parts in product((RAGGED, self._decoder.config._attn_implementation), range(3)):
            self._decoder.config._attn_implementation = implementation
            self.layer.parts = parts
            try:
                with torch.no_grad():
                    hidden = self._decode(ids, instead=lambda given: given)
            except Exception as error:  # other architectures break in their own ways
                _log.debug("no remote blocks with attention %s, a tuple of %d: %s", implementation, parts, error)
                continue
            if hidden.shape[:2] == ids.shape:
                self._outer.compare_embeddings()
                return
        raise ModelError(f"petalnode cannot put remote blocks into a {self.model.config.model_type!r} model")

    def bind(self, remote: Remote) -> None:
        """From now on `remote` runs the blocks. It is called in the thread that runs the model."""
        self._remote = remote

    @contextmanager
    def prompted(self, prompt: SoftPrompt | ImagePrompt) -> Iterator[None]:
        """Within it, the embeddings of some tokens of every row are those of `prompt`, in this thread."""
        before = self.prompt
        self._here.prompt = prompt
        try:
            yield
        finally:
            self._here.prompt = before

    @property
    def prompt(self) -> SoftPrompt | ImagePrompt | None:
        """That of `prompted` in this thread."""
        return getattr(self._here, "prompt", None)

    def _put_prompts(self, embeddings: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded if self.prompt is None else self.prompt.put(embedded, self._here.call.position)

    @torch.no_grad()
    def embed(
        self, input_ids: torch.Tensor, position: int = 0, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What enters the first block.

        Args:
            input_ids: int64 [batch, tokens].
            position: tokens of a row before these.
            attention_mask: [batch, position + tokens], 0 at left padding.

        Returns:
            [batch, tokens, hidden size] in the model's dtype.
        """
        ids = input_ids.to(self.device)
        if self._outer.embeds and self.prompt is None:
            return self._outer.embed(ids)
        return self.embedded(ids, position, attention_mask)

    def embedded(self, ids: torch.Tensor, position: int = 0, mask: torch.Tensor | None = None) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return hidden

        self._decode(ids, position, mask, keep)
        return seen[0]

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary] of what left the last block, [batch, tokens, hidden size]."""
        given = hidden.to(self.device, self.dtype)
        if getattr(self._here, "last", None) is None and self._outer.heads():
            return self._outer.head(given)
        return self.logits(given)

    @torch.no_grad()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits_of` makes the logits of. Only where it `has_plain_head`."""
        return self._outer.normed(hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary]. Other threads of Python can run beside most of it."""
        return self._outer.logits_of(normed)

    @property
    def has_plain_head(self) -> bool:
        """Whether `normed` and `logits_of` together are `head`."""
        return self._outer.heads()

    @property
    def is_short(self) -> bool:
        """Whether `embed` and `head` take so little time for one token that another thread is not worth its waking;
        false before the first `head`."""
        return self._outer.are_short and self.prompt is None

    @torch.enable_grad()
    def loss_gradient(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss with respect to what left the last block: what a fine-tuning sends back.

        Args:
            hidden: [batch, tokens, hidden size].
            labels: int64 [batch, tokens]; token t is predicted from those before it.

        Returns:
            As `hidden`, in its dtype.
        """
        given = hidden.detach().to(self.device, self.dtype).requires_grad_()
        logits = self.logits(given)[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten().to(logits.device))
        (gradient,) = torch.autograd.grad(loss, given)
        return gradient.to(hidden.device, hidden.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.full(hidden.shape[:2], self.any_token, device=self.device)
        self._here.instead = lambda _: hidden
        try:
            logits: torch.Tensor = self.model(ids, use_cache=False).logits
        finally:
            self._here.instead = None
        return logits

    def _decode(
        self, ids: torch.Tensor, position: int = 0, mask: torch.Tensor | None = None, instead: Any = None
    ) -> torch.Tensor:
        """The decoder's last hidden state with `instead` in place of the blocks."""
        cache, arguments = RemoteCache(), dict[str, Any]()
        cache.advance(position)
        if self._takes_positions:
            arguments["position_ids"] = positions(ids.shape[1], position, mask).to(self.device)
        self._here.instead = instead
        try:
            output = self._decoder(
                input_ids=ids,
                attention_mask=None if mask is None else mask.to(self.device),
                past_key_values=cache,
                use_cache=True,
                **arguments,
            )
        finally:
            self._here.instead = None
        return output[0]  # type: ignore[no-any-return]

    def _note_call(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        cache, mask = given.get("past_key_values"), given.get("attention_mask")
        if cache is not None and not isinstance(cache, RemoteCache):
            raise BadInput(f"past_key_values of a swarm's model is a RemoteCache, not a {type(cache).__name__}")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            raise BadInput("a swarm's model takes an attention_mask of two dimensions, [batch, tokens]")
        held = cache.get_seq_length() if cache is not None else 0
        self._here.call = RemoteCall(cache, held, mask, given.get("position_ids"))
        if self.boundaries.ids:
            self._here.ahead = written_ids(given["input_ids"], self.dtype)
        # Without a session nothing is kept: a cache made by the model itself would count no tokens.
        return args, kwargs if cache is not None else {**kwargs, "use_cache": False}

    @contextmanager
    def last_hidden_state(self) -> Iterator[list[torch.Tensor]]:
        """Within it, what the decoder returns in this thread, behind its last norm, is put into the list."""
        last: list[torch.Tensor] = []
        self._here.last = last
        try:
            yield last
        finally:
            self._here.last = None

    def _note_last(self, decoder: Any, args: Any, output: Any) -> None:
        last = getattr(self._here, "last", None)
        if last is not None:
            last.append(output[0])

    def _note_per_block(self, *args: Any) -> torch.Tensor:
        made: torch.Tensor = self._made_per_block(*args)
        if isinstance(self.prompt, ImagePrompt):
            made = self.prompt.put_per_block(made, self._here.call.position)
        self._here.ahead = made.flatten(2)
        return made

    def run_blocks(self, hidden: torch.Tensor) -> torch.Tensor:
        """What leaves the last block, as blocks take it and give it."""
        ahead = hidden if self.boundaries.carried else getattr(self._here, "ahead", None)
        return opened(self.boundaries, self._run_blocks(closed(self.boundaries, hidden, ahead)))[0]

    def _run_blocks(self, hidden: torch.Tensor) -> torch.Tensor:
        call: RemoteCall = self._here.call
        if (instead := getattr(self._here, "instead", None)) is not None:
            return instead(hidden)  # type: ignore[no-any-return]
        if self._remote is None:
            raise RuntimeError("nothing is bound to run the blocks: call ClientModel.bind first")
        rows, tokens, size = *hidden.shape[:2], self.boundaries.of_streams
        if self.prompt is not None:
            layout = self.prompt.layout(call.position, rows, tokens)
            placed = call.position_ids if layout.positions is None else layout.positions
            call = replace(call, position_ids=placed, layout=layout)
        output = self._remote(hidden, call)
        least = tokens if call.outputs is None else min(tokens, call.outputs)
        if (output.shape[0], *output.shape[2:]) != (rows, size) or not least <= output.shape[1] <= tokens:
            raise RuntimeError(f"remote blocks made {tuple(output.shape)} of {tuple(hidden.shape)}")
        if call.cache is not None:
            call.cache.advance(hidden.shape[1])
            call.cache.last = output
        return output.to(hidden.device, hidden.dtype)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `forward`; a step of a session goes through the outer layers alone where that is the same."""
        cache, ids, mask = kwargs.get("past_key_values"), kwargs.get("input_ids"), kwargs.get("attention_mask")
        if (
            args
            or not kwargs.keys() <= _OF_A_STEP
            or not (kwargs.get("use_cache") and kwargs.get("return_dict"))
            or not isinstance(cache, RemoteCache)
            or ids is None
            or (mask is not None and mask.dim() != 2)
            or torch.is_grad_enabled()
            or self.prompt is not None
            or getattr(self._here, "last", None) is not None
            or not self._outer.embeds
            or not self._outer.heads()
        ):
            return self._whole_forward(*args, **kwargs)
        keep, held = int(kwargs.get("logits_to_keep") or 0), cache.get_seq_length()
        self._here.call = RemoteCall(cache, held, mask, kwargs.get("position_ids"), keep or None)
        hidden = self.run_blocks(self._outer.embed(ids))
        return CausalLMOutputWithPast(logits=self._outer.head(hidden[:, -keep:]), past_key_values=cache)

    def _prepare_remote_cache(self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> Any:
        """`generate` without past_key_values gets a session's cache in place of one with real keys and values."""
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = RemoteCache()
        return self._prepare_cache(generation_config, model_kwargs, *rest)

    def _prepare_remote_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Where the model gives up its cache, to fill it anew, so does the session."""
        inputs, cache = self._prepare_inputs(*args, **kwargs), kwargs.get("past_key_values")
        if isinstance(cache, RemoteCache) and inputs.get("past_key_values") is None:
            cache.reset()
            inputs["past_key_values"] = cache
        return inputs

    def refills(self, held: int, length: int) -> bool:
        """Whether transformers' `generate` gives up a cache of `held` tokens when the text comes to `length` tokens:
        all that refill theirs do so where the factors of long texts begin."""
        if self.original_length is None or not held <= self.original_length < length:
            return False
        ids, cache = torch.full((1, length), self.any_token), RemoteCache()
        cache.advance(held)
        return self._prepare_inputs(ids, past_key_values=cache, next_sequence_length=1).get("past_key_values") is None

    def draft_limit(self, tokens: int, limit: int, padding: int = 0) -> int:
        """How long a text of `tokens` tokens may become with drafts, at most `limit`: tokens up to where the factors
        change are computed with those of a short text. None behind them is in the same step."""
        if self.original_length is None or tokens > self.original_length + padding:
            return limit
        return min(limit, self.original_length + padding + 1)


@memory_needed("Loading embeddings and head")
def load_client(folder: Path, *, device: str = "auto", dtype: str = "auto", kernels: Kernels = "auto") -> ClientModel:
    """Loads what stands outside the blocks of the model in `folder`, by memory map where the dtype stays.

    Args:
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        kernels: what computes the head for a few rows on a CPU, as in `load_span`.

    Raises:
        ModelError: the folder is no model, is damaged or incomplete, or its architecture cannot be cut.
        BadInput: an unknown device or dtype.
        MachineError: the device is not there, or there is too little memory.
    """
    target = choose_device(device)
    skeleton = open_skeleton(folder, dtype)
    native = native_kernels(kernels, target, skeleton.dtype)
    with Checkpoint(folder, skeleton.num_blocks) as weights:
        there, client = hold_ends(skeleton, weights, native), ClientModel(skeleton, target, folder)
        fill(skeleton, weights, lambda block: block is None, target, there)
        use_packed_head(skeleton, weights, native)
    use_dots([skeleton.model])
    model = skeleton.model
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{folder / 'generation_config.json'} cannot be used: {error}") from error
    client.finish()
    return client
