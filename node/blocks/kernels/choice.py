"""Whether the compiled kernels compute: only where they are here, agree with torch, and are quicker."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn

from ....protocols.ids import Span
from ...errors import MachineError
from ...models.quantisation import EXACT, Kernels, Numerics
from ..cache import BlockCacheSpec, SpanCache
from ..dot import DotLinear, best_time, is_large
from ..quantisation.matrix import QuantisedLinear, QuantisedMatrix
from ..quantisation.slots import QuantisedExperts
from ..stack import BlockStack
from .library import NOT_HERE, Library, Unsuitable, library, usable_threads
from .packing import WORK, WORTH, TiledLinear, quicker
from .rotary import exact_frequencies
from .step import SpanStep
from .tiles import LANES, MOST_ROWS, StoredMatrix

_log = logging.getLogger(__name__)

_TOLERANCE: Final = 1e-4
"""Largest relative rms difference between the kernels' decode step and torch's with the same weights; 1e-6 is usual."""
_HELD_TOLERANCE: Final = 1e-2
"""The same where keys and values are held in fewer bits, which a last bit of float32 may decide: of few values, and by
little. What attends to other tokens differs by tens of percent."""
_ROUNDED_TOLERANCE: Final = 6e-2
"""The same of one block where activations are rounded to eight bits, which a last bit of float32 may decide, or of a
ragged step. Over many blocks such differences grow to that of the roundings themselves."""
# Largest relative rms difference between a ragged step and separate ones. Kernels differ in the last bits; a
# wrong mask or position differs by tens of percent.
_RAGGED_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_SAMPLE_BYTES: Final = 128 << 20
_MANY: Final = 8
"""Sessions in a step that counts as much as one of a single session. Float32 weights come from memory as quickly for
both. But torch's products with a few rows take three times as long."""


def native_kernels(wanted: Kernels, device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Library | None:
    """The compiled kernels, if they are wanted, are here, and compute what this device and dtype would.

    `exact`: they are wanted for bits that are the same everywhere.

    Raises:
        MachineError: they are asked for by name and are not here, or are not for this device or dtype.
    """
    found = library() if wanted != "torch" and device.type == "cpu" and dtype == torch.float32 else None
    if wanted == "native" and found is None:
        if device.type != "cpu" or dtype != torch.float32:
            kind = f"{str(dtype).removeprefix('torch.')} on {device.type}"
            raise MachineError(
                f"--kernels native computes in float32 on a CPU, not in {kind}: add --device cpu --dtype float32, or "
                "take --kernels auto"
            )
        raise MachineError(NOT_HERE)
    if exact and found is not None and not found.is_exact:
        raise MachineError(
            f"the compiled kernels ({found.isa}) do not give the bits of {EXACT} on this machine: leave --exact out"
        )
    return found


class Decoder(Protocol):
    """What a `BlockSpan` is here."""

    stack: BlockStack
    span: Span
    step: SpanStep | None
    numerics: Numerics
    specs: tuple[BlockCacheSpec, ...]
    dtype: torch.dtype
    supports_ragged: bool

    @property
    def weight_bytes(self) -> int: ...

    def make_cache(
        self, batch: int, max_length: int, left_padding: Sequence[int] | None = None, part: Span | None = None
    ) -> SpanCache: ...

    def forward(self, hidden: torch.Tensor, cache: SpanCache) -> torch.Tensor: ...

    def decode(self, steps: Sequence[tuple[torch.Tensor, SpanCache]]) -> list[torch.Tensor]: ...


@dataclass
class Known:
    """What was found out about loaded blocks, for others that differ from them by their weights alone: whether steps
    run as a ragged batch, and how many threads compute them by the kernels (0: torch does). `kinds`: digests."""

    kinds: set[str] = field(default_factory=set)
    ragged: bool = False
    threads: int = 0

    @property
    def is_usual(self) -> bool:
        """Whether the kernels compute with all threads, which no other work on the machine can have brought about."""
        return self.ragged and self.threads == usable_threads()

    def covers(self, span: Decoder) -> bool:
        return self.kinds.issuperset(_digests(span))

    def note(self, span: Decoder) -> None:
        self.kinds.update(_digests(span))
        self.ragged, self.threads = span.supports_ragged, 0 if span.step is None else span.step.threads


def find_step(span: Decoder, config: Any, found: Library, known: Known, *, always: bool) -> SpanStep | None:
    """The kernels' decode step for `span`, which may run ragged batches and has no such step yet; None if it is not to
    be used: the kernels do not know such blocks, compute something else, or are not quicker.

    `always`: where it agrees, it need not be quicker.
    """
    try:
        exact = span.numerics.exact
        frequencies = partial(exact_frequencies, config) if exact else span.stack.frequencies
        step = SpanStep(span.stack.blocks, span.specs, config, frequencies, found, span.numerics.cache, exact)
    except (Unsuitable, AttributeError) as error:
        _log.debug("the compiled kernels do not compute such blocks: %s", error)
        return None
    if known.covers(span):
        step.threads = known.threads
        return step if known.threads else None
    try:
        difference = max(_difference(span, part, step) for part in compared_parts(span))
        if not difference <= _tolerance(span.numerics):
            _log.warning("torch computes decode steps: the compiled kernels differ by %.1g", difference)
            return None
        span.step = step
        alone = tiny_sessions(span, sample_of(span), 1)
        _choose_threads(step, span, alone)
        if always:
            return step
        crowd = [session for _ in range(_MANY) for session in tiny_sessions(span, sample_of(span), 1)]

        def work() -> None:
            _decode(span, alone)
            _decode(span, crowd)

        own = best_time(work)
        span.step = None
        torchs = best_time(work)
        _log.debug("steps of 1 and %d rows take %.2g s by the compiled kernels, %.2g s by torch", _MANY, own, torchs)
        return step if own <= WORTH * torchs else None
    finally:
        span.step = None


@torch.no_grad()
def use_products(blocks: Iterable[nn.Module], *, always: bool) -> None:
    """Has the kernels multiply a few rows with float32 weights, of the shapes for which they are quicker than torch.

    `always`: of all shapes that they take.
    """
    places = defaultdict(list)
    for parent in (module for block in blocks for module in block.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.Linear) or type(child) not in (nn.Linear, DotLinear):
                continue  # of another class, which may compute otherwise
            if child.in_features % LANES == 0 and (always or is_large(child.weight)):
                layer = TiledLinear(child, StoredMatrix(child.weight.detach()))
                places[layer.matrix.shape].append((parent, name, layer))
    steps = {rows: times for rows, times in WORK.items() if rows <= MOST_ROWS}
    for alike in places.values():
        if always or quicker([layer.matrix for _, _, layer in alike], steps):
            for parent, name, layer in alike:
                setattr(parent, name, layer)


def sample_of(span: Decoder) -> Span:
    """Of its first blocks as many as tell how fast a block is: so that no processor's caches hold their weights."""
    share = min(1.0, _SAMPLE_BYTES / max(1, span.weight_bytes))
    return Span(span.span.start, span.span.start + math.ceil(len(span.span) * share))


def _tolerance(numerics: Numerics) -> float:
    if numerics.activations != "float32":
        return _ROUNDED_TOLERANCE
    return _TOLERANCE if numerics.cache == "auto" else _HELD_TOLERANCE


def compared_parts(span: Decoder) -> list[Span]:
    """The parts of a span whose results have to agree: its blocks up to the last one that is unlike those before it,
    two at least. Each kind of block by itself where roundings decide about later ones."""
    kinds = _kinds(span)
    first_of_kind = [span.span.start + kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if span.numerics.activations == "float32":
        return [Span(span.span.start, min(span.span.end, max(first_of_kind[-1] + 1, span.span.start + 2)))]
    return [Span(block, block + 1) for block in first_of_kind]


def _kinds(span: Decoder) -> list[object]:
    """Of each block all but its weights."""
    blocks = zip(span.stack.blocks, span.specs, strict=True)
    return [(spec, tuple(_traits(block, number))) for number, (block, spec) in enumerate(blocks)]


def _digests(span: Decoder) -> set[str]:
    return {hashlib.sha256(repr(kind).encode()).hexdigest()[:32] for kind in set(_kinds(span))}


def _traits(block: nn.Module, number: int) -> Iterator[object]:
    """All that makes a block compute otherwise than another one with the same weights; its number does not."""
    for path, module in block.named_modules():
        yield path, type(module)
        yield from ((name, tuple(value.shape)) for name, value in module.named_parameters(recurse=False))
        for name, value in sorted(vars(module).items()):
            if isinstance(value, (str, int, float)) and not ("layer" in name and value == number):
                yield name, value
        if isinstance(module, QuantisedLinear):
            yield _form(module.matrix)
        if isinstance(module, QuantisedExperts):
            yield from sorted({_form(matrix) for matrix in (*module.up, *module.down)}, key=repr)


def _form(matrix: QuantisedMatrix) -> tuple[object, ...]:
    return type(matrix), getattr(matrix, "form", ""), matrix.shape


def _difference(span: Decoder, part: Span, step: SpanStep) -> float:
    """The largest relative rms difference of `step` from torch at sessions of these blocks."""
    sessions = tiny_sessions(span, part)
    span.step = None
    expected = span.decode(sessions)
    span.step = step
    given = span.decode([(hidden, _back(cache)) for hidden, cache in sessions])
    differences = torch.stack([(one - other).norm() / other.norm() for one, other in zip(given, expected, strict=True)])
    return float(differences.max())  # NaN if any is


def _choose_threads(step: SpanStep, span: Decoder, sessions: Sequence[tuple[torch.Tensor, SpanCache]]) -> None:
    """Lets as many threads compute a step as are quicker than one."""
    most = usable_threads()
    if most == 1:
        return
    alone = best_time(lambda: _decode(span, sessions))
    step.threads = most
    if not best_time(lambda: _decode(span, sessions)) <= WORTH * alone:
        step.threads = 1


def tiny_sessions(span: Decoder, part: Span, count: int = 2) -> list[tuple[torch.Tensor, SpanCache]]:
    """The next steps of one or two tiny sessions of blocks `part`. The second has two rows and left padding."""
    generator = torch.Generator().manual_seed(1)
    sessions = []
    for batch, length, padding in ((1, 5, None), (2, 3, [2, 0]))[:count]:
        cache = span.make_cache(batch, length + 1, padding, part)
        hidden = torch.randn(batch, length + 1, span.stack.width(part.start - span.span.start), generator=generator)
        span.forward(hidden[:, :length], cache)
        sessions.append((hidden[:, length:], cache))
    return sessions


def _decode(span: Decoder, sessions: Sequence[tuple[torch.Tensor, SpanCache]]) -> None:
    span.decode([(hidden, _back(cache)) for hidden, cache in sessions])


def _back(cache: SpanCache) -> SpanCache:
    """The cache before its last step."""
    cache.rollback(cache.max_length - 1)
    return cache


def agrees_with_single_steps(span: Decoder, known: Known) -> bool:
    """Whether this architecture's decode steps may run as one ragged batch."""
    return known.ragged if known.covers(span) else all(_agrees(span, part) for part in compared_parts(span))


def _agrees(span: Decoder, part: Span) -> bool:
    """The same of these blocks: runs two tiny sessions both ways, one of them with two rows and left padding, and
    compares."""
    generator = torch.Generator().manual_seed(0)
    sessions = []
    for batch, length, padding in ((1, 3, None), (2, 2, [1, 0])):
        cache = span.make_cache(batch, length + 1, padding, part)
        hidden = torch.randn(batch, length + 1, span.stack.width(part.start - span.span.start), generator=generator)
        span.forward(hidden[:, :length], cache)
        sessions.append((hidden[:, length:], cache))
    try:
        span.supports_ragged = True
        together = span.decode(sessions)
    except Exception as error:  # other architectures break in their own ways
        _log.debug("decode steps run one by one: %s", error)
        return False
    finally:
        span.supports_ragged = False
    tolerance = _RAGGED_TOLERANCE[span.dtype] if span.numerics == Numerics() else _ROUNDED_TOLERANCE
    for (hidden, cache), ragged in zip(sessions, together, strict=True):
        cache.rollback(cache.max_length - 1)
        single = span.forward(hidden, cache)
        difference = float((ragged - single).norm() / single.norm())
        if not difference <= tolerance:
            _log.warning("decode steps run one by one: a batch of them differs by %.1g", difference)
            return False
    return True
