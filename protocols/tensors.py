"""How tensors stand on the wire: dtype, shape and codec.

Runs where torch runs (a server's compute thread, a client's caller), never on the trio thread. Bytes are little-endian
and contiguous. Codecs:

- `none`: the values as they are;
- `float16`, `bfloat16`: cast, and cast back on arrival;
- `int8-block64`: absmax quantisation in blocks of 64 consecutive values, as in Petals (NeurIPS 2023, section 3.1,
  after Dettmers et al. 2022b): all float16 scales first, then one int8 per value. About 1.03 bytes a value.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from functools import partial
from typing import Final

import torch

from .framing import CODECS, INT8_BLOCK, TensorError, wire_nbytes
from .wire_pb2 import Tensor as WireTensor

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

if sys.byteorder != "little":  # pragma: no cover - torch itself hardly runs there
    raise ImportError("petalnode moves tensors as little-endian bytes and does not run on big-endian machines")


def dtype_name(dtype: torch.dtype) -> str:
    """The wire's name of a torch dtype.

    Raises:
        TensorError: for a dtype that does not travel.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise TensorError(f"tensors of {dtype} do not travel; use one of {', '.join(DTYPES)}")


def largest(codec: str, dtype: torch.dtype) -> float:
    """Values of at most this size arrive finite, if they travel under `codec` and are read as `dtype`."""
    limit = torch.finfo(dtype).max
    if codec in ("float16", "bfloat16"):
        return 0.99 * min(limit, torch.finfo(DTYPES[codec]).max)  # both casts may round up
    if codec == "int8-block64":
        return 0.99 * min(limit, 127 * torch.finfo(torch.float16).max)
    return limit


def arrives_finite(tensor: torch.Tensor, codec: str, dtype: torch.dtype) -> bool:
    """Whether `tensor` is finite and stays so, travelling under `codec` as `dtype`."""
    # As a Python number: compared with a tensor of few bits, the limit would be rounded to them.
    return not tensor.numel() or float(tensor.detach().abs().amax()) <= largest(codec, dtype)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    # bfloat16 has no numpy type; its bytes are what counts.
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def encode(tensor: torch.Tensor, codec: str) -> tuple[WireTensor, bytes]:
    """Header and bytes of `tensor` (any shape; float32, float16 or bfloat16; any device).

    Raises:
        TensorError: for a dtype or codec that does not travel.
    """
    tensor = tensor.detach().to("cpu")
    name = dtype_name(tensor.dtype)
    if codec == "none":
        payload = _raw(tensor)
    elif codec in ("float16", "bfloat16"):
        payload = _raw(tensor.to(DTYPES[codec]))
    elif codec == "int8-block64":
        payload = _encode_int8(tensor)
    else:
        raise TensorError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    return WireTensor(shape=tensor.shape, dtype=name, codec=codec, nbytes=len(payload)), payload


def decode(header: WireTensor, payload: bytes | bytearray) -> torch.Tensor:
    """The tensor of `header.shape` and `header.dtype`, on the CPU; it may stand in the memory of a bytearray.

    Raises:
        TensorError: if the bytes do not fit the header.
    """
    shape = tuple(header.shape)
    expected = wire_nbytes(shape, header.dtype, header.codec)
    if len(payload) != expected or header.nbytes != expected:
        raise TensorError(f"{len(payload)} bytes came for a tensor that takes {expected} ({shape}, {header.codec})")
    dtype = DTYPES[header.dtype]
    if not expected:
        return torch.empty(shape, dtype=dtype)
    # torch wants memory that it may write to
    data = payload if isinstance(payload, bytearray) else bytearray(payload)
    if header.codec == "none":
        return torch.frombuffer(data, dtype=dtype).view(shape)
    if header.codec == "int8-block64":
        return _decode_int8(data, shape, dtype)
    return torch.frombuffer(data, dtype=DTYPES[header.codec]).to(dtype).view(shape)


def decode_answer(asked: WireTensor, payload: bytes | bytearray) -> torch.Tensor:
    """A server's answer to hidden states [rows, tokens, width] with the header `asked`: of the same form, but without
    what is for single blocks and may follow them: it may be narrower.

    Raises:
        TensorError: the bytes fit no such answer.
    """
    described = WireTensor()
    described.CopyFrom(asked)
    if len(asked.shape) == 3 and len(payload) < asked.nbytes:
        rows, tokens, width = asked.shape
        sizes = partial(_nbytes_of, asked, rows, tokens)
        described.shape[2] = bisect_left(range(1, width), len(payload), key=sizes) + 1
        described.nbytes = len(payload)
    return decode(described, payload)


def _nbytes_of(asked: WireTensor, rows: int, tokens: int, width: int) -> int:
    return wire_nbytes((rows, tokens, width), asked.dtype, asked.codec)


def _encode_int8(tensor: torch.Tensor) -> bytes:
    # In float32, because in bfloat16 a value just below the maximum rounds to 128 and wraps.
    flat = tensor.reshape(-1).float()
    blocks = _in_blocks(flat)
    # New memory costs more than computing, so there is as little of it as can be.
    scales = (torch.maximum(blocks.amax(dim=1), -blocks.amin(dim=1)) / 127).to(torch.float16)
    # Divide by the scale as it will be read back; a scale that float16 cannot hold above zero makes the block zero.
    divisor = scales.float().masked_fill(scales == 0, math.inf)
    quantised = (blocks / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return _raw(scales) + _raw(quantised.view(-1)[: flat.numel()])


def _decode_int8(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = math.prod(shape)
    count = math.ceil(values / INT8_BLOCK)
    scales = torch.frombuffer(data, dtype=torch.float16, count=count).float()
    blocks = _in_blocks(torch.frombuffer(data, dtype=torch.int8, offset=2 * count).float())
    return blocks.mul_(scales[:, None]).view(-1)[:values].to(dtype).reshape(shape)


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """[blocks, INT8_BLOCK], the last one filled up with zeros; the same memory where it is full."""
    missing = -flat.numel() % INT8_BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, INT8_BLOCK)
