"""Matrices that a safetensors checkpoint has quantised: FP8, GPTQ, AWQ and compressed-tensors, opened one at a time.

What is stored beside a matrix `X.weight`: `X.weight_scale_inv` (fp8), `X.weight_scale` and `X.weight_zero_point`
(compressed-tensors, which packs few bits as `X.weight_packed`), or `X.qweight`, `X.qzeros`, `X.scales` and `X.g_idx`
(GPTQ, AWQ), whose matrices are transposed. A value is (code - zero point) * scale, computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch

from ...errors import ModelError
from ...models.checkpoint import Checkpoint
from ...models.stored_scheme import SCALE_RUN, StoredScheme

_BESIDE: Final = (
    *("weight_scale_inv", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qzeros", "scales", "g_idx", "input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale"),
)
"""What stands beside a matrix; scales of activations and of caches are not used."""
_PACKED: Final = {"weight_packed": "weight", "qweight": "weight"}
_AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]
_ROWS: Final = 256  # opened at a time


@dataclass(frozen=True)
class StoredQuantised:
    """The tensors of a checkpoint by the keys that they would have if no matrix was quantised.

    Attributes:
        places: the parameter of the model that a key fills, where it alone fills that.
        parameters: shapes of the model's parameters, by name.
    """

    weights: Checkpoint
    scheme: StoredScheme
    places: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """By that key, the key of the checkpoint."""
        found = {}
        for key in self.weights.keys:
            module, _, name = key.rpartition(".")
            if name in _PACKED:
                found[f"{module}.{_PACKED[name]}"] = key
            elif name not in _BESIDE:
                found[key] = key
        return found

    def values(self, key: str) -> torch.Tensor:
        """The tensor as it is, or opened to float32.

        Raises:
            ModelError: its parts do not fit together.
        """
        source = self.sources[key]
        module, _, name = source.rpartition(".")
        if name not in _PACKED and not self._is_quantised(source):
            tensor: torch.Tensor = self.weights.slice(source)[...]
            return tensor
        with self._fitting(source):
            return self._opened(module, source)

    @contextmanager
    def _fitting(self, source: str) -> Iterator[None]:
        """What torch says of parts that do not fit together, as a ModelError."""
        try:
            yield
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError) as error:
            raise ModelError(
                f"{self.weights.folder} holds {source} with scales or zero points that do not fit it ({error}). Copy "
                "or download it again, or take another model"
            ) from error

    def _is_quantised(self, source: str) -> bool:
        dtype = self.weights.tensor(source).dtype
        return source.endswith(".weight") and (dtype == "I8" or dtype.startswith("F8_"))

    def _opened(self, module: str, source: str) -> torch.Tensor:
        scale = self._scale(module)
        if source.endswith(".weight") and not self.scheme.integers:
            return _scaled(self._read(source), scale, self.scheme.block)
        codes, zeros = self._codes(module, source)
        groups = self._groups(module, codes.shape[1], scale.shape[1])
        scale, opened = scale.expand(len(codes), -1), torch.empty(codes.shape)
        for start in range(0, len(codes), _ROWS):
            rows = slice(start, start + _ROWS)
            part = codes[rows].float()
            if zeros is not None:
                part -= zeros[rows].float()[:, groups]
            opened[rows] = part * scale[rows][:, groups]
        return opened

    def _read(self, key: str) -> torch.Tensor:
        if key not in self.weights.file_of:
            raise ModelError(f"{self.weights.folder} lacks {key}, without which its matrix cannot be read")
        tensor: torch.Tensor = self.weights.slice(key)[...]
        return tensor

    def _held(self, key: str) -> torch.Tensor | None:
        return self._read(key) if key in self.weights.file_of else None

    def _scale(self, module: str) -> torch.Tensor:
        """Float32 [out or 1, groups]."""
        names = ("scales", "weight_scale_inv", "weight_scale")
        name = next((name for name in names if f"{module}.{name}" in self.weights.file_of), names[-1])
        scale = self._read(f"{module}.{name}").float()
        if name == "scales":
            return scale.t().contiguous()
        return scale.reshape(len(scale), -1) if scale.dim() else scale.reshape(1, 1)

    def _groups(self, module: str, width: int, count: int) -> torch.Tensor:
        """Of each input, which scale is its."""
        for name in ("g_idx", "weight_g_idx"):
            stated = self._held(f"{module}.{name}")
            if stated is not None and stated.shape != (width,):
                raise ValueError(f"groups {list(stated.shape)} for {width} inputs")
            if stated is not None and bool((stated >= 0).all()):
                return stated.long()
        if width % count:
            raise ValueError(f"{count} scales for {width} inputs")
        return torch.arange(width) // (width // count)

    def _codes(self, module: str, source: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Whole numbers [out, in], and zero points [out, groups], None if these are nought."""
        bits, held = self.scheme.bits, self._read(source)
        zeros = self._held(f"{module}.weight_zero_point")
        if source.endswith(".weight"):
            return held, zeros if zeros is None else zeros.reshape(len(zeros), -1).expand(len(held), -1)
        if source.endswith(".weight_packed"):
            shape = self._read(f"{module}.weight_shape").tolist()
            middle = 1 << (bits - 1)
            codes = _unpacked(held, bits)[:, : shape[1]].to(torch.int16) - middle
            if codes.shape != tuple(shape):
                raise ValueError(f"{list(codes.shape)} values for a matrix of {shape}")
            if zeros is not None:
                zeros = _unpacked(zeros.t(), bits).t()[: shape[0]].to(torch.int16) - middle
            return codes, zeros
        points = _unpacked(self._read(f"{module}.qzeros"), bits)
        if self.scheme.method == "awq":
            return _in_order(_unpacked(held, bits)).t(), _in_order(points).t()
        # GPTQ packs inputs, one below the other; v1 of the format stores one less than the zero point
        return _unpacked(held.t(), bits), points.to(torch.int16).t() + self.scheme.zero_offset

    # --- in the kernels' bits

    def kind(self, name: str) -> str | None:
        """The kind of GGUF that has every value of parameter `name` to the bit; None if there is none.

        Raises: as `values`.
        """
        with self._fitting(name):
            return None if self._exact(name) is None else self.scheme.kind

    def pieces(self, name: str, expert: int | None, unit: int) -> tuple[np.ndarray]:
        """The matrix in that kind, as `GgufWeights.pieces` has it, in one piece. Only of a parameter that has a `kind`.

        Raises: as `values`.
        """
        with self._fitting(name):
            return (self._blocks(name),)

    def _blocks(self, name: str) -> np.ndarray:
        found = self._exact(name)
        assert found is not None
        module, source, scale = found
        codes, zeros = self._codes(module, source)
        if zeros is not None:
            codes = codes.to(torch.int16) - zeros[:, :1].to(torch.int16)
        rows, width = codes.shape
        wide = scale.half().repeat_interleave(width // SCALE_RUN // scale.shape[1], 1).expand(rows, -1).contiguous()
        halves = wide.reshape(rows, -1, 1).view(torch.uint8)
        blocks = codes.reshape(rows, -1, SCALE_RUN)
        if self.scheme.bits == 4:
            shifted = (blocks + 8).to(torch.uint8)
            held = shifted[..., : SCALE_RUN // 2] | shifted[..., SCALE_RUN // 2 :] << 4
        else:
            held = blocks.to(torch.int8).view(torch.uint8)
        return torch.cat([halves, held], 2).reshape(rows, -1).numpy()

    def _exact(self, name: str) -> tuple[str, str, torch.Tensor] | None:
        """Module, key and scales of a matrix that a kind of GGUF has to the bit: of whole numbers around nought, with
        scales for runs of inputs, that are numbers of 16 bits."""
        key = self._keys.get(name)
        if key is None or self.scheme.kind is None:
            return None
        source = self.sources[key]
        module, _, last = source.rpartition(".")
        if last not in _PACKED and not self._is_quantised(source):
            return None
        scale = self._scale(module)
        rows, width = self._shape(module, source)
        if (
            (rows, width) != self.parameters.get(name, (rows, width))
            or width % scale.shape[1]
            or (width // scale.shape[1]) % SCALE_RUN
            or not torch.equal(scale, scale.half().float())
        ):
            return None
        groups = self._groups(module, width, scale.shape[1])
        in_order = torch.equal(groups, torch.arange(width) // (width // scale.shape[1]))
        return (module, source, scale) if in_order and self._is_centred(module, source) else None

    def _shape(self, module: str, source: str) -> tuple[int, int]:
        """Of the matrix: out, in."""
        rows, width = self.weights.tensor(source).shape
        if source.endswith(".qweight"):
            return width, rows * (32 // self.scheme.bits)
        if source.endswith(".weight_packed"):
            held = self._read(f"{module}.weight_shape").tolist()
            if not 0 < held[1] <= width * (32 // self.scheme.bits):
                raise ValueError(f"{held[1]} inputs in {width} numbers of 32 bits")
            return rows, held[1]
        return rows, width

    def _is_centred(self, module: str, source: str) -> bool:
        """Whether all zero points are the middle of the codes, which GGUF's kinds take for granted."""
        if not source.endswith(".qweight"):
            return self._held(f"{module}.weight_zero_point") is None
        points = _unpacked(self._read(f"{module}.qzeros"), self.scheme.bits).to(torch.int16) + self.scheme.zero_offset
        return bool((points == 1 << (self.scheme.bits - 1)).all())

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """By parameter, the key that alone fills it."""
        return {place: key for key, place in self.places.items()}


def _unpacked(held: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, columns * 32 / bits] of int32 [rows, columns], the lowest bits first."""
    if held.dtype != torch.int32 or held.dim() != 2:
        raise ValueError(f"{held.dtype} {list(held.shape)} where codes are packed in int32")
    nbytes = held.contiguous().view(torch.uint8)
    return nbytes if bits == 8 else torch.stack((nbytes & 15, nbytes >> 4), 2).reshape(len(held), -1)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's order of the eight codes of a number, undone."""
    return codes.reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER].reshape(len(codes), -1)


def _scaled(held: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Floats of eight bits [out, in] times their scales: one, one for each row, or one for each block."""
    values = held.float()
    rows, width = values.shape
    if scale.numel() == 1:
        return values.mul_(scale.reshape(()))
    if scale.shape == (rows, 1):
        return values.mul_(scale)
    tall, wide = block or (max(1, rows // scale.shape[0]), max(1, width // scale.shape[1]))
    if scale.shape != (-(-rows // tall), -(-width // wide)):
        raise ValueError(f"scales {list(scale.shape)} for blocks of {tall} x {wide} of {rows} x {width} values")
    across = scale.repeat_interleave(min(wide, width), 1)[:, :width]
    for number, start in enumerate(range(0, rows, tall)):
        values[start : start + tall] *= across[number]
    return values
