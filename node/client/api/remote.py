"""The remote blocks of a model as a PyTorch module, and how autograd passes through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import block_of
from ....protocols.framing import TensorError
from ....protocols.ids import Span
from ....protocols.tensors import decode, dtype_name, encode
from ....protocols.training import PROMPTS, KeptSet, LoraName, MicroBatch
from ...errors import BadInput
from ..batch.batch_pass import BatchPass, PassSpec
from ..batch.batch_stream import BatchSpec, micro_batch
from ..chunks import from_chunks
from ..core import SwarmClient
from ..request import WireTensor
from ..session.stream import SessionSpec
from ..session_adapter import SessionAdapter
from .inference_session import InferenceSession
from .runtime import TrioThread


@dataclass(frozen=True)
class ForwardContext:
    """What remote blocks are called with beside hidden states, in one thread.

    Attributes:
        mask: [batch or 1, tokens], as the `attention_mask` of `RemoteSequential.forward`.
        positions: [batch or 1, tokens], or of three axes of those, as its `position_ids`.
        prompts: deep prompts of all blocks of the model, [blocks, 1 or batch, prefix, hidden].
        lora: LoRA weights of all blocks of the model.
        block_inputs: if not None, the input of each block is appended to it.
    """

    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    lora: Mapping[LoraName, torch.Tensor] = field(default_factory=dict)
    block_inputs: list[torch.Tensor] | None = None


_EMPTY: Final = ForwardContext()
_CONTEXT: ContextVar[ForwardContext] = ContextVar("forward_context", default=_EMPTY)


def forward_context() -> ForwardContext:
    """The context of the innermost `within` of this thread."""
    return _CONTEXT.get()


@contextmanager
def within(context: ForwardContext) -> Iterator[None]:
    """For the length of the block, remote blocks that this thread calls take what `context` gives."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def changes_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[LoraName, torch.Tensor], torch.Tensor | None]:
    """The LoRA weights and deep prompts [blocks, 1, prefix, hidden] of an adapter's tensors."""
    lora = {name: tensor for key, tensor in tensors.items() if (name := LoraName.parse(key)) is not None}
    prompts = {block_of(key): tensor for key, tensor in tensors.items() if LoraName.parse(key) is None}
    return lora, torch.stack([prompts[block] for block in range(len(prompts))]).unsqueeze(1) if prompts else None


class RemoteSequential(nn.Module):
    """Transformer blocks of a model that servers of the swarm hold.

    Maps hidden states [batch, tokens, hidden] to the same shape without a cache: the first token of each row is at
    position 0. Gradients pass through it to the hidden states and to deep prompts; the blocks have no parameters here
    and never change.

    `blocks[3:7]` is a part of them, and iterating gives them one by one. So a module of your own can read and change
    the hidden states between two blocks:

        hidden = blocks[:10](hidden)
        hidden = hidden + my_adapter(hidden)
        hidden = blocks[10:](hidden)

    To run a whole model with such a module, assign it:
    `model.remote_blocks = nn.Sequential(blocks[:10], MyAdapter(), blocks[10:])`.
    """

    def __init__(
        self,
        runtime: TrioThread[SwarmClient],
        span: Span,
        *,
        wait: bool = False,
        step_timeout: float | None = None,
        codec: str = "none",
    ) -> None:
        super().__init__()
        self.span = span
        self._codec = codec
        self._runtime = runtime
        self._wait = wait
        self._step_timeout = step_timeout

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        blocks = range(self.span.start, self.span.end)[index]
        if isinstance(blocks, int):
            span = Span(blocks, blocks + 1)
        elif not blocks or blocks.step != 1:
            raise IndexError("a slice of blocks takes one or more of them in their order")
        else:
            span = Span(blocks.start, blocks.stop)
        return RemoteSequential(
            self._runtime, span, wait=self._wait, step_timeout=self._step_timeout, codec=self._codec
        )

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[index] for index in range(len(self)))

    def extra_repr(self) -> str:
        return f"blocks {self.span}"

    def inference_session(
        self,
        max_length: int,
        *,
        adapter: SessionAdapter | None = None,
    ) -> InferenceSession:
        """A session through these blocks, for up to `max_length` tokens per row; see `InferenceSession`."""
        return InferenceSession(
            self._runtime,
            self.span,
            max_length,
            wait=self._wait,
            step_timeout=self._step_timeout,
            adapter=adapter,
        )

    def stages(self, rows: int, length: int) -> tuple[list[float], float]:
        """As `ServerSelection.stages`, for a session of `rows` rows with `length` tokens each."""
        spec = SessionSpec(b"", self.span, rows, length)
        step_seconds, trip_seconds = self._runtime.call(self._runtime.value.stages, spec)
        return step_seconds, trip_seconds

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the blocks on hidden states.

        Args:
            hidden: float [batch, tokens, hidden]; float32, float16 or bfloat16, any device.
            attention_mask: [batch or 1, tokens], 0 at tokens that no other token attends to.
            position_ids: [batch or 1, tokens], or [3, batch or 1, tokens] where positions have three axes (M-RoPE). By
                default each row counts from 0, padding included, as the models of transformers do when they are called.
            prompts: deep prompts, float [len(self), 1 or batch, prefix, hidden]. They are added to the input of each
                block at its first `prefix` positions (Petals, NeurIPS 2023, appendix G).

        Returns:
            The same shape, dtype and device as `hidden`.

        Raises:
            BadInput: a shape, dtype or value that cannot be sent.
            SwarmError: no chain covers the blocks, or several servers failed.
        """
        context = forward_context()
        lora = context.lora
        if prompts is None and context.prompts is not None:
            prompts = context.prompts[self.span.start : self.span.end]
        if not lora and prompts is None:
            lora, deep = changes_of(self._runtime.value.changes)
            prompts = None if deep is None else deep[self.span.start : self.span.end]
        run = RemotePass(
            self._runtime,
            self.span,
            context.mask if attention_mask is None else attention_mask,
            context.positions if position_ids is None else position_ids,
            codec=self._codec,
            timeout=self._step_timeout,
            wait=self._wait,
        )
        return run(hidden, prompts, {name: weight for name, weight in lora.items() if name.block in self.span})


@dataclass(frozen=True)
class RemotePass:
    """Blocks `span` of the swarm's model for one batch; see `RemoteSequential.forward`."""

    runtime: TrioThread[SwarmClient]
    span: Span
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    codec: str = "none"
    timeout: float | None = None
    wait: bool = False

    def __call__(
        self, hidden: torch.Tensor, prompts: torch.Tensor | None, lora: Mapping[LoraName, torch.Tensor]
    ) -> torch.Tensor:
        """The output of the blocks for `hidden` [batch, tokens, hidden], of the same shape; part of the autograd graph.

        Raises:
            BadInput: shapes, dtypes or values that cannot be sent.
            SwarmError: no chain covers the blocks, or servers failed.
        """
        self._check(hidden, prompts)
        kept: dict[str, torch.Tensor] = {str(name): tensor for name, tensor in lora.items()}
        if prompts is not None:
            kept[PROMPTS] = prompts
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *kept.values()))
        return _apply(self, gradients, tuple(kept), hidden, *kept.values())

    def _check(self, hidden: torch.Tensor, prompts: torch.Tensor | None) -> None:
        boundaries = self.runtime.value.model.folder.boundaries
        width = boundaries.width(self.span.start)
        if refused := boundaries.refusal(self.span):
            raise BadInput(refused)
        if hidden.dim() != 3 or not hidden.numel() or hidden.shape[2] != width:
            raise BadInput(f"hidden states have shape [batch, tokens, {width}], not {list(hidden.shape)}")
        rows, tokens = hidden.shape[:2]
        for name, given in (("attention mask", self.mask), ("position_ids", self.positions)):
            if given is None:
                continue
            if given.dim() not in (2, 3) or given.shape[-2] not in (1, rows) or given.shape[-1] != tokens:
                raise BadInput(f"{name} of {list(given.shape)} for hidden states of {rows} x {tokens} tokens")
        if self.mask is not None and not self.mask.bool().any(1).all():
            raise BadInput("a row of the attention mask hides all of its tokens")
        if prompts is None:
            return
        if (
            prompts.dim() != 4
            or prompts.shape[0] != len(self.span)
            or prompts.shape[1] not in (1, rows)
            or not 1 <= prompts.shape[2] <= tokens
            or prompts.shape[3] != boundaries.hidden
        ):
            raise BadInput(
                f"deep prompts have shape [{len(self.span)} blocks, 1 or {rows}, up to {tokens} tokens, "
                f"{boundaries.hidden}], not {list(prompts.shape)}"
            )

    def forward(
        self, hidden: torch.Tensor, kept: Mapping[str, torch.Tensor], gradients: bool
    ) -> tuple[torch.Tensor, BatchPass]:
        """The output of the blocks, and the batch that a backward pass starts from."""
        client = self.runtime.value.batches
        try:
            model = self.runtime.value.model
            batch_spec = BatchSpec(model.version, self.codec, dtype_name(hidden.dtype), model.folder.boundaries)
            for tensor in kept.values():
                dtype_name(tensor.dtype)
        except TensorError as error:
            raise BadInput(str(error)) from None
        rows, tokens = hidden.shape[:2]
        width = hidden.shape[2] * hidden.element_size()
        plan = partial(client.plan, gradients=gradients, wait=self.wait)
        planned = self.runtime.call(plan, self.span, rows, tokens, width)
        _check_finite(hidden, "the hidden states")
        for name, tensor in kept.items():
            _check_finite(tensor, "the prompts" if name == PROMPTS else f"the weights {name}")
        prompts = kept.get(PROMPTS)
        spec = PassSpec(
            self.span,
            batch_spec,
            SpanTensors(self.span, {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()})
            if kept
            else None,
            kept_by_row=prompts is not None and prompts.shape[1] > 1,
            timeout=self.timeout,
            wait=self.wait,
        )
        ends = accumulate(planned.rows)
        cuts = [slice(end - count, end) for end, count in zip(ends, planned.rows, strict=True)]
        batch = BatchPass(client, spec, [self._part(hidden, rows) for rows in cuts], cuts, planned.chains)
        return from_chunks(self.runtime.call(batch.forward), dim=0).to(hidden.device), batch

    def _part(self, hidden: torch.Tensor, rows: slice) -> MicroBatch:
        mask: bytes = b""
        positions: tuple[int, ...] = ()
        if self.positions is not None:
            of_rows = _of_rows(self.positions, rows, hidden)
            positions = tuple(of_rows.flatten().tolist())
            if positions == tuple(range(hidden.shape[1])) * (of_rows.numel() // hidden.shape[1]):
                positions = ()
        if self.mask is not None:
            seen = _of_rows(self.mask, rows, hidden).bool()
            # Without a mask, transformers takes positions that begin anew for several texts in one row.
            mask = _bits(seen) if positions or not bool(seen.all()) else b""
        return micro_batch([WireTensor(*encode(hidden[rows], self.codec))], mask=mask, positions=positions)

    def backward(
        self, batch: BatchPass, gradient: torch.Tensor, kept: Mapping[str, torch.Size]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients with respect to the hidden states and to the prompts and LoRA weights, which have these shapes."""
        _check_finite(gradient, "the gradients that come from the loss")
        scale = gradient_scale(gradient) if self.codec != "none" else 1.0
        scaled = gradient * scale
        found = self.runtime.call(
            batch.backward, [WireTensor(*encode(scaled[rows], self.codec)) for rows in batch.rows]
        )
        hidden = from_chunks([gradients.hidden for gradients in found], dim=0).to(gradient.device) / scale
        totals = {name: torch.zeros(shape) for name, shape in kept.items()}
        for part, gradients in zip(batch.rows, found, strict=True):
            for span, tensors in gradients.kept:
                for name, packed in tensors.items():
                    total = totals[name]
                    if name == PROMPTS:
                        rows = part if total.shape[1] > 1 else slice(None)
                        total = total[span.start - self.span.start : span.end - self.span.start, rows]
                    total += decode(packed.tensor, packed.payload) / scale
        return hidden, list(totals.values())


def gradient_scale(gradient: torch.Tensor) -> float:
    """A power of two that brings the largest value of a gradient to 16 to 32. As it comes from the loss, most of it is
    below what float16 can hold. Blocks of int8 have their scales in float16, too. Backward passes of blocks are linear,
    so the results are divided by it exactly. This is loss scaling (Micikevicius et al. 2018, section 3.2), for each
    pass anew."""
    largest = float(gradient.detach().abs().amax())
    return 2.0 ** min(5 - math.frexp(largest)[1], 126) if largest > 0 else 1.0  # more is infinite in float32


class _RemoteFunction(torch.autograd.Function):
    """A `RemotePass` in the graph. Its backward may run in any thread."""

    @staticmethod
    def forward(
        ctx: Any, run: RemotePass, gradients: bool, names: tuple[str, ...], hidden: torch.Tensor, *kept: torch.Tensor
    ) -> torch.Tensor:
        output, batch = run.forward(hidden, dict(zip(names, kept, strict=True)), gradients)
        ctx.run, ctx.batch = run, batch
        ctx.shapes = {name: tensor.shape for name, tensor in zip(names, kept, strict=True)}
        ctx.kinds = [(tensor.device, tensor.dtype) for tensor in kept]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, kept = ctx.run.backward(ctx.batch, gradient, ctx.shapes)
        return None, None, None, hidden, *(total.to(*kind) for total, kind in zip(kept, ctx.kinds, strict=True))


_apply: Final[Callable[..., torch.Tensor]] = _RemoteFunction.apply


@dataclass(frozen=True)
class SpanTensors:
    """Deep prompts and LoRA weights of the blocks of `span`. Called, it gives those for a server of some of them."""

    span: Span
    tensors: Mapping[str, torch.Tensor]

    def __call__(self, span: Span, rows: slice) -> KeptSet | None:
        cut: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if name == PROMPTS:
                blocks = tensor[span.start - self.span.start : span.end - self.span.start]
                cut[name] = blocks[:, rows] if blocks.shape[1] > 1 else blocks
            elif (parsed := LoraName.parse(name)) is not None and parsed.block in span:
                cut[name] = tensor
        if not cut:
            return None
        headers, payloads = zip(*(encode(tensor, "none") for tensor in cut.values()), strict=True)
        return KeptSet.of(wire.Keep(names=list(cut), tensors=headers), payloads)


def _of_rows(given: torch.Tensor, rows: slice, hidden: torch.Tensor) -> torch.Tensor:
    return given.expand(*given.shape[:-2], hidden.shape[0], -1)[..., rows, :].cpu()


def _bits(mask: torch.Tensor) -> bytes:
    """One bit per value, row by row."""
    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8)
    return bytes((flat * weights).sum(1).tolist())


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"{what} hold NaN or infinity, which servers refuse. Is the learning rate too high?")
