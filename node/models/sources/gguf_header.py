"""The header of a GGUF file: its plain metadata and where its tensors stand.

Read here and not by the `gguf` package's reader: that one takes seconds for a large vocabulary and gives a
stack trace for a truncated file. Format: magic, version, counts, metadata (key, type, value), tensor table,
aligned data; all little-endian. The file is a stranger's: what it says of lengths is bounded before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from ...errors import ModelError

Scalar = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS: Final = 8
_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_KEYS: Final = 4096
_MAX_TENSORS: Final = 200_000
_MAX_ENTRIES: Final = 4_000_000
"""Of all arrays together: a vocabulary of 262,144 tokens, with scores, types and merges, has 1,300,000."""
_AGAIN = "Copy or download it again."


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: `file[start:start + nbytes]`, quantised as `quantisation` (a GGMLQuantizationType)."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    quantisation: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata without arrays (of those, only the length is kept) and the tensors in the file's order."""

    metadata: Mapping[str, Scalar]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(file: Path) -> GgufHeader:
    """Reads and checks the header of `file`.

    Raises:
        ModelError: if this is no GGUF file, or is truncated, or has a header beyond the bounds above, or holds a
            quantisation that is not known.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file. {_AGAIN}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(view, file, size).header()
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    except (struct.error, UnicodeDecodeError, IndexError, RecursionError):
        raise ModelError(f"{file} is truncated or damaged in its header, at {size:,} bytes. {_AGAIN}") from None


class _Reader:
    def __init__(self, view: mmap.mmap, file: Path, size: int) -> None:
        self._view, self._file, self._size = view, file, size
        self._place = 4
        self._entries = 0

    def header(self) -> GgufHeader:
        version, tensor_count, metadata_count = self._take("IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"{self._file} has GGUF version {version}; versions 2 and 3 can be read.")
        self._bound(metadata_count, _MAX_KEYS, "keys")
        self._bound(tensor_count, _MAX_TENSORS, "tensors")
        metadata = {}
        for _ in range(metadata_count):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        table = [self._table_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._file} has a damaged header (alignment {alignment!r}). {_AGAIN}")
        origin = -(-self._place // alignment) * alignment
        tensors = tuple(self._tensor(origin, *entry) for entry in table)
        end = max((tensor.start + tensor.nbytes for tensor in tensors), default=origin)
        if end > self._size:
            raise ModelError(
                f"{self._file} is truncated: its tensors end at {end:,} bytes, the file has {self._size:,}. {_AGAIN}"
            )
        return GgufHeader(metadata, tensors)

    def _tensor(self, origin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise ModelError(
                f"{self._file} holds {name!r} in a quantisation ({kind}) that is not known here. A newer "
                "`gguf` package may know it."
            ) from None
        if not shape or shape[-1] % per_block:
            raise ModelError(f"{self._file} gives {name!r} the impossible shape {list(shape)}. {_AGAIN}")
        return GgufTensor(name, shape, kind, origin + offset, prod(shape) // per_block * block_bytes)

    def _table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self._file} gives {name!r} {dimensions} dimensions. {_AGAIN}")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _value(self, kind: int) -> Scalar:
        if kind in _SCALARS:
            value: Scalar = self._take(_SCALARS[kind])[0]
            return value
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"{self._file} has a damaged header (value type {kind}). {_AGAIN}")
        element, count = self._take("IQ")
        self._entries += count
        self._bound(self._entries, _MAX_ENTRIES, "entries of arrays")
        if element in _SCALARS:
            self._skip(count * struct.calcsize(f"<{_SCALARS[element]}"))
        else:
            for _ in range(count):
                if element == _STRING:
                    self._skip(self._take("Q")[0])
                else:
                    self._value(element)
        return int(count)

    def _string(self) -> str:
        (length,) = self._take("Q")
        start = self._place
        self._skip(length)
        return self._view[start : self._place].decode()

    def _take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{form}", self._view, self._place)
        self._skip(struct.calcsize(f"<{form}"))
        return values

    def _skip(self, nbytes: int) -> None:
        self._place += nbytes
        if self._place > self._size:
            raise IndexError
        self._bound(self._place, _MAX_HEADER_BYTES, "bytes of header")

    def _bound(self, number: int, most: int, what: str) -> None:
        if number > most:
            raise ModelError(f"{self._file} has {number:,} {what}; at most {most:,} are read. {_AGAIN}")
