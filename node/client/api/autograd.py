"""Remote blocks as a function that PyTorch's autograd goes back through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ....protocols.framing import TensorError
from ....protocols.ids import Span
from ....protocols.tensors import decode, dtype_name, encode
from ....protocols.training import PROMPTS, LoraName
from ...errors import BadInput, SwarmError
from ..batch.batch_pass import BatchPass, MicroBatch, PassSpec
from ..batch.batch_stream import BatchSpec, KeptTensors
from ..core import SwarmClient
from ..request import WireTensor
from .runtime import TrioThread


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
        """
        Raises:
            BadInput: shapes, dtypes or values that cannot be sent.
            SwarmError: no chain covers the blocks, or what went wrong there.
        """
        self._check(hidden, prompts)
        kept: dict[str, torch.Tensor] = {str(name): tensor for name, tensor in lora.items()}
        if prompts is not None:
            kept[PROMPTS] = prompts
        gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (hidden, *kept.values()))
        output: torch.Tensor = _Through.apply(self, gradients, tuple(kept), hidden, *kept.values())
        return output

    def _check(self, hidden: torch.Tensor, prompts: torch.Tensor | None) -> None:
        width = self.runtime.value.model.folder.hidden_size
        if hidden.dim() != 3 or not hidden.numel() or hidden.shape[2] != width:
            raise BadInput(f"hidden states have shape [batch, tokens, {width}], not {list(hidden.shape)}")
        rows, tokens = hidden.shape[:2]
        for name, given in (("attention mask", self.mask), ("position_ids", self.positions)):
            if given is not None and (given.dim() != 2 or given.shape[0] not in (1, rows) or given.shape[1] != tokens):
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
            or prompts.shape[3] != width
        ):
            raise BadInput(
                f"deep prompts have shape [{len(self.span)} blocks, 1 or {rows}, up to {tokens} tokens, {width}], "
                f"not {list(prompts.shape)}"
            )

    def forward(
        self, hidden: torch.Tensor, kept: Mapping[str, torch.Tensor], gradients: bool
    ) -> tuple[torch.Tensor, BatchPass]:
        """What the blocks make of it, and what a backward pass starts from, if there are to be gradients."""
        pool = self.runtime.value.batches
        try:
            works = BatchSpec(self.runtime.value.model.version, self.codec, dtype_name(hidden.dtype))
            for tensor in kept.values():
                dtype_name(tensor.dtype)
        except TensorError as error:
            raise BadInput(str(error)) from None
        rows, tokens = hidden.shape[:2]

        async def plan() -> Any:
            width = hidden.shape[2] * hidden.element_size()
            return await pool.plan(self.span, rows, tokens, width, gradients=gradients, wait=self.wait)

        planned = self.runtime.call(plan)
        _check_finite(hidden, "the hidden states")
        for name, tensor in kept.items():
            _check_finite(tensor, "the prompts" if name == PROMPTS else f"the weights {name}")
        prompts = kept.get(PROMPTS)
        spec = PassSpec(
            self.span,
            works,
            Cut(self.span, {name: each.detach().to("cpu", copy=True) for name, each in kept.items()}) if kept else None,
            kept_by_row=prompts is not None and prompts.shape[1] > 1,
            timeout=self.timeout,
            wait=self.wait,
        )
        ends = accumulate(planned.rows)
        parts = [self._part(hidden, slice(end - count, end)) for end, count in zip(ends, planned.rows, strict=True)]
        batch = BatchPass(pool, spec, parts, planned.chains)
        return _joined(self.runtime.call(batch.forward)).to(hidden.device), batch

    def _part(self, hidden: torch.Tensor, rows: slice) -> MicroBatch:
        mask, positions = b"", ()
        if self.mask is not None:
            mask = _bits(_of_rows(self.mask, rows, hidden).bool())
        if self.positions is not None:
            positions = tuple(_of_rows(self.positions, rows, hidden).flatten().tolist())
            if positions == tuple(range(hidden.shape[1])) * (rows.stop - rows.start):
                positions = ()
        return MicroBatch(rows, WireTensor(*encode(hidden[rows], self.codec)), mask, positions)

    def backward(
        self, batch: BatchPass, gradient: torch.Tensor, kept: Mapping[str, torch.Size]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients with respect to the hidden states, and to what servers kept, of these shapes."""
        _check_finite(gradient, "the gradients that come from the loss")
        found = self.runtime.call(
            batch.backward, [WireTensor(*encode(gradient[part.rows], self.codec)) for part in batch.parts]
        )
        hidden = _joined([each.hidden for each in found]).to(gradient.device)
        totals = {name: torch.zeros(shape) for name, shape in kept.items()}
        for part, each in zip(batch.parts, found, strict=True):
            for span, gradients in each.kept:
                for name, packed in gradients.items():
                    total = totals[name]
                    if name == PROMPTS:
                        rows = part.rows if total.shape[1] > 1 else slice(None)
                        total = total[span.start - self.span.start : span.end - self.span.start, rows]
                    total += decode(packed.tensor, packed.payload)
        return hidden, list(totals.values())


class _Through(torch.autograd.Function):
    """A `RemotePass` in the graph. Its backward may run in any thread."""

    @staticmethod
    def forward(
        ctx: Any, run: RemotePass, gradients: bool, names: tuple[str, ...], hidden: torch.Tensor, *kept: torch.Tensor
    ) -> torch.Tensor:
        output, batch = run.forward(hidden, dict(zip(names, kept, strict=True)), gradients)
        ctx.run, ctx.batch = run, batch
        ctx.shapes = {name: each.shape for name, each in zip(names, kept, strict=True)}
        ctx.kinds = [(each.device, each.dtype) for each in kept]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, kept = ctx.run.backward(ctx.batch, gradient, ctx.shapes)
        return None, None, None, hidden, *(each.to(*kind) for each, kind in zip(kept, ctx.kinds, strict=True))


@dataclass(frozen=True)
class Cut:
    """Cuts what is to be kept for servers of some of the blocks: deep prompts, and what changes their layers."""

    span: Span
    tensors: Mapping[str, torch.Tensor]

    def __call__(self, span: Span, rows: slice) -> KeptTensors | None:
        cut: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if name == PROMPTS:
                blocks = tensor[span.start - self.span.start : span.end - self.span.start]
                cut[name] = blocks[:, rows] if blocks.shape[1] > 1 else blocks
            elif (parsed := LoraName.parse(name)) is not None and parsed.block in span:
                cut[name] = tensor
        if not cut:
            return None
        return KeptTensors.of(list(cut), [WireTensor(*encode(tensor, "none")) for tensor in cut.values()])


def _of_rows(given: torch.Tensor, rows: slice, hidden: torch.Tensor) -> torch.Tensor:
    return given.expand(hidden.shape[0], -1)[rows].cpu()


def _bits(mask: torch.Tensor) -> bytes:
    """A bit for each value, row by row; none if all are true."""
    if bool(mask.all()):
        return b""
    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8)
    return bytes((flat * weights).sum(1).tolist())


def _joined(chunks: list[WireTensor]) -> torch.Tensor:
    try:
        parts = [decode(chunk.tensor, chunk.payload) for chunk in chunks]
    except TensorError as error:
        raise SwarmError(f"a server answered with something that is no tensor: {error}") from None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"{what} hold NaN or infinity: no server would take them. Is the learning rate too high?")
