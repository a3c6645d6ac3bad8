"""A span that is cut into parts, each on its own device with its kernels, caches and states.

Hidden states go from part to part, as between servers, but without a codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...protocols.ids import Layout, Span
from ...protocols.training import LoraName
from .cache import SpanCache
from .caches.states import HeldTokens
from .span import BlockSpan
from .span_adapter import SpanAdapter


class SplitCache(SpanCache):
    """The caches of one session on several devices, as a server uses them: all hold the same tokens.

    Attributes:
        numbered: by their numbers, those of the parts of the span that the session runs through.
        parts: the same without the numbers.
    """

    def __init__(self, numbered: Mapping[int, SpanCache]) -> None:
        self.numbered, self.parts = numbered, tuple(numbered.values())
        one = self.parts[0]
        super().__init__((), one.batch, one.max_length, one.form, one.memory.device, one.left_padding)
        self.specs = tuple(spec for part in self.parts for spec in part.specs)
        self.nbytes = sum(part.nbytes for part in self.parts)

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    def read(self, start: int, end: int) -> Sequence[HeldTokens]:
        return [held for part in self.parts for held in part.read(start, end)]

    def restore(self, parts: Sequence[Sequence[HeldTokens]], tokens: int) -> None:
        for number, own in enumerate(self.parts):
            own.restore([part[number : number + 1] for part in parts], tokens)
        self.length = self.parts[0].length

    def begin_step(self, tokens: int) -> None:
        for part in self.parts:
            part.begin_step(tokens)

    def place(self, tokens: int, layout: Layout) -> None:
        for part in self.parts:
            part.place(tokens, layout)

    def whole_groups(self, tokens: int) -> int:
        return min(part.whole_groups(tokens) for part in self.parts)

    def rollback(self, length: int) -> None:
        """As that of `SpanCache`, but that after `StatesLost` it can only be freed."""
        for part in self.parts:
            part.rollback(length)
        self.length = length

    def reorder(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.reorder(rows)
        self.left_padding = self.parts[0].left_padding

    def free(self) -> None:
        super().free()
        for part in self.parts:
            part.free()


@dataclass(frozen=True, eq=False)
class SplitAdapter(SpanAdapter):
    """An adapter on several devices: for each part of the span what it changes there, None for nothing."""

    parts: tuple[SpanAdapter | None, ...] = ()


class SplitSpan(BlockSpan):
    """`parts`, which follow each other, as one span. Hidden states enter and leave it on the device of the first one.

    `stack` is that of the first part, which knows what enters the span.
    """

    def __init__(self, parts: Sequence[BlockSpan]) -> None:
        first = parts[0]
        self._parts = tuple(parts)
        self.span, self.num_blocks = Span(first.span.start, parts[-1].span.end), first.num_blocks
        self.hidden_size, self.features, self.stack, self.step = first.hidden_size, first.features, first.stack, None
        self.dtype, self.device, self.numerics = first.dtype, first.device, first.numerics
        self.specs = tuple(spec for part in parts for spec in part.specs)
        self.keeps_states = any(part.keeps_states for part in parts)
        self.cache_bytes_per_token = sum(part.cache_bytes_per_token for part in parts)
        self.max_positions, self.takes_groups = first.max_positions, first.takes_groups
        self.supports_ragged = all(part.supports_ragged for part in parts)
        self.linears = {block: linears for part in parts for block, linears in part.linears.items()}

    @property
    def parts(self) -> tuple[BlockSpan, ...]:
        return self._parts

    def make_cache(
        self, batch: int, max_length: int, left_padding: Sequence[int] | None = None, part: Span | None = None
    ) -> SplitCache:
        wanted = part or self.span
        if not self.span.covers(wanted):
            raise ValueError(f"blocks {wanted} are wanted, {self.span} are here")
        caches = {}
        for number, own in enumerate(self.parts):
            if own.span.overlaps(wanted):
                common = Span(max(own.span.start, wanted.start), min(own.span.end, wanted.end))
                caches[number] = own.make_cache(batch, max_length, left_padding, common)
        return SplitCache(caches)

    def cache_tokens(self, batch: int, max_length: int) -> int:
        """What a session reserves: as much as on the device where it takes the most of what a token takes there. So
        whoever has room for these tokens on each device has room for all sessions on all."""
        return max(part.cache_tokens(batch, max_length) for part in self.parts)

    def make_adapter(self, tensors: Mapping[str, torch.Tensor]) -> SplitAdapter:
        made = []
        for part in self.parts:
            own = part.make_adapter({key: tensor for key, tensor in tensors.items() if _block(key) in part.span})
            made.append(own if own.pairs or own.prompts else None)
        return SplitAdapter((), {}, tuple(made))

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, cache: SpanCache, adapter: SpanAdapter | None = None) -> torch.Tensor:
        given = hidden
        with _step_of([cache], hidden.shape[1]):
            for number, own in _numbered(cache).items():
                part = self.parts[number]
                hidden = part.forward(hidden.to(part.device, part.dtype), own, _of_part(adapter, number))
        return hidden.to(given.device, given.dtype)

    @torch.inference_mode()
    def decode(
        self, steps: Sequence[tuple[torch.Tensor, SpanCache]], adapters: Sequence[SpanAdapter | None] = ()
    ) -> list[torch.Tensor]:
        hidden = [given for given, _ in steps]
        caches = [_numbered(cache) for _, cache in steps]
        adapters = adapters or [None] * len(steps)
        with _step_of([cache for _, cache in steps], 1):
            for number, part in enumerate(self.parts):
                mine = [index for index, own in enumerate(caches) if number in own]
                given = [(hidden[index].to(part.device, part.dtype), caches[index][number]) for index in mine]
                outputs = part.decode(given, [_of_part(adapters[index], number) for index in mine])
                for index, output in zip(mine, outputs, strict=True):
                    hidden[index] = output
        return [output.to(given.device, given.dtype) for output, (given, _) in zip(hidden, steps, strict=True)]


def _numbered(cache: SpanCache) -> Mapping[int, SpanCache]:
    assert isinstance(cache, SplitCache)
    return cache.numbered


def _of_part(adapter: SpanAdapter | None, number: int) -> SpanAdapter | None:
    return adapter.parts[number] if isinstance(adapter, SplitAdapter) else None


def _block(key: str) -> int:
    """The block that a tensor of an adapter is for."""
    name = LoraName.parse(key)
    return int(key.partition(".")[0]) if name is None else name.block


@contextmanager
def _step_of(caches: Sequence[SpanCache], tokens: int) -> Iterator[None]:
    """Within it each part takes the next `tokens` tokens. If one fails, none has taken them."""
    for cache in caches:
        for own in _numbered(cache).values():
            own.long_factors = cache.long_factors
    try:
        yield
    except BaseException:
        for cache in caches:
            cache.rollback(cache.length)
        raise
    for cache in caches:
        cache.length += tokens
