"""What a server takes of batches without a cache: pure checks of works and of what they want kept."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import Linears, check_tensors
from ....protocols.framing import TensorError, wire_nbytes
from ....protocols.inference import Refusal, bad_request
from ....protocols.training import (
    MAX_KEPT_TENSORS,
    MICRO_BATCH_TOKENS,
    PROMPTS,
    BatchTerms,
    LoraName,
    check_shape,
    mask_bytes,
    raw_bytes,
)
from .admission import Hosted, check_hosted


def check_work_terms(terms: BatchTerms, hosted: Hosted) -> None:
    """Whether such works can be done here at all.

    Raises:
        Refusal: with the code and a sentence for the client.
    """
    check_hosted(terms.model_version, terms.span, terms.codec, terms.dtype, hosted)


def check_keep(keep: wire.Keep, terms: BatchTerms, hosted: Hosted, linears: Linears, *, last: int) -> None:
    """Whether tensors can be kept, before any byte of them is read.

    `linears` are the linear layers of the hosted blocks, `last` is the number of the newest set.

    Raises:
        Refusal
    """
    if keep.number != last + 1:
        raise bad_request(f"Keep {keep.number} came after {last}")
    if len(keep.names) != len(keep.tensors) or len(set(keep.names)) != len(keep.names):
        raise bad_request("Keep takes a name of its own for each tensor")
    if not 1 <= len(keep.tensors) <= MAX_KEPT_TENSORS:
        raise bad_request(f"Keep takes 1 to {MAX_KEPT_TENSORS} tensors, not {len(keep.tensors)}")
    lora: dict[str, tuple[int, ...]] = {}
    for name, tensor in zip(keep.names, keep.tensors, strict=True):
        check_bytes(tensor)
        shape = tuple(tensor.shape)
        if LoraName.parse(name) is not None:
            lora[name] = shape
        elif name != PROMPTS:
            raise Refusal(wire.ERROR_UNSUPPORTED, f"this server knows no tensor {name[:100]!r}: only prompts and LoRA")
        elif len(shape) != 4 or shape[0] != len(terms.span) or shape[3] != hosted.hidden_size or not math.prod(shape):
            raise bad_request(f"prompts of {shape} are not [{len(terms.span)}, rows, prefix, {hosted.hidden_size}]")
    try:
        check_tensors(lora, terms.span, linears, hosted.hidden_size)
    except ValueError as error:
        raise bad_request(str(error)) from None


def check_work(
    work: wire.BatchRequest,
    terms: BatchTerms,
    hosted: Hosted,
    kept: Mapping[int, wire.Keep],
    *,
    backward: bool,
    last: int,
) -> None:
    """Whether a work fits its stream, before any byte of it is read. `last` is the sequence number before it.

    Raises:
        Refusal
    """
    if work.sequence != last + 1:
        raise bad_request(f"work {work.sequence} came after work {last}")
    if len(work.tensors) != 1 + backward:
        raise bad_request(f"a {'backward' if backward else 'forward'} pass takes {1 + backward} tensors")
    if work.gradient_follows and not backward:
        raise bad_request("a forward pass takes no gradient")
    shape = tuple(work.tensors[0].shape)
    check_shape(shape, hosted.hidden_size)
    rows, tokens = shape[:2]
    for tensor in work.tensors:
        if tuple(tensor.shape) != shape:
            raise bad_request(f"a gradient of {tuple(tensor.shape)} is not of the hidden states' shape {shape}")
        if tensor.codec != terms.codec or tensor.dtype != terms.dtype:
            raise bad_request(
                f"{tensor.dtype} with codec {tensor.codec!r} came; the stream speaks {terms.dtype} with {terms.codec!r}"
            )
        check_bytes(tensor)
    if tokens > hosted.max_length:
        raise Refusal(wire.ERROR_TOO_LONG, f"the model takes {hosted.max_length} tokens, not {tokens}")
    if rows > 1 and rows * tokens > MICRO_BATCH_TOKENS:
        raise Refusal(wire.ERROR_TOO_LONG, f"{rows} x {tokens} tokens in one work; {MICRO_BATCH_TOKENS} are allowed")
    if work.mask and len(work.mask) != mask_bytes(shape):
        raise bad_request(f"a mask of {len(work.mask)} bytes does not fit {rows} x {tokens} tokens")
    if work.positions and (len(work.positions) != rows * tokens or max(work.positions) >= hosted.max_length):
        raise bad_request(f"positions take one number below {hosted.max_length} for each of {rows} x {tokens} tokens")
    keep = kept.get(work.kept)
    if keep is None and work.kept:
        raise bad_request(f"nothing is kept under number {work.kept}")
    if keep is not None:
        for name, tensor in zip(keep.names, keep.tensors, strict=True):
            if name == PROMPTS and (tensor.shape[1] not in (1, rows) or tensor.shape[2] > tokens):
                raise bad_request(f"prompts of {tuple(tensor.shape)} do not fit hidden states of {shape}")


def work_bytes(work: wire.BatchRequest, keep: wire.Keep | None) -> int:
    """What a checked work and its reply take, which has gradients of `keep` in a backward pass: raw values."""
    reply = raw_bytes(work.tensors[:1])
    if keep is not None and len(work.tensors) > 1:
        reply += raw_bytes(keep.tensors)
    return raw_bytes(work.tensors) + reply


def check_bytes(tensor: wire.Tensor) -> None:
    """
    Raises:
        Refusal: its size is not that of its shape.
    """
    try:
        if tensor.nbytes != wire_nbytes(tensor.shape, tensor.dtype, tensor.codec):
            raise bad_request(f"{tensor.nbytes} bytes cannot be shape {tuple(tensor.shape)} as {tensor.dtype}")
    except TensorError as error:
        raise bad_request(str(error)) from None
