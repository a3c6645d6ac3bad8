"""The weights of a span in their own form: the few bits that a GGUF file has them in, or 16 bits.

Matrices of a GGUF file are read one at a time and brought into the kernels' tiles, little slower than reading; nothing
is kept on the disk but experts that memory is too small for. Those of kinds that the kernels do not know are opened to
float32. Matrices of safetensors in bfloat16 or float16 stay in their mapped files.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ....protocols.ids import Span
from ...errors import MachineError
from ...models.checkpoint import Checkpoint
from ...models.digests import part_digests
from ...models.folder import read_config as read_raw_config
from ...models.gguf.weights import GgufWeights
from ...models.manifest import canonical_architecture
from ...models.progress import Progress
from ...models.quantisation import Quantisation
from ...models.stored_scheme import StoredScheme
from ..config import read_config
from ..dot import best_time, dot_rows
from ..quantisation.matrix import Int8Matrix, QuantisedLinear, nf4_kind
from ..quantisation.quantiser import QuantisedCache
from ..quantisation.slots import MatrixSlot, QuantisedExperts, matrix_slots, put_matrices
from ..quantisation.stored import StoredQuantised
from ..skeleton import Skeleton, build, fill, quantised_weights, stored_weights
from .heads import Forms, HeadMatrices, forms_of, nbytes_of
from .library import Library, usable_threads
from .tiles import (
    FORMS,
    LANES,
    MOST_ROWS,
    StoredMatrix,
    TiledInt8Matrix,
    TiledMatrix,
    TiledNf4Matrix,
    held_as,
    kernels,
)

_log = logging.getLogger(__name__)

PREFILL_ROWS: Final = 256
WORK: Final = {1: 64, 8: 8, PREFILL_ROWS: 1}
"""By rows, how many products make up what is compared: a prompt, 64 steps alone, 8 of eight sessions together."""
_OF_A_HEAD: Final = {1: 1}
_SAMPLE_BYTES: Final = 32 << 20  # of float32 weights: more than the processor's cache holds
WORTH: Final = 0.95  # of the time that torch needs: less is noise
_LAYOUT: Final = 1
"""Of the tiles in files of the cache: goes up when a form changes."""
_STORED_WORTH: Final = 1.25
"""The same for weights of 16 bits, which take half the memory."""
_HALVES: Final = {"BF16": torch.bfloat16, "F16": torch.float16}

Packed = Mapping[MatrixSlot, TiledMatrix | HeadMatrices]
FewBits: TypeAlias = GgufWeights | StoredQuantised


@dataclass(frozen=True)
class Packer:
    """Holds the weights of blocks in their own form.

    Attributes:
        skeleton: of the whole model, which computes in float32 on a CPU.
        always: also where torch is quicker with the float32 values of 16 bits. Those of fewer bits
            are packed always, for the memory that they spare.
        rounds: whether what is multiplied is rounded, for the measurement.
        on_disk: leaves experts of few bits in files of petalnode's cache, which are mapped.
    """

    folder: Path
    weights: Checkpoint
    skeleton: Skeleton
    always: bool
    progress: Progress
    rounds: bool = False
    on_disk: bool = False

    def replace(self, span: Span, blocks: Mapping[int, nn.Module]) -> set[str]:
        """Puts packed modules into `blocks`, which have no weights yet, and returns the parameters they stand for.

        Raises:
            MachineError: experts are to be left on the disk, and it has no room for them.
        """
        stored = stored_weights(self.skeleton, self.weights) or quantised_weights(self.skeleton, self.weights)
        halves = self._stored(span) if stored is None else None
        kept: dict[int, Packed] = {}
        if stored is not None:
            kept = self._packed(stored, blocks)
        elif halves is not None:
            kept = self._worth(self._mapped(span, halves))
        gone: set[str] = set()
        for number, packed in kept.items():
            put_matrices(blocks[number], packed, self.skeleton.dtype)
            for module in blocks[number].modules() if self.on_disk else ():
                if isinstance(module, QuantisedExperts):
                    module.leave_on_disk(kernels())
            gone.update(self.skeleton.parameter(number, slot.parameter) for slot in packed)
        return gone

    def _stored(self, span: Span) -> torch.dtype | None:
        """bfloat16 or float16, if all matrices of these blocks are so in the checkpoint."""
        tensors = [tensor for number in range(span.start, span.end) for tensor in self.weights.tensors(number)]
        (dtype, *others) = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
        return None if others else _HALVES.get(dtype)

    def _mapped(self, span: Span, dtype: torch.dtype) -> dict[int, dict[MatrixSlot, TiledMatrix]]:
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

    def _packed(self, stored: FewBits, blocks: Mapping[int, nn.Module]) -> dict[int, Packed]:
        """The matrices of GGUF files, or quantised ones, in the kernels' forms, several read at once and no more."""
        held = {number: packable(stored, self.skeleton, number, block) for number, block in blocks.items()}
        total = sum(nbytes_of(forms) for slots in held.values() for forms in slots.values())
        cache = self._cache() if self.on_disk else None
        digests = part_digests(self.weights, blocks, self.progress) if self.on_disk else {}
        done = 0
        kept: dict[int, Packed] = {}
        with ThreadPoolExecutor(usable_threads(), thread_name_prefix="pack") as pool:
            for number, slots in held.items():
                found = {} if cache is None else _restored(cache.read(digests[number]), slots)
                done += sum(matrix.nbytes for matrix in found.values())
                missing = [slot for slot in slots if slot not in found]
                for slot, matrix in zip(missing, pool.map(partial(self._matrix, stored, number), missing), strict=True):
                    found[slot] = matrix
                    done += matrix.nbytes
                    self.progress("Reading the weights", done, total)
                if cache is not None and any(slot.expert is not None for slot in missing):
                    found |= _left(cache, digests[number], slots, found)
                kept[number] = found
        return kept

    def _cache(self) -> QuantisedCache:
        """Where experts are left on the disk."""
        return QuantisedCache(f"experts{_LAYOUT}", canonical_architecture(read_raw_config(self.folder)))

    def _matrix(self, stored: FewBits, number: int, slot: MatrixSlot) -> TiledMatrix | HeadMatrices:
        name = self.skeleton.parameter(number, slot.parameter)
        if isinstance(stored, GgufWeights) and stored.of_heads(name):
            return HeadMatrices.of_stored(stored, name, slot.shape)
        matrix = TiledMatrix.of_stored(str(stored.kind(name)), stored.pieces(name, slot.expert, LANES), slot.shape)
        if self.rounds:
            matrix.round_rows()
        return matrix

    def _worth(self, blocks: Mapping[int, Mapping[MatrixSlot, TiledMatrix]]) -> dict[int, Packed]:
        """Those whose products are to be taken from the kernels, by form and shape."""
        together: dict[tuple[str, tuple[int, int]], list[TiledMatrix]] = defaultdict(list)
        for packed in blocks.values():
            for matrix in packed.values():
                if self.rounds:
                    matrix.round_rows()
                together[matrix.form, matrix.shape].append(matrix)
        chosen = {kind for kind, matrices in together.items() if self.always or quicker(matrices)}
        return {
            number: whole_modules(packed, {s: m for s, m in packed.items() if (m.form, m.shape) in chosen})
            for number, packed in blocks.items()
        }


def _left(cache: QuantisedCache, digest: bytes, slots: Mapping[MatrixSlot, Forms], made: Packed) -> Packed:
    """The experts of a block as they are in a file from now on.

    Raises:
        MachineError: the disk does not take it.
    """
    tensors = {
        f"{slot.name}.{part}": tensor
        for slot, matrix in made.items()
        if slot.expert is not None
        for part, tensor in matrix.tensors().items()
    }
    if not cache.write(digest, tensors) or not (found := _restored(cache.read(digest), slots)):
        needed = sum(tensor.nbytes for tensor in tensors.values()) / (1 << 20)
        raise MachineError(
            f"the experts of these blocks do not fit into memory, and {cache.file(digest).parent} has no room for them "
            f"({needed:.0f} MiB a block): serve fewer blocks, or free some of the disk"
        )
    return found


def _restored(tensors: Mapping[str, Tensor] | None, slots: Mapping[MatrixSlot, Forms]) -> dict[MatrixSlot, Any]:
    """The experts among `slots` as a file of the cache has them; none if it is not there, or is of other experts."""
    found = {}
    try:
        for slot, ((form, _), *_) in slots.items():
            if slot.expert is not None:
                parts = {part: (tensors or {})[f"{slot.name}.{part}"] for part in FORMS[form].kinds(slot.shape)}
                found[slot] = TiledMatrix.from_tensors(form, slot.shape, parts)
    except (KeyError, ValueError):
        return {}
    return found


def packable(stored: FewBits, skeleton: Skeleton, number: int, block: nn.Module) -> dict[MatrixSlot, Forms]:
    """The matrices of block `number` that the kernels hold in the file's bits, and how."""
    found = {}
    slots = matrix_slots(block)
    for slot in slots:
        name, of_file = skeleton.parameter(number, slot.parameter), isinstance(stored, GgufWeights)
        kind = stored.kind(name) if of_file or not slot.transposed else None
        parts = stored.of_heads(name) if isinstance(stored, GgufWeights) else ()
        forms = forms_of(parts or (((kind, slot.shape),) if kind is not None else ()))
        if forms:
            found[slot] = forms
    return whole_modules(slots, found)


def planned_bytes(scheme: StoredScheme, block: nn.Module, *, native: bool) -> int:
    """What a block takes by its configuration alone: quantised matrices in their bits where the kernels have a form."""
    kind = scheme.kind if native else None
    taken = {
        slot: FORMS[form].nbytes(slot.shape)
        for slot in matrix_slots(block)
        if kind is not None and slot.expert is None and (form := held_as(kind, slot.shape)) is not None
    }
    gone = {slot.parameter for slot in taken}
    opened = sum(value.nbytes for name, value in block.named_parameters() if name not in gone)
    return opened + sum(taken.values())


def packed_bytes(stored: GgufWeights, skeleton: Skeleton, number: int, block: nn.Module) -> tuple[int, int]:
    """What block `number` takes where its matrices are held in the bits of the file (those that cannot be, opened).
    Also what of this are experts, which may be left on the disk."""
    slots = packable(stored, skeleton, number, block)
    gone = {slot.parameter for slot in slots}
    opened = sum(value.nbytes for name, value in block.named_parameters() if name not in gone)
    held = {slot: nbytes_of(forms) for slot, forms in slots.items()}
    experts = sum(nbytes for slot, nbytes in held.items() if slot.expert is not None)
    return opened + sum(held.values()), experts


T = TypeVar("T")


def whole_modules(slots: Iterable[MatrixSlot], taken: Mapping[MatrixSlot, T]) -> dict[MatrixSlot, T]:
    """Those of `taken` without experts of which not all are: their module is replaced as a whole or not at all."""
    lost = {slot.module for slot in slots if slot.expert is not None and slot not in taken}
    return {slot: found for slot, found in taken.items() if slot.module not in lost}


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
    worth = _STORED_WORTH if FORMS[matrices[0].form].bits == 16 else WORTH
    out, into = matrices[0].shape
    count = min(len(matrices), max(1, _SAMPLE_BYTES // (4 * out * into)))
    plain = [torch.rand(out, into) for _ in range(count)]
    by_torch = [partial(linear, weight=weight) for weight in plain]
    by_dots = [partial(_by_dots, weight.numpy()) for weight in plain]
    own = work_seconds(into, work, [matrix.product for matrix in matrices[:count]])
    return own <= worth * work_seconds(into, work, by_torch, by_dots)


def _by_dots(matrix: np.ndarray, values: Tensor) -> Tensor:
    return dot_rows(matrix, values) if len(values) == 1 else linear(values, torch.from_numpy(matrix))


class TiledLinear(nn.Linear):
    """An `nn.Linear` over the same parameters, for which the kernels take a few rows where no gradient is wanted.

    Its float32 weights may be those of a mapped file, which is not read where `matrix` has others.
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


class HeldEmbedding(nn.Module):
    """In the place of an `nn.Embedding`: the table in the bits of the file, of which rows are opened as needed.

    `weight` can be asked for its dtype, device and shape, and has no memory.
    """

    def __init__(self, matrix: TiledMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.weight = torch.zeros(()).expand(matrix.shape)

    def forward(self, input: Tensor) -> Tensor:
        ids = input.reshape(-1)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError("index out of range in self")  # as of an nn.Embedding
        found = torch.empty(len(ids), self.embedding_dim)
        tiles = ids // LANES
        for tile in tiles.unique().tolist():  # type: ignore[no-untyped-call]
            first = tile * LANES
            rows = self.matrix.rows(first, min(first + LANES, self.num_embeddings), torch.float32)
            own = tiles == tile
            found[own] = rows[ids[own] - first]
        return found.view(*input.shape, self.embedding_dim)


def hold_ends(skeleton: Skeleton, weights: Checkpoint, found: Library | None) -> set[str]:
    """Puts the table of embeddings and the head of GGUF files into the skeleton's model, in the file's bits. The model
    has no weights yet. Returns the parameters that they stand for. Those of other kinds stay to be filled.
    """
    stored = stored_weights(skeleton, weights)
    if found is None or stored is None:
        return set()
    model: Any = skeleton.model
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {module: f"{path}.weight" for path, module in model.named_modules()}
    tied = head is not None and paths[head] in skeleton.tied
    plain_head = type(head) is nn.Linear and head.bias is None
    gone: set[str] = set()
    matrix = None
    if type(table) is nn.Embedding and (plain_head or not tied):
        matrix = _whole(stored, paths[table], table.weight)
        if matrix is not None:
            model.set_input_embeddings(HeldEmbedding(matrix))
            gone.add(paths[table])
    if plain_head:
        held = matrix if tied else _whole(stored, paths[head], head.weight)
        if held is not None:
            model.set_output_embeddings(QuantisedLinear(held, None, skeleton.dtype))
            gone.add(paths[head])
            model.all_tied_weights_keys = {}
    return gone


def _whole(stored: GgufWeights, name: str, weight: Tensor) -> TiledMatrix | None:
    """The matrix of a parameter outside of the blocks; None if the kernels have no form for it."""
    shape = (weight.shape[0], weight.shape[1])
    kind = stored.kind(name) if name in stored.sources else None
    if kind is None or held_as(kind, shape) is None:
        return None
    return TiledMatrix.of_stored(kind, stored.pieces(name, None, LANES), shape)


def use_packed_head(skeleton: Skeleton, weights: Checkpoint, found: Library | None) -> None:
    """Lets the kernels compute the head of the skeleton's model, which has its weights, for a few rows: if they have a
    form for them and are quicker than torch. Without kernels (`found`), nothing is done.
    """
    model: Any = skeleton.model
    head = model.get_output_embeddings()
    if (
        found is None
        or type(head) is not nn.Linear
        or head.weight.dtype != torch.float32
        or head.weight.device.type != "cpu"
    ):
        return
    matrix = _packed_head(skeleton, weights, head)
    if matrix is not None and quicker([matrix.first(_SAMPLE_BYTES // (4 * head.in_features))], _OF_A_HEAD):
        model.set_output_embeddings(TiledLinear(head, matrix))


def _packed_head(skeleton: Skeleton, weights: Checkpoint, head: nn.Linear) -> TiledMatrix | None:
    shape = (head.out_features, head.in_features)
    names = [name for name, held in skeleton.model.named_parameters(remove_duplicate=False) if held is head.weight]
    stored = stored_weights(skeleton, weights)
    if stored is not None:  # a head that is tied to embeddings of a class of their own
        of_file = (_whole(stored, name, head.weight) for name in names)
        return next((matrix for matrix in of_file if matrix is not None), None)
    for name in names:
        if name in weights.file_of and weights.tensor(name).dtype in _HALVES and shape[1] % LANES == 0:
            return StoredMatrix(weights.slice(name)[...])
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
    are slower than bitsandbytes and torch.
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
    return {quantisation: kind} if own <= WORTH * others else {}
