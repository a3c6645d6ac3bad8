"""What a tensor's header says about its bytes. Needs no torch, which takes two seconds to import.

The codecs are described in `tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from .wire_pb2 import Tensor as WireTensor

CODECS: Final = ("none", "float16", "bfloat16", "int8-block64")
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes that travel, and the bytes of a value."""
INT8_BLOCK: Final = 64


class TensorError(ValueError):
    """A tensor header or its bytes that cannot be read; the text says which part."""


def wire_nbytes(shape: Sequence[int], dtype: str, codec: str) -> int:
    """Bytes that a tensor takes on the wire.

    Raises:
        TensorError: for an unknown dtype or codec.
    """
    if dtype not in ITEM_BYTES:
        raise TensorError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    values = math.prod(shape)
    if codec == "none":
        return values * ITEM_BYTES[dtype]
    if codec in ("float16", "bfloat16"):
        return values * 2
    if codec == "int8-block64":
        return values + 2 * math.ceil(values / INT8_BLOCK)
    raise TensorError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")


def all_finite(header: WireTensor, payload: bytes | bytearray) -> bool:
    """Whether the values hold no NaN and no infinity. Quick enough for a decode step on any thread (5 us for 2 KiB)."""
    import numpy as np  # a tenth of a second, which commands without tensors do not pay

    if header.codec == "int8-block64":
        payload = payload[: 2 * math.ceil(math.prod(header.shape) / INT8_BLOCK)]  # the scales; integers are finite
        name = "float16"
    else:
        name = header.dtype if header.codec == "none" else header.codec
    if name == "float32":
        return bool(np.isfinite(np.frombuffer(payload, np.float32)).all())
    # In half precisions a value is not finite if all bits of its exponent are set.
    exponent = np.uint16(0x7C00 if name == "float16" else 0x7F80)
    return not bool(((np.frombuffer(payload, np.uint16) & exponent) == exponent).any())
