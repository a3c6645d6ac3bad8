"""The remote blocks of a model as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...protocols.ids import Span
from ..errors import BadInput
from .core import SwarmClient
from .inference_session import InferenceSession
from .runtime import TrioThread


class RemoteSequential(nn.Module):
    """Transformer blocks of a model that servers of the swarm hold; `blocks[3:7]` is a part of them.

    Called with hidden states [batch, tokens, hidden], it returns what the blocks make of them, without keeping any
    cache: the first token of each row is its first position.
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

    def extra_repr(self) -> str:
        return f"blocks {self.span}"

    def inference_session(self, max_length: int) -> InferenceSession:
        """A session through these blocks only; see `InferenceSession`."""
        return InferenceSession(self._runtime, self.span, max_length, wait=self._wait, step_timeout=self._step_timeout)

    def forward(self, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        """
        Args:
            hidden: float [batch, tokens, hidden].

        Raises:
            BadInput: a shape that is not that, or gradients are wanted.
            SwarmError: no chain covers the blocks, or a server failed.
        """
        if hidden.dim() != 3:
            raise BadInput(f"hidden states have shape [batch, tokens, hidden], not {list(hidden.shape)}")
        with self.inference_session(hidden.shape[1]) as session:
            return session.step(hidden)
