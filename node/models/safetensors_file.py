"""The header of a `.safetensors` file: which tensors it holds and where their bytes stand.

Read without torch and checked before use, as files are truncated by failed copies. The format: 8 bytes
little-endian length, that many bytes of JSON (key -> dtype, shape, offsets relative to the end of the
header), then the tensors' bytes, row-major.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
_AGAIN = "Copy or download it again."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its bytes are `file[start:end]`. `dtype` is in the format's words ("F32", "BF16")."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(file: Path) -> Mapping[str, StoredTensor]:
    """All tensors of `file` by key.

    Raises:
        ModelError: if the file is missing, truncated or malformed; names it and what is wrong.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{file} is not a safetensors file. {_AGAIN}")
            if length > size - 8:
                raise ModelError(f"{file} is truncated: it ends inside its header, at {size:,} bytes. {_AGAIN}")
            text = stream.read(length)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing. {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{file} has a damaged header (it is not JSON). {_AGAIN}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a damaged header (it is not a JSON object). {_AGAIN}")
    header.pop("__metadata__", None)
    origin = 8 + length
    tensors = {key: _stored_tensor(file, origin, key, entry) for key, entry in header.items()}
    expected = max((tensor.end for tensor in tensors.values()), default=origin)
    if expected > size:
        raise ModelError(f"{file} is truncated: its tensors end at {expected:,} bytes, the file has {size:,}. {_AGAIN}")
    if expected < size:
        raise ModelError(f"{file} has {size - expected:,} bytes that belong to no tensor. {_AGAIN}")
    return tensors


def _stored_tensor(file: Path, origin: int, key: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        bits = _BITS[dtype] * math.prod(shape)
        sound = whole and (end - begin) * 8 == bits
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelError(
            f"{file}: the header's entry for {key!r} is damaged, or of a dtype that is not known here. {_AGAIN}"
        )
    return StoredTensor(key, file, dtype, tuple(shape), origin + begin, origin + end)
