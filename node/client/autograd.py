"""Remote blocks as a function that PyTorch's autograd goes back through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...protocols.ids import Span
from ...protocols.tensor_header import TensorError
from ...protocols.tensors import decode, dtype_name, encode
from ...protocols.training import PROMPTS
from ..errors import BadInput, SwarmError
from .core import SwarmClient
from .runtime import TrioThread
from .training import BatchPass, MicroBatch, PassSpec
from .work_stream import KeptTensors, Packed, WorkSpec


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

    def __call__(self, hidden: torch.Tensor, prompts: torch.Tensor | None) -> torch.Tensor:
        """
        Raises:
            BadInput: shapes, dtypes or values that cannot be sent.
            SwarmError: no chain covers the blocks, or what went wrong there.
        """
        self._check(hidden, prompts)
        output: torch.Tensor = _Through.apply(self, hidden, prompts)
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
        self, hidden: torch.Tensor, prompts: torch.Tensor | None, gradients: bool
    ) -> tuple[torch.Tensor, BatchPass]:
        """What the blocks make of it, and what a backward pass starts from."""
        pool = self.runtime.value.works
        try:
            works = WorkSpec(self.runtime.value.model.version, self.codec, dtype_name(hidden.dtype))
        except TensorError as error:
            raise BadInput(str(error)) from None
        rows, tokens = hidden.shape[:2]

        async def plan() -> Any:
            width = hidden.shape[2] * hidden.element_size()
            return await pool.plan(self.span, rows, tokens, width, gradients=gradients, wait=self.wait)

        planned = self.runtime.call(plan)
        _check_finite(hidden, "the hidden states")
        kept = None
        if prompts is not None:
            _check_finite(prompts, "the prompts")
            kept = _KeptPrompts(self.span, prompts.detach().to("cpu", copy=True))
        spec = PassSpec(
            self.span,
            works,
            kept,
            kept_by_row=prompts is not None and prompts.shape[1] > 1,
            timeout=self.timeout,
            wait=self.wait,
        )
        parts = [self._part(hidden, start, planned.rows) for start in range(0, rows, planned.rows)]
        batch = BatchPass(pool, spec, parts, planned.chains)
        return _joined(self.runtime.call(batch.forward)).to(hidden.device), batch

    def _part(self, hidden: torch.Tensor, start: int, count: int) -> MicroBatch:
        rows = slice(start, min(start + count, hidden.shape[0]))
        mask, positions = b"", ()
        if self.mask is not None:
            mask = _bits(_of_rows(self.mask, rows, hidden).bool())
        if self.positions is not None:
            positions = tuple(_of_rows(self.positions, rows, hidden).flatten().tolist())
            if positions == tuple(range(hidden.shape[1])) * (rows.stop - rows.start):
                positions = ()
        return MicroBatch(rows, Packed(*encode(hidden[rows], self.codec)), mask, positions)

    def backward(
        self, batch: BatchPass, gradient: torch.Tensor, prompts: torch.Size | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients with respect to the hidden states, and to prompts of that shape."""
        _check_finite(gradient, "the gradients that come from the loss")
        found = self.runtime.call(
            batch.backward, [Packed(*encode(gradient[part.rows], self.codec)) for part in batch.parts]
        )
        hidden = _joined([each.hidden for each in found]).to(gradient.device)
        if prompts is None:
            return hidden, None
        total = torch.zeros(prompts)
        for part, each in zip(batch.parts, found, strict=True):
            rows = part.rows if prompts[1] > 1 else slice(None)
            for span, (chunk,) in each.kept:
                blocks = slice(span.start - self.span.start, span.end - self.span.start)
                total[blocks, rows] += decode(chunk.tensor, chunk.payload)
        return hidden, total


class _Through(torch.autograd.Function):
    """A `RemotePass` in the graph. Its backward may run in any thread."""

    @staticmethod
    def forward(ctx: Any, run: RemotePass, hidden: torch.Tensor, prompts: torch.Tensor | None) -> torch.Tensor:
        output, batch = run.forward(hidden, prompts, any(ctx.needs_input_grad))
        ctx.run, ctx.batch = run, batch
        ctx.prompts = None if prompts is None else (prompts.shape, prompts.dtype, prompts.device)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shape, dtype, device = ctx.prompts or (None, None, None)
        hidden, prompts = ctx.run.backward(ctx.batch, gradient, shape)
        return None, hidden, None if prompts is None else prompts.to(device, dtype)


@dataclass(frozen=True)
class _KeptPrompts:
    """Cuts deep prompts [blocks of the span, 1 or rows, prefix, hidden] for servers of some of the blocks."""

    span: Span
    prompts: torch.Tensor

    def __call__(self, span: Span, rows: slice) -> KeptTensors:
        cut = self.prompts[span.start - self.span.start : span.end - self.span.start]
        return KeptTensors.of([PROMPTS], [Packed(*encode(cut[:, rows] if cut.shape[1] > 1 else cut, "none"))])


def _of_rows(given: torch.Tensor, rows: slice, hidden: torch.Tensor) -> torch.Tensor:
    return given.expand(hidden.shape[0], -1)[rows].cpu()


def _bits(mask: torch.Tensor) -> bytes:
    """A bit for each value, row by row; none if all are true."""
    if bool(mask.all()):
        return b""
    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8)
    return bytes((flat * weights).sum(1).tolist())


def _joined(chunks: list[Packed]) -> torch.Tensor:
    try:
        parts = [decode(chunk.tensor, chunk.payload) for chunk in chunks]
    except TensorError as error:
        raise SwarmError(f"a server answered with something that is no tensor: {error}") from None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"{what} hold NaN or infinity: no server would take them. Is the learning rate too high?")
