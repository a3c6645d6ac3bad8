"""A file for one part of a model, of tensors that stand without gaps: what comes before their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Final

from ...crypto.safetensors_header import BadHeader, header_limits, parse_header
from ...protocols.weights import TreeEntry
from ..errors import ModelError
from .checkpoint import MAX_HEADER_BYTES

_GGUF_VERSION: Final = 3
_UINT32, _STRING = 4, 8  # kinds of values in GGUF's metadata


def safetensors_header(tensors: Sequence[TreeEntry], keys: Sequence[str]) -> bytes:
    """What stands before the bytes of a part in its file.

    Raises:
        ModelError: a tensor has other bytes than its shape takes, or a dtype that is not known here.
    """
    entries, place = {}, 0
    for key, entry in zip(keys, tensors, strict=True):
        offsets = [place, place + entry.nbytes]
        entries[key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        place += entry.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        found = parse_header(text, header_limits(MAX_HEADER_BYTES, len(keys)))
    except BadHeader as error:
        raise ModelError(f"the model cannot be read: {error}") from None
    if len(found.tensors) != len(tensors):
        raise ModelError("the model cannot be read: two of its tensors have one name")
    return len(text).to_bytes(8, "little") + text


def gguf_header(tensors: Sequence[TreeEntry], keys: Sequence[str], architecture: str) -> bytes:
    """The same for a GGUF file. Its tensors stand without gaps, so its alignment is 1.

    Raises:
        ModelError: a tensor has a quantisation that is not known here, or other bytes than its shape takes.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    header = b"GGUF" + struct.pack("<IQQ", _GGUF_VERSION, len(keys), 2)
    header += _text("general.architecture") + struct.pack("<I", _STRING) + _text(architecture)
    header += _text("general.alignment") + struct.pack("<II", _UINT32, 1)
    place = 0
    for key, entry in zip(keys, tensors, strict=True):
        try:
            kind = GGMLQuantizationType[entry.dtype]
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
        except KeyError:
            raise ModelError(f"the model holds {entry.name!r} in a quantisation that is not known here") from None
        values = 1
        for size in entry.shape:
            values *= size
        if not entry.shape or values % per_block or values // per_block * block_bytes != entry.nbytes:
            raise ModelError(f"the model gives {entry.name!r} the impossible shape {list(entry.shape)}")
        dimensions = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        header += _text(key) + dimensions + struct.pack("<IQ", int(kind), place)
        place += entry.nbytes
    return header


def _text(value: str) -> bytes:
    """As GGUF has a string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()
