"""The header of a safetensors file, from anyone: read within bounds, and checked before anything is done with it.

The format of a file: 8 bytes little-endian length, that many bytes of JSON (key -> dtype, shape, offsets relative to
the end of the header; and texts under `__metadata__`), then the tensors' bytes, row-major, without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .bounded_json import BadJson, JsonLimits, parse_json_object

LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"


@dataclass(frozen=True)
class HeaderLimits:
    """What the header of a file of tensors may have."""

    max_dimensions: int = 16
    values_of_tensor: int = 16
    """Of JSON, as `JsonLimits` counts them: 11, and one for each dimension."""
    values_of_metadata: int = 4096


HEADER: Final = HeaderLimits()
_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class BadHeader(ValueError):
    """The header is damaged; says how."""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor, whose bytes are those from `start` to `end` behind the header. `dtype` is in the format's words."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """
    Attributes:
        tensors: by key, without overlaps and gaps.
        end: bytes that have to stand behind the header.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, HeaderEntry]
    end: int


def header_limits(nbytes: int, tensors: int) -> JsonLimits:
    """What the header of a file of at most `tensors` tensors needs."""
    return JsonLimits(nbytes, HEADER.values_of_metadata + HEADER.values_of_tensor * tensors, depth=3)


def parse_header(text: bytes, limits: JsonLimits) -> SafetensorsHeader:
    """
    Raises:
        BadHeader: it is damaged, exceeds the limits, or has a dtype that is not known here.
    """
    try:
        header = parse_json_object(text, limits)
    except BadJson as error:
        raise BadHeader(str(error)) from None
    metadata = header.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader("its metadata are no texts")
    tensors = {key: _entry(key, said) for key, said in header.items()}
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise BadHeader("its tensors overlap, or leave a gap")
        end = entry.end
    return SafetensorsHeader(metadata, tensors, end)


def _entry(key: str, said: Any) -> HeaderEntry:
    try:
        dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        # Only then: a text times a number is a longer text, and the product of thousands of numbers takes seconds.
        few = len(shape) <= HEADER.max_dimensions
        sound = whole and few and (end - begin) * 8 == _BITS[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise BadHeader(f"the entry for {key[:200]!r} is damaged, or of a dtype that is not known here")
    return HeaderEntry(dtype, tuple(shape), begin, end)
