"""The header of a GGUF file: its plain metadata and where its tensors stand.

Read here and not by the `gguf` package's reader. That one takes seconds for a large vocabulary and gives a
stack trace for a truncated file. Format: magic, version, counts, metadata (key, type, value), tensor table,
aligned data; all little-endian. The file is a stranger's: what it says of lengths is bounded before it is believed.

A model may be split into files NAME-00001-of-00003.gguf: the first has the metadata, each has its own tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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
MAX_PARTS: Final = 1000
ABSENT: Final = ".absent"
"""Ends the name of a file that has the header of one whose tensors are not on this disk."""
PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_AGAIN = "Copy or download it again."


class CutHeader(ModelError):
    """A header that ends before it is complete, or is damaged so."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: `file[start:start + nbytes]`, held as `kind` (the name of a GGMLQuantizationType).

    `stamp` is the file's size and time of change when its header was read.
    """

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    kind: str
    start: int
    nbytes: int
    stamp: tuple[int, int]


@dataclass(frozen=True)
class GgufHeader:
    """Metadata, with the lengths of arrays, the tensors in the file's order, and where the header ends. `arrays`: those
    of numbers that are as short as a list of blocks. `places`: where the entry of a key begins and ends, in bytes."""

    metadata: Mapping[str, Scalar]
    tensors: tuple[GgufTensor, ...]
    end: int
    arrays: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """The files of the model that `file` is, or is a part of, in order.

    Raises:
        ModelError: as `read_gguf_header`; a part is missing, or is not named as parts are.
    """
    count = read_gguf_header(file).metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return (file,)
    named = PART.fullmatch(file.name)
    if named is None or int(named["count"]) != count or count > MAX_PARTS:
        raise ModelError(
            f"{file} is one of {count} parts, which are found by their names (NAME-00001-of-{count:05}.gguf): give it "
            "its name again."
        )
    parts = tuple(file.with_name(f"{named['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    for number, part in enumerate(parts):
        if not part.is_file():
            raise ModelError(f"{file} is one of {count} parts, of which {part} is missing. Copy or download it, too.")
        said = read_gguf_header(part).metadata
        if (said.get("split.count"), said.get("split.no")) != (count, number):
            raise ModelError(f"{part} is not part {number + 1} of {count}, which its name says. {_AGAIN}")
    return parts


def read_gguf_header(file: Path) -> GgufHeader:
    """Reads and checks the header of `file`.

    Raises:
        ModelError: if this is no GGUF file, is truncated, or has a header beyond the bounds above. Also if its
            quantisation is not known.
    """
    try:
        stat = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ModelError(f"Cannot read {file}: {getattr(error, 'strerror', error)}.") from error
    return _read(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=512)
def _read(file: Path, size: int, modified: int, changed: int) -> GgufHeader:
    """The header of `file` while it has this size and these times. It is asked for often, and a vocabulary is long."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file. {_AGAIN}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(view, file, size, modified).header()
    except ModelError:
        raise
    except ValueError:  # it is empty by now, or its texts are none
        raise CutHeader(f"{file} is truncated or damaged in its header, at {size:,} bytes. {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    except (struct.error, IndexError, RecursionError):
        raise CutHeader(f"{file} is truncated or damaged in its header, at {size:,} bytes. {_AGAIN}") from None


class _Reader:
    def __init__(self, view: mmap.mmap, file: Path, size: int, modified: int) -> None:
        self._view, self._file, self._size, self._modified = view, file, size, modified
        self._place = 4
        self._entries = 0
        self._short: tuple[Scalar, ...] = ()  # what was read last as a short array of numbers

    def header(self) -> GgufHeader:
        version, tensor_count, metadata_count = self._take("IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"{self._file} has GGUF version {version}; versions 2 and 3 can be read.")
        self._bound(metadata_count, _MAX_KEYS, "keys")
        self._bound(tensor_count, _MAX_TENSORS, "tensors")
        metadata: dict[str, Scalar] = {}
        arrays: dict[str, tuple[Scalar, ...]] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(metadata_count):
            begin, key = self._place, self._string()
            self._short = ()
            metadata[key] = self._value(self._take("I")[0])
            if self._short:
                arrays[key] = self._short
            places[key] = begin, self._place
        table = [self._table_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_HEADER_BYTES:
            raise ModelError(f"{self._file} has a damaged header (alignment {alignment!r}). {_AGAIN}")
        origin = -(-self._place // alignment) * alignment
        tensors = tuple(self._tensor(origin, *entry) for entry in table)
        end = max((tensor.start + tensor.nbytes for tensor in tensors), default=origin)
        if end > self._size and not self._file.name.endswith(ABSENT):
            raise ModelError(
                f"{self._file} is truncated: its tensors end at {end:,} bytes, the file has {self._size:,}. {_AGAIN}"
            )
        self._check_places(tensors)
        return GgufHeader(metadata, tensors, origin, arrays, places)

    def _check_places(self, tensors: tuple[GgufTensor, ...]) -> None:
        """That each tensor has bytes, and a name, of its own."""
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ModelError(f"{self._file} has two tensors of one name. {_AGAIN}")
        before: GgufTensor | None = None
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            if before is not None and tensor.start < before.start + before.nbytes:
                raise ModelError(f"{self._file} has {before.name!r} and {tensor.name!r} at the same bytes. {_AGAIN}")
            before = tensor

    def _tensor(self, origin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise ModelError(
                f"{self._file} holds {name!r} in a quantisation ({kind}) that is not known here. A newer "
                "`gguf` package may know it."
            ) from None
        if not shape or 0 in shape or shape[-1] % per_block:
            raise ModelError(f"{self._file} gives {name!r} the impossible shape {list(shape)}. {_AGAIN}")
        nbytes = prod(shape) // per_block * block_bytes
        stamp = self._size, self._modified
        return GgufTensor(name, shape, GGMLQuantizationType(kind).name, origin + offset, nbytes, stamp)

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
        if element in _SCALARS and count <= _MAX_KEYS:
            self._short = self._take(f"{count}{_SCALARS[element]}")
        elif element in _SCALARS:
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
