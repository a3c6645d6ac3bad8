"""Recomputes what a span of blocks must return, from one's own weights, with few of them in memory at a time.

The blocks are loaded one after the other, by memory map. Every question passes a block before the next one is loaded.
So a validator needs no machine that could serve the model. Of a small model several blocks are loaded at once, up to
`RECOMPUTATION.group_bytes`: finding a block's weights takes longer than computing with it. The peak of memory is these
weights, one question's cache for them, and all questions' activations. The blocks are those of servers (`node.blocks`):
an honest server of the same kind gives the same bits, one of another kind rounds otherwise.

How far otherwise depends on what is asked. Where two experts suit a token equally well, or values cancel, a rounding
can decide about all of an answer. `Recomputation.perturbed` finds out, by noise in place of roundings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import SystemRandom
from typing import Final

import torch

from ...protocols.ids import PLAIN, Layout, Span
from ...protocols.tensors import DTYPES
from ...protocols.training import LoraName
from ..blocks.batch_request import gradient_of
from ..blocks.cache import SpanCache
from ..blocks.kernels.choice import Known
from ..blocks.kernels.tiles import STORED
from ..blocks.passes import Batch, Gradients, SpanPasses, run_through
from ..blocks.span import PREFILL_CHUNK, BlockSpan, Loading, load
from ..errors import BadInput, ModelError
from ..models.checkpoint import Checkpoint
from ..models.folder import ModelFolder, num_blocks, read_config
from ..models.progress import Progress, no_progress
from ..models.quantisation import Numerics, is_exact
from .noise import Noise


@dataclass(frozen=True)
class RecomputationLimits:
    """How much is recomputed at once."""

    group_bytes: int = 64 << 20
    """Of weights, as they are held, that are loaded at once; a larger block is loaded alone."""
    activation_bytes: int = 256 << 20  # that autograd keeps beyond those of one block
    pairs: int = 6
    """Pairs of perturbed recomputations: the noise of one, and its opposite. Of any two among 64 experts, one has the
    other's noise reversed in one of them at least, so that no tie between two is left as it is."""
    perturbed_at_once: int = 8  # Questions: the activations of each are in memory as often as it is recomputed


RECOMPUTATION: Final = RecomputationLimits()


@dataclass(frozen=True)
class RecordedStep:
    """One step of a session as the server took it.

    Attributes:
        position, long_factors, layout: as `wire.Step` has them.
        reorder: per row, the row whose cache it continues, after the rollback; empty for its own.
        hidden: float [rows, tokens, hidden size], as decoded from the wire.
    """

    position: int
    hidden: torch.Tensor
    reorder: tuple[int, ...] = ()
    long_factors: bool = False
    layout: Layout = PLAIN


@dataclass(frozen=True)
class SessionQuestion:
    """The outputs of blocks `span` for `steps`, all steps of a session from its beginning."""

    span: Span
    steps: tuple[RecordedStep, ...]
    left_padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class SessionAnswer:
    """Per step, float [rows, tokens, hidden size] on the CPU, in the dtype of the step."""

    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PassAnswer:
    """On the CPU: the output, in the dtype of the batch, or the gradients."""

    output: torch.Tensor | None = None
    gradients: Gradients | None = None


Question = SessionQuestion | Batch
"""Of a batch: the output of its blocks, without a cache; if it has a gradient of the output, the gradients."""
Answer = SessionAnswer | PassAnswer


def joined(answer: Answer) -> torch.Tensor:
    """Float [rows, tokens, hidden size]: all outputs, or the gradient of the hidden states."""
    if isinstance(answer, SessionAnswer):
        return torch.cat(answer.outputs, dim=1)
    return last_of(answer)


def last_of(answer: Answer) -> torch.Tensor:
    """The output of the last step, or of the pass, or the gradient of the hidden states."""
    if isinstance(answer, SessionAnswer):
        return answer.outputs[-1]
    if answer.gradients is not None:
        return answer.gradients.hidden
    assert answer.output is not None
    return answer.output


def kept_gradients(answer: Answer, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The gradients of kept tensors by their names; none if the answer is no gradient."""
    if isinstance(answer, SessionAnswer) or answer.gradients is None:
        return {}
    return {name: gradient_of(answer.gradients, name) for name in names}


class Recomputation:
    """Answers questions as a server that computes in `dtype` with weights held as `quantisation`.

    Not thread-safe; runs in a worker thread.

    Args:
        folder: with the weights of the blocks that are asked for, or one that has them while they are held.
        dtype: float32, bfloat16 or float16.
        quantisation: none, int8 or nf4.
        device: where to compute.
        group_bytes: as `RECOMPUTATION.group_bytes`; 0 loads each block alone.

    Attributes:
        loads: blocks loaded so far.
        largest: bytes of weights that were held at once.
    """

    def __init__(
        self,
        folder: Path | ModelFolder,
        dtype: str,
        quantisation: str,
        device: str = "cpu",
        progress: Progress = no_progress,
        group_bytes: int = RECOMPUTATION.group_bytes,
    ) -> None:
        self.loads = 0
        self.largest = 0
        self._source = folder
        self._folder = folder if isinstance(folder, Path) else folder.path
        self._dtype = dtype
        self._quantisation = quantisation
        self._device = device
        self._progress = progress
        self._group_bytes = group_bytes
        self._known = Known()

    def perturbed(self, questions: Sequence[Question], size: float, seed: int | None = None) -> list[list[Answer]]:
        """For each question, its answers with noise of relative `size` at every block, in `RECOMPUTATION.pairs` pairs.

        `seed` is drawn if it is not given: who chooses a question must not know what noise it will meet.

        Raises:
            PetalnodeError: as `answer`.
        """
        drawn = SystemRandom().getrandbits(48) if seed is None else seed
        signed = [(pair, sign) for pair in range(RECOMPUTATION.pairs) for sign in (1, -1)]
        found: list[list[Answer]] = []
        for start in range(0, len(questions), RECOMPUTATION.perturbed_at_once):
            part = questions[start : start + RECOMPUTATION.perturbed_at_once]
            noises = [Noise(size, len(one.span), drawn + pair, pair, sign) for one in part for pair, sign in signed]
            answers = self.answer([one for one in part for _ in signed], noises)
            found += [answers[first : first + len(signed)] for first in range(0, len(answers), len(signed))]
        return found

    def answer(self, questions: Sequence[Question], noises: Sequence[Noise] = ()) -> list[Answer]:
        """The answer to each question, with noise if there are `noises`, one a question. A block is loaded once for all
        questions, twice for gradients.

        Raises:
            ModelError: weights are missing or damaged.
            SwarmError: they come from peers, and nobody hands them on.
            BadInput: blocks outside the model, or an unknown dtype or quantisation.
            MachineError: the device is not there.
        """
        runs = [self._started(question) for question in questions]
        for run, noise in zip(runs, noises, strict=False):
            run.noise = noise
        wanted = {block for question in questions for block in range(question.span.start, question.span.end)}
        groups = self._groups(wanted)
        for group in groups:
            with self._held(group):
                loaded = self._load(group)
                for run in runs:
                    if run.question.span.overlaps(group):
                        with run.disturbed(loaded):
                            run.go_through(loaded)
                del loaded
        backward = [run for run in runs if isinstance(run, _Backward)]
        for group in reversed(groups):
            going = [run for run in backward if run.question.span.overlaps(group)]
            if going:
                with self._held(group):
                    loaded = self._load(group)
                    for run in going:
                        with run.disturbed(loaded):
                            run.go_back(loaded)
                    del loaded
        return [run.answer() for run in runs]

    def _groups(self, wanted: Collection[int]) -> list[Span]:
        """Spans of blocks that are loaded at once, in order."""
        if not wanted:
            return []
        with Checkpoint(self._folder, num_blocks(read_config(self._folder))) as weights:
            sizes = {block: self._size(weights, block) for block in wanted}
        groups: list[Span] = []
        room = 0
        for block in sorted(wanted):
            room -= sizes[block]
            if groups and groups[-1].end == block and room >= 0:
                groups[-1] = Span(groups[-1].start, block + 1)
            else:
                groups.append(Span(block, block + 1))
                room = self._group_bytes - sizes[block]
        return groups

    def _size(self, weights: Checkpoint, block: int) -> int:
        try:
            return weights.opened_nbytes(block, STORED if is_exact(self._quantisation) else ())
        except ModelError:  # it is not here yet, or not at all: it is loaded alone
            return self._group_bytes

    def _held(self, group: Span) -> AbstractContextManager[None]:
        return nullcontext() if isinstance(self._source, Path) else self._source.held(group)

    def _started(self, question: Question) -> _RecomputedSession | _Forward | _Backward:
        dtype = DTYPES.get(self._dtype)
        if dtype is None:
            raise BadInput(f"nothing is computed in {self._dtype[:100]!r} here")
        numerics = Numerics.parse(self._quantisation)
        needs_float32 = (numerics.activations, numerics.cache) != ("float32", "auto")
        if needs_float32 and dtype != torch.float32 and not numerics.exact:
            raise BadInput(f"nothing is computed as {self._quantisation} in {self._dtype}")
        if isinstance(question, SessionQuestion):
            return _RecomputedSession(question, [step.hidden.to(self._device, dtype) for step in question.steps])
        if question.gradient is None:
            return _Forward(question, question.hidden.to(self._device, dtype))
        return _Backward(question, question.hidden.to(self._device, dtype))

    def _load(self, group: Span) -> BlockSpan:
        how = Loading(self._device, self._dtype, self._quantisation, progress=self._progress, known=self._known)
        loaded = load(self._folder, group, how)
        self.loads += len(group)
        held = sum(
            tensor.nbytes for module in loaded.stack.blocks for tensor in (*module.parameters(), *module.buffers())
        )
        self.largest = max(self.largest, held)
        return loaded


def _common(one: Span, other: Span) -> Span:
    return Span(max(one.start, other.start), min(one.end, other.end))


class _SpanRun:
    """A question on its way through the blocks."""

    noise: Noise | None = None

    @contextmanager
    def disturbed(self, blocks: BlockSpan) -> Iterator[None]:
        """What is computed within it has the run's noise, if there is any."""
        with ExitStack() as stack:
            if self.noise is not None:
                stack.enter_context(self.noise.within(blocks))
            yield

    def left(self, tensor: torch.Tensor) -> torch.Tensor:
        """What leaves the last block, or comes back to one."""
        return tensor if self.noise is None else self.noise.added(tensor)


@dataclass
class _RecomputedSession(_SpanRun):
    """A session on its way through the blocks. `hidden`: what enters the next block, per step."""

    question: SessionQuestion
    hidden: list[torch.Tensor]

    def go_through(self, blocks: BlockSpan) -> None:
        rows, steps = self.hidden[0].shape[0], self.question.steps
        length = max(step.position + step.hidden.shape[1] for step in steps)
        part = _common(self.question.span, blocks.span)
        cache = blocks.make_cache(rows, length, list(self.question.left_padding) or None, part)
        cache.keep_all()  # servers on other systems do
        alone = [[index] for index in range(len(steps))]
        for together in _in_one_piece(steps) if blocks.numerics.exact else alone:
            step, sizes = steps[together[0]], [steps[index].hidden.shape[1] for index in together]
            if step.position < cache.length:
                cache.rollback(step.position)
            if step.reorder:
                cache.reorder(step.reorder)
            if step.position != cache.length:
                raise ValueError(f"a step at position {step.position} of a session that holds {cache.length} tokens")
            entering = torch.cat([self.hidden[index] for index in together], dim=1)
            blocks.stack.begin_step(cache, entering.shape[1], step.long_factors, step.layout)
            outputs = torch.split(self._computed(blocks, cache, entering), sizes, dim=1)
            for index, output in zip(together, outputs, strict=True):
                self.hidden[index] = output

    @staticmethod
    def _computed(blocks: BlockSpan, cache: SpanCache, entering: torch.Tensor) -> torch.Tensor:
        if entering.shape[1] == 1:
            return blocks.decode([(entering, cache)])[0]
        # In the chunks of a server: attention over more tokens at once rounds otherwise.
        end, made = cache.length + entering.shape[1], list[torch.Tensor]()
        size = blocks.chunk_tokens(max(1, PREFILL_CHUNK // entering.shape[0]))
        while left := end - cache.length:
            piece = entering[:, -left:][:, : cache.whole_groups(min(size, left))]
            made.append(blocks.forward(piece, cache))
        return torch.cat(made, dim=1)

    def answer(self) -> SessionAnswer:
        steps = zip(self.hidden, self.question.steps, strict=True)
        return SessionAnswer(tuple(self.left(hidden).to("cpu", step.hidden.dtype) for hidden, step in steps))


def _in_one_piece(steps: Sequence[RecordedStep]) -> list[list[int]]:
    """The indices of steps that follow each other. A token of the exact kind does not depend on the pieces in which a
    text comes, and many at once take a fraction of the time."""
    found: list[list[int]] = []
    end = -1
    for index, step in enumerate(steps):
        plain = not step.reorder and step.layout == PLAIN and step.long_factors == steps[index - 1].long_factors
        if plain and step.position == end and steps[index - 1].layout == PLAIN:
            found[-1].append(index)
        else:
            found.append([index])
        end = step.position + step.hidden.shape[1]
    return found


@dataclass
class _Forward(_SpanRun):
    question: Batch
    hidden: torch.Tensor

    def go_through(self, blocks: BlockSpan) -> None:
        batch = _part(self.question, blocks.span, self.hidden)
        self.hidden = run_through(SpanPasses(blocks, RECOMPUTATION.activation_bytes).forward(batch))

    def answer(self) -> PassAnswer:
        return PassAnswer(output=self.left(self.hidden).to("cpu", self.question.hidden.dtype))


@dataclass
class _Backward(_SpanRun):
    """Keeps the inputs of each group of blocks in the forward pass, for the backward pass."""

    question: Batch
    hidden: torch.Tensor
    entered: dict[int, torch.Tensor] = field(default_factory=dict)
    flowing: torch.Tensor | None = None
    prompts: list[torch.Tensor] = field(default_factory=list)
    lora: dict[LoraName, torch.Tensor] = field(default_factory=dict)

    def go_through(self, blocks: BlockSpan) -> None:
        self.entered[blocks.span.start] = self.hidden
        if blocks.span.end < self.question.span.end:  # the output of the last ones is not needed
            batch = _part(self.question, blocks.span, self.hidden)
            self.hidden = run_through(SpanPasses(blocks, RECOMPUTATION.activation_bytes).forward(batch))

    def go_back(self, blocks: BlockSpan) -> None:
        flowing = self.question.gradient if self.flowing is None else self.flowing
        assert flowing is not None
        batch = _part(self.question, blocks.span, self.entered.pop(blocks.span.start))
        found = run_through(SpanPasses(blocks, RECOMPUTATION.activation_bytes).backward(batch, self.left(flowing)))
        self.flowing = found.hidden
        self.lora.update(found.lora)
        if found.prompts is not None:
            self.prompts.append(found.prompts)

    def answer(self) -> PassAnswer:
        assert self.flowing is not None
        batch = self.question
        prompts = None
        if batch.prompts is not None:
            prompts = torch.cat(self.prompts[::-1]).to("cpu", batch.prompts.dtype)
        lora = {name: gradient.to("cpu", batch.lora[name].dtype) for name, gradient in self.lora.items()}
        hidden = self.left(self.flowing).to("cpu", batch.hidden.dtype)
        return PassAnswer(gradients=Gradients(hidden, prompts, lora))


def _part(batch: Batch, blocks: Span, hidden: torch.Tensor) -> Batch:
    """The part of the batch that concerns some of its blocks."""
    part = _common(batch.span, blocks)
    first = part.start - batch.span.start
    return replace(
        batch,
        span=part,
        hidden=hidden,
        prompts=None if batch.prompts is None else batch.prompts[first : first + len(part)],
        lora={name: tensor for name, tensor in batch.lora.items() if name.block in part},
    )
