"""The weights of a span in their own form: those that a GGUF file had before it was dequantised, or 16 bits.

The folder that is made of a GGUF file has float32 values, of which the model version is the hash. Where a matrix is
found to be made of few numbers (`TiledMatrix.pack`), it is held in these and computes the same to rounding; the float32
values are not read again. What is found is kept on the disk, block by block, as quantised blocks are. Matrices of a
checkpoint in bfloat16 or float16 stay in its mapped files.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ....protocols.ids import Span
from ...models.checkpoint import Checkpoint
from ...models.digests import part_digests
from ...models.folder import read_config as read_raw_config
from ...models.manifest import canonical_architecture
from ...models.parts import EMBEDDINGS, HEAD
from ...models.progress import Progress, no_progress
from ...models.quantisation import Quantisation
from ..config import read_config
from ..dot import best_time, dot_rows, has_dots
from ..quantisation.matrix import Int8Matrix, QuantisedMatrix, nf4_kind
from ..quantisation.quantiser import QuantisedCache
from ..quantisation.slots import MatrixSlot, matrix_slots, put_matrices
from ..skeleton import Skeleton, build, fill
from .library import Library
from .tiles import FORMS, LANES, MOST_ROWS, StoredMatrix, TiledInt8Matrix, TiledMatrix, TiledNf4Matrix

_log = logging.getLogger(__name__)

_FORM: Final = "packed2-float32-cpu"
"""Part of the names in the cache: goes up whenever packing would give other tensors."""
PREFILL_ROWS: Final = 256
WORK: Final = {1: 64, 8: 8, PREFILL_ROWS: 1}
"""By rows, how many products make up what is compared: a prompt, 64 steps alone, 8 of eight sessions together."""
_OF_A_HEAD: Final = {1: 1}
_SAMPLE_BYTES: Final = 32 << 20  # of float32 weights: more than the processor's cache holds
_WORTH: Final = 0.95  # of the time that torch needs: less is noise
_STORED_WORTH: Final = 1.25
"""The same for weights of 16 bits, which take half the memory."""
_HALVES: Final = {"BF16": torch.bfloat16, "F16": torch.float16}

Packed = Mapping[MatrixSlot, TiledMatrix]


@dataclass(frozen=True)
class Packer:
    """Finds the weights of blocks in their own form, or has found them before.

    Attributes:
        skeleton: of the whole model, which computes in float32 on a CPU.
        always: also where torch is quicker with the float32 values.
        rounds: whether what is multiplied is rounded, for the measurement.
    """

    folder: Path
    weights: Checkpoint
    skeleton: Skeleton
    always: bool
    progress: Progress
    rounds: bool = False

    def replace(self, span: Span, blocks: Mapping[int, nn.Module]) -> set[str]:
        """Puts packed modules into `blocks`, which have no weights yet, and returns the parameters they stand for."""
        stored = self._stored(span)
        kept = self._packed(span, blocks) if stored is None else self._mapped(span, stored)
        chosen = self._worth([packed for packed in kept.values() if packed])
        gone: set[str] = set()
        for number, block in blocks.items():
            taken = {slot: matrix for slot, matrix in kept[number].items() if (matrix.form, matrix.shape) in chosen}
            lost = {slot.module for slot in kept[number] if slot.expert is not None and slot not in taken}
            own: dict[MatrixSlot, QuantisedMatrix] = {
                slot: matrix for slot, matrix in taken.items() if slot.module not in lost
            }
            put_matrices(block, own, self.skeleton.dtype)
            gone.update(self.skeleton.parameter(number, slot.parameter) for slot in own)
        return gone

    def _stored(self, span: Span) -> torch.dtype | None:
        """bfloat16 or float16, if all matrices of these blocks are so in the checkpoint."""
        tensors = [tensor for number in range(span.start, span.end) for tensor in self.weights.tensors(number)]
        (dtype, *others) = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
        return None if others else _HALVES.get(dtype)

    def _mapped(self, span: Span, dtype: torch.dtype) -> dict[int, Packed]:
        """The matrices of a checkpoint in `dtype`, of its mapped files where they need not be put together."""
        alone = build(read_config(self.folder), dtype)
        blocks = dict(zip(range(span.start, span.end), alone.keep_only(span), strict=True))
        fill(alone, self.weights, lambda block: block is not None and block in span, torch.device("cpu"))
        return {
            number: {
                slot: StoredMatrix(slot.weight(block))
                for slot in matrix_slots(block)
                if slot.shape[1] % LANES == 0 and slot.weight(block).dtype == dtype
            }
            for number, block in blocks.items()
        }

    def _packed(self, span: Span, blocks: Mapping[int, nn.Module]) -> dict[int, Packed]:
        """What float32 matrices are made of, found now or before."""
        cache = QuantisedCache(_FORM, canonical_architecture(read_raw_config(self.folder)))
        digests = part_digests(self.weights, blocks, self.progress)
        kept = {number: _restored(cache.read(digests[number]), block) for number, block in blocks.items()}
        missing = {number: blocks[number] for number, packed in kept.items() if packed is None}
        if missing:
            for number, packed in self._pack(span, missing).items():
                if packed and cache.write(digests[number], _tensors(packed)):
                    # Mapped from the file, they are shared with other servers of this machine.
                    kept[number] = _restored(cache.read(digests[number]), blocks[number]) or packed
                else:
                    kept[number] = packed
        return {number: packed or {} for number, packed in kept.items()}

    def _pack(self, span: Span, missing: Mapping[int, nn.Module]) -> dict[int, Packed]:
        alone = build(read_config(self.folder), self.skeleton.dtype)
        loaded = dict(zip(range(span.start, span.end), alone.keep_only(span), strict=True))
        fill(alone, self.weights, lambda block: block is not None and block in span, torch.device("cpu"))
        found: dict[int, Packed] = {}
        for number in missing:
            packed: dict[MatrixSlot, TiledMatrix] = {}
            for slot in _slots(loaded[number]):
                matrix = TiledMatrix.pack(slot.weight(loaded[number]))
                if matrix is not None:
                    packed[slot] = matrix
            found[number] = packed
            self.progress("Packing the weights", len(found), len(missing))
        del alone, loaded
        self.weights.release()
        return found

    def _worth(self, blocks: Sequence[Packed]) -> set[tuple[str, tuple[int, int]]]:
        """The forms and shapes whose products are to be taken from the kernels."""
        together: dict[tuple[str, tuple[int, int]], list[TiledMatrix]] = defaultdict(list)
        for packed in blocks:
            for matrix in packed.values():
                if self.rounds:
                    matrix.round_rows()
                together[matrix.form, matrix.shape].append(matrix)
        return {kind for kind, matrices in together.items() if self.always or quicker(matrices)}


Products = Sequence[Callable[[Tensor], object]]
"""With matrices of one shape, each of values [rows, in]."""


@torch.inference_mode()
def work_seconds(into: int, work: Mapping[int, int], *ways: Products) -> float:
    """Seconds that `work` takes by the quickest of `ways` for each number of rows; the ways are products with the same
    matrices of `into` inputs.
    """
    total = 0.0
    for rows, times in work.items():
        values = torch.rand(rows, into)
        best = []
        for products in ways:
            some = products if rows < PREFILL_ROWS else products[:1]  # enough to be measured
            seconds = best_time(lambda p=some, v=values: [product(v) for product in p])  # type: ignore[misc]
            best.append(seconds * len(products) / len(some))
        total += times * min(best)
    return total


def quicker(matrices: Sequence[TiledMatrix], work: Mapping[int, int] = WORK) -> bool:
    """Whether the kernels are quicker on this machine than torch (or numpy) with float32 weights of this shape; with
    weights of 16 bits, whether they are not much slower.
    """
    worth = _STORED_WORTH if FORMS[matrices[0].form].bits == 16 else _WORTH
    out, into = matrices[0].shape
    count = min(len(matrices), max(1, _SAMPLE_BYTES // (4 * out * into)))
    plain = [torch.rand(out, into) for _ in range(count)]
    usual: list[Products] = [[partial(linear, weight=weight) for weight in plain]]
    if has_dots():
        usual.append([partial(_by_dots, weight.numpy()) for weight in plain])
    own = work_seconds(into, work, [matrix.product for matrix in matrices[:count]])
    return own <= worth * work_seconds(into, work, *usual)


def _by_dots(matrix: np.ndarray, values: Tensor) -> Tensor:
    return dot_rows(matrix, values) if len(values) == 1 else linear(values, torch.from_numpy(matrix))


class TiledLinear(nn.Linear):
    """An `nn.Linear` over the same parameters, for which the kernels take a few rows where no gradient is wanted.

    Its float32 weights may be those of a mapped file, which is then not read.
    """

    def __init__(self, original: nn.Linear, matrix: TiledMatrix) -> None:
        nn.Module.__init__(self)  # the parameters exist already
        self.in_features = original.in_features
        self.out_features = original.out_features
        self.weight = original.weight
        self.bias = original.bias
        self.matrix = matrix

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows > MOST_ROWS or input.dtype != torch.float32 or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        output = self.matrix.multiply(input)
        return output if self.bias is None else output + self.bias


def use_packed_head(model: Any, folder: Path, weights: Checkpoint, found: Library | None) -> None:
    """Lets the kernels compute the head of `model`, whose weights are those in `folder`, for a few rows: if they have a
    form for its weights and are quicker than torch. What is found is kept on the disk. Without kernels (`found`),
    nothing is done.
    """
    head = model.get_output_embeddings()
    if (
        found is None
        or type(head) is not nn.Linear
        or head.weight.dtype != torch.float32
        or head.weight.device.type != "cpu"
    ):
        return
    matrix = _packed_head(head, folder, weights)
    if matrix is not None and quicker([matrix.first(_SAMPLE_BYTES // (4 * head.in_features))], _OF_A_HEAD):
        model.set_output_embeddings(TiledLinear(head, matrix))


def _packed_head(head: nn.Linear, folder: Path, weights: Checkpoint) -> TiledMatrix | None:
    digests = part_digests(weights, (EMBEDDINGS, HEAD), no_progress)
    key = hashlib.sha256(digests[EMBEDDINGS] + digests[HEAD]).digest()  # a tied head is among the embeddings
    cache = QuantisedCache(f"{_FORM}-head", canonical_architecture(read_raw_config(folder)))
    shape = (head.out_features, head.in_features)
    matrix = _restored_head(cache.read(key), shape)
    if matrix is None:
        matrix = TiledMatrix.pack(head.weight.detach())
        if matrix is None:
            return None
        if cache.write(key, {f"{matrix.form}.{kind}": tensor for kind, tensor in matrix.tensors().items()}):
            matrix = _restored_head(cache.read(key), shape) or matrix
    return matrix


def _restored_head(tensors: Mapping[str, Tensor] | None, shape: tuple[int, int]) -> TiledMatrix | None:
    if not tensors:
        return None
    form = next(iter(tensors)).partition(".")[0]
    try:
        own = {name.removeprefix(f"{form}."): tensor for name, tensor in tensors.items()}
        return TiledMatrix.from_tensors(form, shape, own)
    except (KeyError, ValueError) as error:
        _log.warning("a packed head in the cache is damaged and is made again: %s", error)
        return None


TILED: Final[Mapping[str, type[TiledNf4Matrix] | type[TiledInt8Matrix]]] = {
    "nf4": TiledNf4Matrix,
    "int8": TiledInt8Matrix,
}


@torch.inference_mode()
def tiled_kinds(
    quantisation: Quantisation, block: nn.Module, *, always: bool, rounds: bool = False
) -> dict[str, type[TiledNf4Matrix] | type[TiledInt8Matrix]]:
    """What `Quantiser.tiled` is for blocks like this one: empty where the kernels do not take all of its matrices, or
    take more time for them than bitsandbytes and torch.
    """
    kind = TILED[quantisation]
    shapes = [slot.shape for slot in matrix_slots(block)]
    if not shapes or not all(kind.suits(shape) for shape in shapes):
        return {}
    if always:
        return {quantisation: kind}
    own = others = 0.0
    for shape, count in Counter(shapes).items():
        weight = torch.rand(shape) - 0.5
        tiled = kind.quantise(weight)
        if rounds:
            tiled.round_rows()
        usual = Int8Matrix if quantisation == "int8" else nf4_kind(shape, weight.device)
        own += count * work_seconds(shape[1], WORK, [tiled.product])
        others += count * work_seconds(shape[1], WORK, [usual.quantise(weight).product])
    return {quantisation: kind} if own <= _WORTH * others else {}


def _slots(block: nn.Module) -> Iterable[MatrixSlot]:
    """Linear layers. Experts of a mixture keep their place: their module is replaced as a whole or not at all."""
    return (slot for slot in matrix_slots(block) if slot.expert is None)


def _tensors(packed: Packed) -> dict[str, Tensor]:
    return {
        f"{slot.name}.{matrix.form}.{kind}": tensor
        for slot, matrix in packed.items()
        for kind, tensor in matrix.tensors().items()
    }


def _restored(tensors: Mapping[str, Tensor] | None, block: nn.Module) -> Packed | None:
    """What `_tensors` gave, for this block; None if it is not there or is damaged."""
    if tensors is None:
        return None
    packed = {}
    try:
        for slot in _slots(block):
            for form in FORMS:
                prefix = f"{slot.name}.{form}."
                own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
                if own:
                    packed[slot] = TiledMatrix.from_tensors(form, slot.shape, own)
    except (KeyError, ValueError) as error:
        _log.warning("a packed block in the cache is damaged and is made again: %s", error)
        return None
    return packed
