"""The blocks that a server hosts: any decoder of transformers, cut to a span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from ...protocols.ids import Span
from ..errors import BadInput, MachineError, memory_needed
from ..models.checkpoint import Checkpoint
from ..models.progress import Progress, no_progress
from ..models.quantisation import EXACT, Kernels, Numerics
from .architecture import BY_TOKEN, cache_specs, open_skeleton, windows_of
from .cache import BlockCacheSpec, SessionView, SpanCache
from .caches.form import CacheForm
from .caches.ragged import RaggedView
from .caches.states import STATE_CHUNK, STATE_TOKENS
from .config import choose_device, deepstack
from .dot import use_dots
from .kernels.choice import Known, agrees_with_single_steps, find_step, native_kernels, use_products
from .kernels.packing import Packer, tiled_kinds
from .kernels.recurrent import use_recurrent_kernels
from .kernels.step import SpanStep
from .kernels.tiles import TiledMatrix
from .quantisation.activations import layers_that_round, round_inputs
from .quantisation.matrix import QuantisedLinear
from .quantisation.slots import QuantisedExperts
from .skeleton import Skeleton, cut_config, fill
from .span_adapter import (
    AdapterRows,
    Member,
    NotByRow,
    SpanAdapter,
    linear_shapes,
    make_span_adapter,
    rows_of_adapters,
    with_adapters,
    with_prompts,
)
from .stack import BlockStack

PREFILL_CHUNK: Final = 256
"""Tokens (rows times positions) of a prefill that are computed at once; a recomputation splits it likewise."""

_UNBOUNDED_POSITIONS = 1 << 20  # architectures without a table or rotary range (alibi): a bound for sanity only


class BlockSpan:
    """Blocks `span` of a model, ready to compute. Not thread-safe: one compute thread owns it.

    Attributes:
        span: the blocks, numbered in the whole model.
        num_blocks: blocks of the whole model.
        hidden_size: values per token of a stream of hidden states.
        dtype, device: of the computation.
        cache_bytes_per_token: attention cache of one token of one row, all blocks of the span; of states, if all keep
            nothing else, what counts as a token.
        keeps_states: whether blocks keep more than keys and values.
        max_positions: tokens that the architecture can tell apart.
        supports_ragged: whether `decode` runs the sessions as one batch.
        numerics: how coarsely the weights are held, and what they are multiplied with.
        stack: the blocks themselves, for passes without a cache.
        specs: what each block keeps.
        takes_groups, features: whether steps may have groups; how many first blocks add features of pictures.
        step: decode steps by the compiled kernels, where these know such blocks and are quicker.
        linears: (values in, values out) of the linear layers that adapters may change, by block and path.
    """

    def __init__(
        self,
        span: Span,
        num_blocks: int,
        stack: BlockStack,
        specs: Sequence[BlockCacheSpec],
        skeleton: Skeleton,
        device: torch.device,
        numerics: Numerics,
    ) -> None:
        self.span, self.num_blocks = span, num_blocks
        self.hidden_size = int(skeleton.config.hidden_size)
        self.dtype, self.device, self.numerics = skeleton.dtype, device, numerics
        self._form = form = CacheForm(numerics.cache, skeleton.dtype)
        self.keeps_states = any(spec.states for spec in specs)
        self._by_token = skeleton.config.model_type in BY_TOKEN
        growing = sum(spec.bytes_per_token(form) for spec in specs)
        states = sum(spec.bytes_per_row(form, 0, 1) for spec in specs)
        self.cache_bytes_per_token = growing or -(-states // STATE_TOKENS)
        self.max_positions = int(getattr(skeleton.config, "max_position_embeddings", None) or _UNBOUNDED_POSITIONS)
        self.supports_ragged, self._mixes_adapters = False, True
        self.step: SpanStep | None = None
        self.stack, self.specs = stack, tuple(specs)
        self.takes_groups = stack.takes_groups and not numerics.exact
        self.features = deepstack(skeleton.config)
        self.linears = {span.start + index: linear_shapes(block) for index, block in enumerate(stack.blocks)}

    @property
    def parts(self) -> tuple[BlockSpan, ...]:  # of each device
        return (self,)

    @property
    def quantisation(self) -> str:
        """The numerics as they are announced."""
        return str(self.numerics)

    @property
    def cache_dtype(self) -> str:
        """In what keys and values are held: float32, bfloat16, float16 or int8."""
        return str(self.dtype).removeprefix("torch.") if self.numerics.cache == "auto" else self.numerics.cache

    @property
    def weight_bytes(self) -> int:
        """Of the weights in memory, or of the files that are mapped there."""
        total = 0
        for block in (block for part in self.parts for block in part.stack.blocks):
            total += sum(parameter.nbytes for parameter in (*block.parameters(), *block.buffers()))
            quantised = (module.matrix for module in block.modules() if isinstance(module, QuantisedLinear))
            total += sum(tensor.nbytes for matrix in quantised for tensor in matrix.tensors().values())
        return total + sum(experts.nbytes for experts in self._experts)

    @property
    def _modules(self) -> Iterator[nn.Module]:
        return (module for part in self.parts for block in part.stack.blocks for module in block.modules())

    @property
    def _experts(self) -> list[QuantisedExperts]:
        return [module for module in self._modules if isinstance(module, QuantisedExperts)]

    @property
    def disk_bytes(self) -> int:
        """Of the experts that are left on the disk."""
        return sum(experts.nbytes for experts in self._experts if experts.ranges is not None)

    @property
    def expert_counts(self) -> tuple[int, int]:
        """Experts that were used, each once in a pass through its block; how many of these were not in memory."""
        counts = [experts.counts for experts in self._experts]
        counts += [part.step.counts for part in self.parts if part.step is not None]
        return sum(used for used, _ in counts), sum(read for _, read in counts)

    @property
    def kernels(self) -> str:
        """What computes a few rows: native (for some matrices at least) or torch."""
        tiled = any(isinstance(getattr(one, "matrix", None), TiledMatrix) for one in self._modules)
        return "native" if tiled or any(part.step for part in self.parts) else "torch"

    def make_cache(
        self, batch: int, max_length: int, left_padding: Sequence[int] | None = None, part: Span | None = None
    ) -> SpanCache:
        """A cache for one session; memory is used as tokens come in.

        Args:
            batch: rows, beams included.
            max_length: tokens of a row over the life of the session.
            left_padding: per row, how many of its first tokens are padding.
            part: the blocks that the session runs through, if not all of the span.

        Raises:
            ValueError: numbers that make no sense, or blocks that are not here.
        """
        part = part or self.span
        if not self.span.covers(part):
            raise ValueError(f"blocks {part} are wanted, {self.span} are here")
        first = part.start - self.span.start
        specs = self.specs[first : first + len(part)]
        return SpanCache(specs, batch, max_length, self._form, self.device, left_padding, first)

    def cache_tokens(self, batch: int, max_length: int) -> int:
        """What a session reserves: all that its rows keep at once."""
        nbytes = batch * sum(spec.bytes_per_row(self._form, max_length, batch) for spec in self.specs)
        return -(-nbytes // self.cache_bytes_per_token)

    def chunk_tokens(self, tokens: int) -> int:
        """How many to compute at once where `tokens` of a row would do: delta rules round by where a prompt is cut."""
        return -(-tokens // STATE_CHUNK) * STATE_CHUNK if self.keeps_states else tokens

    def make_adapter(self, tensors: Mapping[str, torch.Tensor]) -> SpanAdapter:
        """What `tensors` change of these blocks; checked before by `protocols.adapter.check_tensors`."""
        blocks = {self.span.start + index: block for index, block in enumerate(self.stack.blocks)}
        return make_span_adapter(tensors, blocks, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, cache: SpanCache, adapter: SpanAdapter | None = None) -> torch.Tensor:
        """Runs the next tokens of one session (prefill, a chunk, a step) and keeps them in its cache.

        Args:
            hidden: float [batch, tokens, width] of any dtype and device, the width as `BlockStack.width` has it; wider
                by the features that the session's `features` blocks add, which stand behind. A step with groups is cut
                by `SpanCache.whole_groups` only.
            adapter: changes the blocks for this session.

        Returns:
            The same rows, tokens, dtype and device, without what was for these blocks alone.

        Raises:
            ValueError: another shape, or more tokens than the cache takes.
        """
        self._check(hidden, cache)
        entering, *features = torch.split(hidden.to(self.device, self.dtype), self.stack.width(cache.first), dim=2)
        for tokens in cache.passes(hidden.shape[1]):
            given = entering[:, :tokens]
            with cache.replaying() as again:
                given = given if again is None else torch.cat([again, given], dim=1)
                run = self._one_by_one if self._by_token and cache.length and cache.states else self._forward
                output = run(given, cache, adapter, features if tokens else ())[:, -tokens:]
            cache.advance(tokens, given)
        return torch.cat((output, *features[len(cache.specs) :]), dim=2).to(hidden.device, hidden.dtype)

    def _one_by_one(self, hidden: torch.Tensor, cache: SpanCache, *rest: Any) -> torch.Tensor:
        outputs = []
        for token in torch.split(hidden, 1, dim=1):
            outputs.append(self._forward(token, cache, *rest))
            cache.count_alone()
        return torch.cat(outputs, 1)

    def _forward(
        self, hidden: torch.Tensor, cache: SpanCache, adapter: SpanAdapter | None, features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        tokens, groups = hidden.shape[1], cache.groups_of(hidden.shape[1])
        positions, mask = cache.positions_of(tokens), cast(Any, None)
        if cache.padded:
            padding = torch.tensor(cache.left_padding, device=self.device).unsqueeze(1)
            mask = (torch.arange(cache.length + tokens, device=self.device) >= padding).long()
        adapter_rows = [AdapterRows(adapter, 0, cache.batch, cache.batch)] if adapter is not None else []
        text = groups is None and not features and self._suits(cache, adapter)
        if self.step is not None and text and self.step.takes([cache], adapter_rows, tokens):
            return self.step.run(hidden, [cache], adapter_rows)
        view, part = SessionView(cache), self._part(cache)
        if groups is not None:
            mask = self.stack.masks(hidden, view, positions, mask, groups)
        adding = self.stack.adding(features, cache.first)
        with with_adapters(adapter_rows), self._prompted(cache, tokens, adapter), adding:
            return self.stack.run(hidden, view, positions, mask, part=part, long_factors=cache.long_factors)

    @torch.inference_mode()
    def decode(
        self, steps: Sequence[tuple[torch.Tensor, SpanCache]], adapters: Sequence[SpanAdapter | None] = ()
    ) -> list[torch.Tensor]:
        """One token for every row of several sessions, as one batch where the architecture allows it.

        Differs from separate `forward` calls in the last bits only.

        Args:
            steps: per session, float [its rows, 1, hidden size] and its cache; no cache twice.
            adapters: per session what changes the blocks for it, or None; empty: none has any.

        Returns:
            Per session what `forward` would return.

        Raises:
            ValueError: as `forward`; then no session has taken its step.
        """
        for hidden, cache in steps:
            self._check(hidden, cache)
            if hidden.shape[1] != 1:
                raise ValueError(f"a decode step takes one token for each row, not {hidden.shape[1]}")
        adapted = zip(steps, adapters or [None] * len(steps), strict=True)
        members = [Member(index, *step, adapter) for index, (step, adapter) in enumerate(adapted)]
        outputs: dict[int, torch.Tensor] = {}
        together: dict[object, list[Member]] = {}
        for member in members:
            wide = member.hidden.shape[2] != self.stack.width(member.cache.first)
            if wide or not self.supports_ragged or self._stands_apart(member.cache, member.adapter):
                outputs[member.index] = self.forward(member.hidden, member.cache, member.adapter)
            else:
                adapter = None if self._mixes_adapters else id(member.adapter)
                key = (self._part(member.cache), adapter, member.cache.positions is None)
                together.setdefault(key, []).append(member)
        for batch in together.values():
            try:
                outputs.update(self._decode_together(batch))
            except NotByRow:
                # No cache has advanced: keys and values are written again.
                self._mixes_adapters = False
                rest = self.decode([(one.hidden, one.cache) for one in batch], [one.adapter for one in batch])
                outputs.update(zip((member.index for member in batch), rest, strict=True))
        return [outputs[index] for index in range(len(steps))]

    def _decode_together(self, batch: list[Member]) -> dict[int, torch.Tensor]:
        batch = sorted(batch, key=lambda member: id(member.adapter))  # each adapter's rows stand together
        caches = [member.cache for member in batch]
        given = [member.hidden.to(self.device, self.dtype) for member in batch]
        output = self._run_together(batch, caches, given[0] if len(given) == 1 else torch.cat(given))
        for cache, entered in zip(caches, given, strict=True):
            cache.advance(1, entered)
        parts = zip(torch.split(output, [cache.batch for cache in caches]), batch, strict=True)
        return {member.index: part.to(member.hidden.device, member.hidden.dtype) for part, member in parts}

    def _run_together(self, batch: Sequence[Member], caches: Sequence[SpanCache], hidden: torch.Tensor) -> torch.Tensor:
        adapters = rows_of_adapters(batch)
        placed = caches[0].positions is not None  # as those of all others
        if self.step is not None and not placed and self.step.takes(caches, adapters):
            return self.step.run(hidden, caches, adapters)
        positions = torch.cat([cache.positions_of(1) for cache in caches], dim=1 if placed else 0)
        with with_adapters(adapters):
            view, part = RaggedView(caches), self._part(caches[0])
            output = self.stack.run(hidden, view, positions, ragged=True, part=part)
        view.part_states()
        return output

    def _suits(self, cache: SpanCache, adapter: SpanAdapter | None) -> bool:
        """Whether the next tokens are counted, get no prompts added, and are no padding, of which transformers makes
        something else than the exact kind: there a token of padding attends to itself."""
        known = cache.positions is None and (self.numerics.exact or cache.length >= max(cache.left_padding))
        return known and not self._among_prompts(cache, adapter)

    def _among_prompts(self, cache: SpanCache, adapter: SpanAdapter | None) -> bool:
        """Whether deep prompts are added to some of the next tokens."""
        return adapter is not None and cache.length - max(cache.left_padding) < adapter.prefix

    def _stands_apart(self, cache: SpanCache, adapter: SpanAdapter | None) -> bool:
        """Whether a session is not computed with others: what torch has to do for it is not done for exact ones."""
        exact = self.step if self.numerics.exact else None
        unknown = adapter is not None and exact is not None and not exact.knows(adapter)
        return unknown or cache.lacks_states or self._among_prompts(cache, adapter)

    def _prompted(self, cache: SpanCache, tokens: int, adapter: SpanAdapter | None) -> AbstractContextManager[None]:
        """The next tokens with deep prompts, where these have any for them and the session's blocks."""
        if adapter is None or not self._among_prompts(cache, adapter):
            return nullcontext()
        padding = torch.tensor(cache.left_padding, device=self.device).unsqueeze(1)
        places = torch.arange(cache.length, cache.length + tokens, device=self.device) - padding
        prompts = [
            (block - self.span.start, prompt)
            for block, prompt in adapter.prompts.items()
            if cache.first <= block - self.span.start < cache.first + len(cache.specs)
        ]
        return with_prompts(self.stack, prompts, places)

    def _part(self, cache: SpanCache) -> range | None:
        """The indices of the session's blocks within the span; None if it runs through all of them."""
        whole = len(cache.specs) == len(self.span)
        return None if whole else range(cache.first, cache.first + len(cache.specs))

    def _check(self, hidden: torch.Tensor, cache: SpanCache) -> None:
        width = self.stack.width(cache.first)
        widths = {1, 1 + max(self.features - self.span.start - cache.first, 0)}
        if hidden.dim() != 3 or hidden.shape[0] != cache.batch or hidden.shape[2] / width not in widths:
            raise ValueError(f"hidden states have shape {tuple(hidden.shape)}, not ({cache.batch}, tokens, {width})")
        if cache.length + hidden.shape[1] > cache.max_length or not hidden.shape[1]:
            raise ValueError(f"{hidden.shape[1]} more tokens do not fit: {cache.length} of {cache.max_length} are held")


@dataclass(frozen=True)
class Loading:
    """How blocks are loaded, as `load_span` has it; whether experts of few bits are left in files of petalnode's
    cache, and read when needed; and what is `known` of other blocks of the model that were loaded so."""

    device: str = "auto"
    dtype: str = "auto"
    quantisation: str = "none"
    kernels: Kernels = "torch"
    progress: Progress = no_progress
    experts_on_disk: bool = False
    known: Known = field(default_factory=Known)


def load_span(
    folder: Path,
    span: Span,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantisation: str = "none",
    kernels: Kernels = "torch",
    progress: Progress = no_progress,
) -> BlockSpan:
    """Loads blocks `span` of the model in `folder`, and nothing else of it.

    Weights of safetensors whose dtype is not changed stay memory-mapped on CPUs, and so do quantised ones. These are
    made block by block when they are wanted for the first time, and kept in petalnode's cache. Those of GGUF files are
    read into memory, in the bits of the file where the kernels compute.

    Args:
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16. Also what quantised blocks compute in.
        quantisation: none, int8 or nf4, of the linear layers; norms, biases and routers stay as they are. Or what a
            server announces (`Numerics`): with int8 activations these layers round what they multiply. Keys and values
            may be held in bfloat16 or int8.
        kernels: what computes a few rows on a CPU: torch, the compiled kernels (native), or the quicker one (auto).

    Raises:
        ModelError: the folder is no model, is damaged or incomplete, or its architecture cannot be cut.
        BadInput: the span lies outside the model; an unknown device, dtype or quantisation.
        MachineError: there is too little memory; the device is not there, or holds no quantised blocks; kernels that
            are not here; int8 activations, or keys and values of fewer bits, in another dtype than float32.
    """
    return load(folder, span, Loading(device, dtype, quantisation, kernels, progress))


@memory_needed("Loading blocks")
def load(folder: Path, span: Span, how: Loading) -> BlockSpan:
    """Loads blocks `span` of the model in `folder`, and nothing else of it. Raises as `load_span`; and MachineError if
    the disk has no room for the experts that are to be left there."""
    numerics, progress = Numerics.parse(how.quantisation), how.progress
    kernels: Kernels = "native" if numerics.exact else how.kernels
    quant, rounds = numerics.weights, numerics.activations == "int8"
    target = choose_device(how.device)
    if quant != "none" and target.type not in ("cpu", "cuda"):
        raise MachineError(f"--quant {quant} needs a CPU or a CUDA device, not {target.type}: add --device cpu")
    skeleton = open_skeleton(folder, how.dtype)
    if skeleton.dtype != torch.float32 and (rounds or numerics.cache != "auto"):
        kind = str(skeleton.dtype).removeprefix("torch.")
        wanted = "--activations int8" if rounds else f"--cache-dtype {numerics.cache}"
        raise MachineError(f"{wanted} computes in float32, not in {kind}: add --dtype float32")
    native = native_kernels(kernels, target, skeleton.dtype, exact=numerics.exact)
    num_blocks = skeleton.num_blocks
    if span.end > num_blocks:
        raise BadInput(f"{folder} has blocks 0:{num_blocks}, so {span} cannot be served")
    if refused := skeleton.boundaries.refusal(span):
        raise BadInput(refused)
    with Checkpoint(folder, num_blocks) as weights:
        windows = windows_of(skeleton)[span.start : span.end]
        blocks = skeleton.keep_only(span)
        there: set[str] = set()
        numbered = dict(zip(range(span.start, span.end), blocks, strict=True))
        if quant != "none":
            from .quantisation.quantiser import Quantiser

            tiled = {} if native is None else tiled_kinds(quant, blocks[0], always=kernels == "native", rounds=rounds)
            there = Quantiser(folder, weights, skeleton, target, quant, progress, tiled).replace(span, numbered)
        elif native is not None:
            packer = Packer(folder, weights, skeleton, kernels == "native", progress, rounds, how.experts_on_disk)
            there = packer.replace(span, numbered)
        fill(skeleton, weights, lambda block: block is not None and block in span, target, there)
    layers = layers_that_round(blocks) if rounds else []
    use_dots(blocks)
    use_recurrent_kernels(blocks, native)
    round_inputs(layers)
    cut_config(skeleton.config, span, num_blocks)
    stack = BlockStack(skeleton.decoder, blocks, skeleton.boundaries, span.start)
    specs = cache_specs(stack, skeleton, windows, target)
    loaded = BlockSpan(span, num_blocks, stack, specs, skeleton, target, numerics)
    # A chunk that attention stays within is no window that moves along, though its cache looks like one.
    chunked = getattr(skeleton.config, "attention_chunk_size", None) is not None
    one_by_one = chunked or stack.depends_on_length or any(spec.index_dim or spec.entries for spec in specs)
    loaded.supports_ragged = not one_by_one and agrees_with_single_steps(loaded, how.known)
    if native is not None and loaded.supports_ragged:
        loaded.step = find_step(loaded, skeleton.config, native, how.known, always=kernels == "native")
    how.known.note(loaded)
    if numerics.exact and loaded.step is None:
        raise MachineError(f"{EXACT} is not defined for blocks like those of {folder.name}: leave --exact out")
    if native is not None and loaded.step is None and not rounds:
        use_products(blocks, always=kernels == "native")
    return loaded
