"""Weight matrices in tiles of 16 rows, which the compiled kernels multiply as they are (see `kernels.c`).

A tile's rows stand side by side: a vector of the processor takes one input of 16 rows at a time. Forms: those of GGUF's
kinds, of whose bytes they are made without rounding (`TiledMatrix.of_stored`), and those of `--quant`: NF4 and a scale
for each row of eight bits. Weights of 16 and 32 bits are row-major (`StoredMatrix`). Activations are float32; results
are exact to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Self

import numpy as np
import torch

from ...errors import MachineError
from ...models.quantisation import NF4_BLOCK
from ..quantisation.matrix import (
    LOW_STEPS,
    Int8Matrix,
    Nf4Matrix,
    QuantisedMatrix,
    TensorKind,
    _multiplies_bytes,
    halves,
    pieces,
)
from ..quantisation.rounding import ROUNDED_TOGETHER, rounded
from .library import MOST_THREADS, Library, Matrix, Unsuitable, library, usable_threads

LANES: Final = 16
_SUPER: Final = 256
"""Inputs that share the scale of their scales."""
MOST_ROWS: Final = 32
"""Of more values torch takes less time, with weights of 16 and 32 bits or with more threads than the kernels have."""


@dataclass(frozen=True)
class Form:
    """How the kernels are told to read a matrix.

    Attributes:
        number: of `enum form`.
        bits: of a code; 16 and 32: values as they are, row-major.
        block: inputs that share a scale; 0: all of a row.
        scale: dtype of scales and offsets, or of the values; int8: of scales that have a scale themselves.
        offset: whether there are offsets.
    """

    number: int
    bits: int
    block: int
    scale: torch.dtype
    offset: bool = False

    @property
    def tile_scales(self) -> int:
        """Bytes of the scales of 256 inputs of a tile, if its scales have a scale."""
        return LANES * ((4 if self.offset else 2) + _SUPER // self.block * (2 if self.offset else 1))

    def kinds(self, shape: tuple[int, int]) -> dict[str, TensorKind]:
        """Dtypes and shapes of the tensors of a matrix of `shape`, by name."""
        out, into = shape
        if self.bits >= 16:
            return {"weight": (self.scale, shape)}
        tiles = -(-out // LANES)
        codes: TensorKind = (torch.int8, (tiles, into, LANES))
        if self.bits < 8:
            codes = (torch.int32, (tiles, into * self.bits // 32, LANES))
        if self.scale == torch.int8:
            return {"weight": codes, "scale": (torch.int8, (tiles, into // _SUPER, self.tile_scales))}
        scales: TensorKind = (self.scale, (tiles, into // (self.block or into), LANES))
        return {"weight": codes, "scale": scales} | ({"offset": scales} if self.offset else {})

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Of the tensors of a matrix of `shape`."""
        return sum(dtype.itemsize * prod(of) for dtype, of in self.kinds(shape).values())

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether rows of this length can be held."""
        block = _SUPER if self.scale == torch.int8 else self.block
        return shape[1] % max(block, LANES) == 0


FORMS: Final = {
    "q4": Form(3, 4, 32, torch.float16, True),
    "q4_half": Form(4, 4, 32, torch.float16),
    "q4_k": Form(6, 4, 32, torch.int8, True),
    "q3_k": Form(7, 4, 16, torch.int8),
    "q6": Form(11, 6, 32, torch.float16, True),
    "q6_half": Form(12, 6, 32, torch.float16),
    "q5_k": Form(13, 6, 32, torch.int8, True),
    "q6_k": Form(14, 6, 16, torch.int8),
    "q8_half": Form(9, 8, 32, torch.float16),
    "iq4_nl": Form(15, 4, 32, torch.float16),
    "iq4_xs": Form(16, 4, 32, torch.int8),
    "mxfp4": Form(17, 4, 32, torch.float32),
    "q2_k": Form(18, 4, 16, torch.int8, True),
    "nf4": Form(5, 4, NF4_BLOCK, torch.float32),
    "int8": Form(8, 8, 0, torch.float32),
    "bf16": Form(1, 16, 0, torch.bfloat16),
    "f16": Form(2, 16, 0, torch.float16),
    "f32": Form(0, 32, 0, torch.float32),
}
_WORTH_THREADS: Final = 1 << 20  # weights times rows; fewer take less time than waking a thread
STORED: Final[Mapping[str, tuple[int, str, int, int]]] = {
    "Q4_0": (2, "q4_half", 32, 18),
    "Q4_1": (3, "q4", 32, 20),
    "Q5_0": (6, "q6_half", 32, 22),
    "Q5_1": (7, "q6", 32, 24),
    "Q8_0": (8, "q8_half", 32, 34),
    "Q2_K": (10, "q2_k", 256, 84),
    "Q3_K": (11, "q3_k", 256, 110),
    "Q4_K": (12, "q4_k", 256, 144),
    "Q5_K": (13, "q5_k", 256, 176),
    "Q6_K": (14, "q6_k", 256, 210),
    "IQ4_NL": (20, "iq4_nl", 32, 18),
    "IQ4_XS": (23, "iq4_xs", 256, 136),
    "MXFP4": (39, "mxfp4", 32, 17),
    "F16": (1, "f16", 1, 2),
    "BF16": (30, "bf16", 1, 2),
}
"""GGUF's kinds that there is a form for: their number there, the form, and how many inputs have how many bytes."""
_BY_BYTES: Final = frozenset(("q4", "q4_half", "q4_k", "q8_half", "int8"))


def pointer(tensor: torch.Tensor) -> int:
    """Where its values are. Raises Unsuitable: the kernels do not read such."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise Unsuitable("weights in another form")
    return tensor.data_ptr()


def rows_of(matrix: Matrix, first: int, count: int) -> Matrix:
    """Outputs `first` .. `first + count - 1` of a matrix, over the same memory; multiples of `LANES`."""
    part = Matrix.from_buffer_copy(matrix)
    part.out = count
    form = next((form for form in FORMS.values() if form.number == matrix.form), None)
    if form is None:  # float32, columns one behind the other
        part.codes = matrix.codes + 4 * first
    else:
        part.codes = matrix.codes + first * matrix.in_ * form.bits // 8
    if form is not None and form.bits < 16:
        scales = first * (matrix.in_ // matrix.block) * form.scale.itemsize
        if form.scale == torch.int8:
            scales = first // LANES * (matrix.in_ // _SUPER) * form.tile_scales
        part.scales = matrix.scales + scales
        part.offsets = None if matrix.offsets is None else matrix.offsets + scales
    part.bias = None if matrix.bias is None else matrix.bias + 4 * first
    return part


def kernels() -> Library:
    """
    Raises:
        MachineError: there are none here.
    """
    found = library()
    if found is None:
        raise MachineError("the compiled kernels are not here: `make setup` builds them where there is a C compiler")
    return found


def held_as(kind: str, shape: tuple[int, int]) -> str | None:
    """The form in which the kernels hold a matrix that a GGUF file has in `kind`; None if there is none."""
    form = STORED[kind][1] if kind in STORED else None
    return form if form is not None and FORMS[form].fits(shape) else None


class TiledMatrix(QuantisedMatrix):
    """A matrix in tiles. `form` is a name in `FORMS`, `tensors` are as `Form.kinds` has them, on the CPU."""

    def __init__(self, form: str, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors["weight"], tensors["scale"])
        self.form = form
        self.shape = shape
        self._offset = tensors.get("offset")
        self._functions = kernels().functions
        block = FORMS[form].block or shape[1]
        self.described = Matrix(
            FORMS[form].number, *shape, block, *(None if part is None else part.data_ptr() for part in self._parts)
        )
        self._by_reference = ctypes.byref(self.described)

    def round_rows(self) -> None:
        """Rounds what is multiplied from now on, as `quantisation.activations` has it; not the gradients."""
        self.described.rounds = True

    @property
    def _by_bytes(self) -> bool:
        """Whether products are sums of whole numbers, which are quick for many rows, too: `BY_BYTES` of kernels.c."""
        whole = self.form in _BY_BYTES and self.shape[1] % ROUNDED_TOGETHER == 0
        return bool(self.described.rounds) and whole

    @property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self._weight, self._scale, self._offset

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"weight": self._weight, "scale": self._scale}
        return found if self._offset is None else found | {"offset": self._offset}

    @classmethod
    def of_stored(cls, kind: str, pieces: Iterable[np.ndarray], shape: tuple[int, int]) -> TiledMatrix:
        """The matrix of a GGUF file's weights of `kind`, one of `STORED`, which `held_as` has a form for.

        Args:
            pieces: their bytes, uint8 [some rows, bytes of a row], contiguous; whole tiles, but for the last one.
        """
        number, name, inputs, nbytes = STORED[kind]
        form = FORMS[name]
        # Lanes behind the last row are not written.
        make = torch.zeros if shape[0] % LANES else torch.empty
        made = {part: make(of, dtype=dtype) for part, (dtype, of) in form.kinds(shape).items()}
        wrong = ValueError(f"not the bytes of a matrix of {shape} in {kind}")
        done, width = 0, shape[1] // inputs * nbytes
        for rows in pieces:
            end = done + len(rows)
            fits = end == shape[0] or (end < shape[0] and end % LANES == 0)
            if not fits or rows.shape[1:] != (width,) or shape[1] % inputs or not rows.flags.c_contiguous:
                raise wrong
            if form.bits == 16:
                made["weight"][done:end] = torch.from_numpy(rows).view(form.scale)
            else:
                parts = (made.get(part) for part in ("weight", "scale", "offset"))
                places = [None if part is None else part[done // LANES :].data_ptr() for part in parts]
                found = kernels().functions.petalnode_pack(number, rows.ctypes.data, len(rows), shape[1], *places)
                if found != form.number:
                    raise ValueError(f"no form of the kernels for {shape} in {kind}")
            done = end
        if done != shape[0]:
            raise wrong
        return StoredMatrix(made["weight"]) if form.bits == 16 else cls(name, shape, made)

    @classmethod
    def from_tensors(cls, form: str, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> TiledMatrix:
        """From what `tensors` gave.

        Raises:
            ValueError, KeyError: they are not those of such a matrix.
        """
        expected = FORMS[form].kinds(shape)
        if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != expected:
            raise ValueError(f"no matrix of {shape} in {form}")
        return StoredMatrix(tensors["weight"]) if FORMS[form].bits >= 16 else cls(form, shape, tensors)

    def first(self, rows: int) -> TiledMatrix:
        """The matrix of its first `rows` rows, or a few less, over the same memory."""
        tiles = min(max(1, rows // LANES), len(self._weight))
        parts = {name: tensor[:tiles] for name, tensor in self.tensors().items()}
        return TiledMatrix(self.form, (min(tiles * LANES, self.shape[0]), self.shape[1]), parts)

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        first, last = start // LANES, -(-end // LANES)
        panel = torch.empty(self.shape[1], (last - first) * LANES)
        self._functions.petalnode_unpack(self._by_reference, first, last, panel.data_ptr())
        return panel[:, start - first * LANES : end - first * LANES].t().to(dtype)

    def product(self, values: torch.Tensor) -> torch.Tensor:
        torch_is_quicker = FORMS[self.form].bits >= 16 or torch.get_num_threads() > MOST_THREADS
        if len(values) > MOST_ROWS and torch_is_quicker and not self._by_bytes:
            rounds = bool(self.described.rounds)
            return self.product_in_pieces(rounded(values.float()).to(values.dtype) if rounds else values)
        return self.by_kernels(values.to(torch.float32).contiguous()).to(values.dtype)

    def by_kernels(self, values: torch.Tensor) -> torch.Tensor:
        """`product` of rows of float32, contiguous. Other threads of Python can run for as long as the kernel does, and
        none before it.
        """
        output = np.empty((len(values), self.shape[0]), np.float32)  # torch would let others run
        scratch = np.empty(3 * values.numel(), np.float32)  # SCRATCH_FLOATS of kernels.c
        threads = usable_threads() if output.size * self.shape[1] >= _WORTH_THREADS else 1
        places = values.data_ptr(), len(values), output.ctypes.data, scratch.ctypes.data
        self._functions.petalnode_multiply(self._by_reference, *places, threads)
        return torch.from_numpy(output)


class StoredMatrix(TiledMatrix):
    """bfloat16, float16 or float32 [out, in] as a checkpoint has it, such as a view of the mapped file."""

    def __init__(self, weight: torch.Tensor) -> None:
        form = next(name for name, form in FORMS.items() if form.bits >= 16 and form.scale == weight.dtype)
        kept = weight.contiguous()
        super().__init__(form, (weight.shape[0], weight.shape[1]), {"weight": kept, "scale": kept.new_empty(0)})

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight}

    def first(self, rows: int) -> StoredMatrix:
        return StoredMatrix(self._weight[:rows])

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        return self._weight[start:end].to(dtype)


class TiledNf4Matrix(TiledMatrix):
    """`Nf4Matrix` in tiles: the same values."""

    def __init__(self, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__("nf4", shape, tensors)

    @staticmethod
    def suits(shape: tuple[int, int]) -> bool:
        """Whether a row is a whole number of blocks."""
        return FORMS["nf4"].fits(shape)

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        out, into = weight.shape
        plain = Nf4Matrix.quantise(weight).tensors()
        words = torch.zeros(FORMS["nf4"].kinds((out, into))["weight"][1], dtype=torch.int32)
        pairs = plain["weight"].contiguous()
        kernels().functions.petalnode_tile_nf4(pairs.data_ptr(), out, into, words.data_ptr())
        return cls((out, into), {"weight": words, "scale": _lanes(plain["scale"].view(out, into // NF4_BLOCK))})

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        found = FORMS["nf4"].kinds(shape)
        return found["weight"], found["scale"]

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], device: torch.device) -> Self:
        _check(cls.kinds(shape), tensors)
        return cls(shape, tensors)


class TiledInt8Matrix(TiledMatrix):
    """`Int8Matrix` in tiles: the same weights. Activations of a few rows are not rounded; those of many are as there,
    where bytes are multiplied quickly.
    """

    def __init__(self, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__("int8", shape, tensors)

    @staticmethod
    def suits(shape: tuple[int, int]) -> bool:
        return FORMS["int8"].fits(shape)

    def product(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) <= MOST_ROWS or self.described.rounds or not _multiplies_bytes():
            return super().product(values)
        high, low, steps = halves(values.float())
        parts = []
        for start, end in pieces(self.shape, values):
            tiles = slice(start // LANES, -(-end // LANES))
            integers = self._weight[tiles].transpose(1, 2).reshape(-1, self.shape[1])[: end - start].t()
            upper, lower = torch._int_mm(high, integers), torch._int_mm(low, integers)
            step = self._scale[tiles].reshape(-1)[: end - start]
            parts.append(upper.float().add_(lower, alpha=1 / LOW_STEPS).mul_(steps * step))
        return torch.cat(parts, 1).to(values.dtype)

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        plain = Int8Matrix.quantise(weight).tensors()
        tensors = {"weight": _lanes(plain["weight"]), "scale": _lanes((plain["scale"] / 127.0).unsqueeze(1))}
        return cls((weight.shape[0], weight.shape[1]), tensors)

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        found = FORMS["int8"].kinds(shape)
        return found["weight"], found["scale"]

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], device: torch.device) -> Self:
        _check(cls.kinds(shape), tensors)
        return cls(shape, tensors)


def _check(kinds: tuple[TensorKind, TensorKind], tensors: Mapping[str, torch.Tensor]) -> None:
    if tuple((tensors[name].dtype, tuple(tensors[name].shape)) for name in ("weight", "scale")) != kinds:
        raise ValueError("no matrix of this shape and form")


def _lanes(rows: torch.Tensor) -> torch.Tensor:
    """[out, n] -> [out / 16 rounded up, n, 16]; rows behind the last are zero."""
    missing = -len(rows) % LANES
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return padded.view(-1, LANES, rows.shape[1]).transpose(1, 2).contiguous()
