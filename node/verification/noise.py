"""Noise in place of the roundings of another processor, by which a judge finds out what depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ..blocks.span import BlockSpan


@dataclass(frozen=True)
class NoiseSizes:
    """How large the noise is, beside the size that is asked for."""

    zero: float = 1e-30
    """Values up to this may be zero on another processor: their products with scales of quantised weights are
    subnormal."""
    tie: float = 4.0  # Of the scores by which experts are chosen, as a multiple of that of all blocks together
    probability: float = 3.0  # Relative noise of a score that is a probability, for a relative noise of 1 of the logits


NOISE: Final = NoiseSizes()


class Noise(TorchFunctionMode):
    """Noise in place of the roundings of another processor, while this context is entered.

    What enters each block, and what leaves the last one, changes by normally distributed noise. Its relative size is
    `size` (of the value, or of the token's mean absolute value where that is more; at least what a processor may take
    for zero). Scores by which `torch.topk` chooses experts change as much as all blocks together would make them,
    several times; only the choice changes, and not the scores.

    Args:
        pair: which of the pairs; decides which experts are raised and which are lowered.
        sign: 1 or -1, of the whole noise.
    """

    def __init__(self, size: float, blocks: int, seed: int, pair: int, sign: int) -> None:
        super().__init__()
        self._size = size
        self._choice = NOISE.tie * size * blocks**0.5
        self._pair = pair
        self._sign = sign
        self._generator = torch.Generator().manual_seed(seed)

    def added(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, float [..., hidden size], with noise."""
        exact = tensor.to("cpu", torch.float64)
        values = exact.detach().abs()
        scale = torch.maximum(values, values.mean(-1, keepdim=True)) * self._size
        scale = scale.clamp(min=max(NOISE.zero, torch.finfo(tensor.dtype).tiny))
        noise = torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)
        return (exact + self._sign * scale * noise).to(tensor.device, tensor.dtype)

    @contextmanager
    def within(self, loaded: BlockSpan) -> Iterator[None]:
        """Adds the noise to what enters these blocks."""

        def enter(block: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if loaded.stack.is_idle(block):  # a pass runs one block at a time, and all others hand on what they get
                return given, named
            if given:
                return (self.added(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": self.added(named["hidden_states"])}

        with ExitStack() as stack:
            for block in loaded.stack.blocks:
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.enter_context(self)
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **named)
        scores = args[0] if args else named.pop("input")
        axis = args[2] if len(args) > 2 else named.get("dim", -1)
        chosen = func(self._shaken(scores, axis), *args[1:], **named).indices
        return torch.return_types.topk((scores.gather(axis, chosen), chosen))

    def _shaken(self, scores: torch.Tensor, axis: int) -> torch.Tensor:
        exact = scores.detach().to("cpu", torch.float64).movedim(axis, -1)
        if float(exact.min()) >= 0.0 and float(exact.max()) <= 1.0:
            scale = NOISE.probability * exact
        else:
            finite = torch.where(torch.isfinite(exact), exact, 0.0)
            scale = finite.std(-1, correction=0, keepdim=True).expand(exact.shape)
        raised = torch.arange(exact.shape[-1]) >> self._pair & 1
        turned = torch.randint(0, 2, (*exact.shape[:-1], 1), generator=self._generator)  # so that ties combine
        signs = self._sign * (1 - 2 * (raised ^ turned))
        shaken: torch.Tensor = exact + signs * self._choice * scale
        return shaken.movedim(-1, axis).to(scores.device)
