"""Bytes of a GGUF file's tensors, and the values that they stand for.

They are read, not mapped: that a file shrinks meanwhile is an error to report, and would kill a process that maps it.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import ModelError
from .header import GgufTensor

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES: Final = 1 << 20  # of a file, that each thread holds at a time: sixty times as much where numpy opens them
_PLAIN: Final = {"F32": "<f4", "F16": "<f2"}


def row_count(tensor: GgufTensor) -> int:
    """How many rows the tensor has, one behind the other in the file."""
    return prod(tensor.shape[:-1])


def stored_rows(file: Path, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
    """The bytes of rows `first` .. `last` - 1, uint8 [rows, bytes of a row].

    Raises:
        ModelError: the file cannot be read, or is another one than its header was read of.
        MachineError: there is too little memory.
    """
    import numpy as np

    row_bytes = tensor.nbytes // row_count(tensor)
    rows = np.empty((last - first, row_bytes), np.uint8)
    left, place = rows.data.cast("B"), 0
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(tensor.start + first * row_bytes)
            while place < len(left):
                got = stream.readinto(left[place:])
                if not got:
                    raise ModelError(f"{file} became shorter while it was read. Run it again when it is complete.")
                place += got
            now = os.fstat(stream.fileno())
            if (now.st_size, now.st_mtime_ns) != tensor.stamp:
                raise ModelError(f"{file} changed while it was read. Run it again when it is complete.")
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    return rows


def stored_values(file: Path, tensor: GgufTensor) -> np.ndarray:
    """The float32 values of a whole tensor, as an array of its shape. Raises as `stored_rows`, and as `opened`."""
    import numpy as np

    values = np.empty((row_count(tensor), tensor.shape[-1]), np.float32)
    open_rows(file, tensor, values)
    return values.reshape(tensor.shape)


def open_rows(file: Path, tensor: GgufTensor, values: np.ndarray) -> None:
    """Puts the float32 values of all rows into `values`, a piece at a time.

    Raises:
        ModelError: as `stored_rows`; the installed `gguf` package cannot dequantise this kind.
    """
    step = max(1, PIECE_BYTES * row_count(tensor) // tensor.nbytes)
    for place in range(0, len(values), step):
        end = min(place + step, len(values))
        values[place:end] = _opened(file, tensor.kind, stored_rows(file, tensor, place, end))


def _opened(file: Path, kind: str, rows: np.ndarray) -> Any:
    from gguf import GGMLQuantizationType, dequantize

    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    try:
        return dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise ModelError(
            f"{file} is quantised as {kind}, which the installed `gguf` package cannot dequantise. Use a file in "
            "another quantisation."
        ) from error
