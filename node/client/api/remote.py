"""The remote blocks of a model as a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn

from ....protocols.adapter import block_of
from ....protocols.ids import Span
from ....protocols.training import LoraName
from ..core import SwarmClient
from .autograd import RemotePass
from .inference_session import InferenceSession
from .runtime import TrioThread


@dataclass(frozen=True)
class Surroundings:
    """What the blocks of a model get beside hidden states; `prompts` and `lora` are for all blocks of the model.

    What enters each block is added to `entered`, if somebody wants it.
    """

    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    lora: Mapping[LoraName, torch.Tensor] = field(default_factory=dict)
    entered: list[torch.Tensor] | None = None


_NOTHING = Surroundings()
_AROUND: ContextVar[Surroundings] = ContextVar("surroundings", default=_NOTHING)


def around_here() -> Surroundings:
    """Those of the innermost `surroundings` that this thread is in."""
    return _AROUND.get()


@contextmanager
def surroundings(around: Surroundings) -> Iterator[None]:
    """Within it, remote blocks that are called in this thread without a mask of their own take this one."""
    token = _AROUND.set(around)
    try:
        yield
    finally:
        _AROUND.reset(token)


def changes_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Mapping[LoraName, torch.Tensor], torch.Tensor | None]:
    """The LoRA weights and deep prompts [blocks, 1, prefix, hidden] of an adapter's tensors."""
    lora = {name: each for key, each in tensors.items() if (name := LoraName.parse(key)) is not None}
    prompts = {block: each for key, each in tensors.items() if LoraName.parse(key) is None for block in [block_of(key)]}
    return lora, torch.stack([prompts[block] for block in range(len(prompts))]).unsqueeze(1) if prompts else None


class RemoteSequential(nn.Module):
    """Transformer blocks of a model that servers of the swarm hold.

    Called with hidden states [batch, tokens, hidden], it returns what the blocks make of them, without keeping any
    cache: the first token of each row is its first position. Gradients go back through it to the hidden states and to
    deep prompts; the blocks themselves have no parameters here and never change.

    `blocks[3:7]` is a part of them, and iterating gives them one by one: what is between two blocks can be looked at
    and changed, and a module of your own may stand there:

        hidden = blocks[:10](hidden)
        hidden = hidden + my_adapter(hidden)
        hidden = blocks[10:](hidden)

    A model runs with such a module if it is put in the place of its blocks:
    `model.remote_blocks = nn.Sequential(blocks[:10], MyAdapter(), blocks[10:])`.
    """

    def __init__(
        self, runtime: TrioThread[SwarmClient], span: Span, *, wait: bool = False, step_timeout: float | None = None
    ) -> None:
        super().__init__()
        self.span = span
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
        return RemoteSequential(self._runtime, span, wait=self._wait, step_timeout=self._step_timeout)

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[index] for index in range(len(self)))

    def extra_repr(self) -> str:
        return f"blocks {self.span}"

    def inference_session(self, max_length: int) -> InferenceSession:
        """A session through these blocks only; see `InferenceSession`."""
        return InferenceSession(self._runtime, self.span, max_length, wait=self._wait, step_timeout=self._step_timeout)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            hidden: float [batch, tokens, hidden]; float32, float16 or bfloat16, any device.
            attention_mask: [batch or 1, tokens], 0 at tokens that nothing attends to, wherever they are.
            position_ids: [batch or 1, tokens]; by default each row counts from 0, padding included, as the models of
                transformers do when they are called.
            prompts: deep prompts, float [len(self), 1 or batch, prefix, hidden]: those of a block are added to the
                first `prefix` positions of what enters it (Petals, NeurIPS 2023, appendix G).

        Returns:
            The same shape, dtype and device as `hidden`.

        Raises:
            BadInput: a shape, dtype or value that cannot be sent.
            SwarmError: no chain covers the blocks, or several servers failed.
        """
        around = _AROUND.get()
        lora = around.lora
        if prompts is None and around.prompts is not None:
            prompts = around.prompts[self.span.start : self.span.end]
        if not lora and prompts is None:
            lora, deep = changes_of(self._runtime.value.changes)
            prompts = None if deep is None else deep[self.span.start : self.span.end]
        run = RemotePass(
            self._runtime,
            self.span,
            around.mask if attention_mask is None else attention_mask,
            around.positions if position_ids is None else position_ids,
            timeout=self._step_timeout,
            wait=self._wait,
        )
        return run(hidden, prompts, {name: each for name, each in lora.items() if name.block in self.span})
