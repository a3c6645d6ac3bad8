"""What a batch request is for the threads that compute: bytes to tensors, a pass, tensors to bytes.

Hashing and unpacking run in worker threads, the pass on the compute thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...protocols import wire_pb2 as wire
from ...protocols.framing import TensorError
from ...protocols.inference import bad_request
from ...protocols.tensors import DTYPES, arrives_finite, decode, encode
from ...protocols.training import (
    PROMPTS,
    BatchTerms,
    KeptSet,
    LoraName,
    MicroBatch,
    hash_of_keep,
    hash_of_payloads,
)
from .passes import Batch, Gradients, PassGenerator, SavedActivations, SpanPasses


@dataclass(frozen=True)
class KeptTensors(KeptSet):
    """Unpacked, by their names; their bytes are gone."""

    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class BatchRequest:
    """A micro-batch, ready to be computed: its bytes are gone. While its gradient is on its way it has no hash, but the
    bytes of its hidden states."""

    asked: MicroBatch
    batch: Batch
    request_hash: bytes = b""


@dataclass(frozen=True)
class PackedReply:
    """A reply's tensors as they go out."""

    tensors: list[wire.Tensor]
    payloads: list[bytes]
    hash: bytes


def unpack_keep(keep: wire.Keep, payloads: Sequence[bytearray]) -> KeptTensors:
    """
    Raises:
        Refusal: values that are not finite.
    """
    described = hash_of_keep(keep, hash_of_payloads(payloads))
    tensors = {
        name: _finite(tensor, payload, f"the tensor {name!r}")
        for name, tensor, payload in zip(keep.names, keep.tensors, payloads, strict=True)
    }
    return KeptTensors(keep, (), described, tensors)


def unpack_request(protocol: str, terms: BatchTerms, asked: MicroBatch) -> BatchRequest:
    """A checked request with its bytes, which it takes over, and what it uses of `KeptTensors`.

    Raises:
        Refusal: values that are not finite.
    """
    message, payloads, kept = asked.message, asked.payloads, asked.kept
    hidden = _finite(message.tensors[0], payloads[0], "the hidden states")
    rows, tokens = hidden.shape[:2]
    mask = positions = None
    if message.mask:
        bits = torch.frombuffer(bytearray(message.mask), dtype=torch.uint8)
        unpacked = bits.unsqueeze(1).bitwise_right_shift(torch.arange(7, -1, -1, dtype=torch.uint8)) & 1
        mask = unpacked.view(-1)[: rows * tokens].view(rows, tokens).bool()
    if message.positions:
        positions = torch.tensor(message.positions, dtype=torch.long).view(-1, rows, tokens)
        positions = positions[0] if len(positions) == 1 else positions
    tensors = kept.tensors if isinstance(kept, KeptTensors) else {}
    lora = {parsed: tensor for name, tensor in tensors.items() if (parsed := LoraName.parse(name)) is not None}
    batch = Batch(terms.span, hidden, mask, positions, tensors.get(PROMPTS), lora)
    if len(payloads) < len(message.tensors):
        return BatchRequest(asked, batch)
    if len(payloads) > 1:
        batch = replace(batch, gradient=_finite(message.tensors[1], payloads[1], "the gradient"))
    return BatchRequest(replace(asked, payloads=()), batch, asked.hash(protocol))


def with_gradient(protocol: str, request: BatchRequest, payload: bytearray) -> BatchRequest:
    """The request with its gradient, which has come.

    Raises:
        Refusal: values that are not finite.
    """
    asked = replace(request.asked, payloads=(*request.asked.payloads, payload))
    batch = replace(request.batch, gradient=_finite(asked.message.tensors[1], payload, "the gradient"))
    return BatchRequest(replace(asked, payloads=()), batch, asked.hash(protocol))


def run_request(
    request: BatchRequest, passes: SpanPasses, saved: SavedActivations | None = None
) -> PassGenerator[list[torch.Tensor]]:
    """The pass, which ends with the reply's tensors on the CPU, in the dtypes that were asked for.

    With `saved` it is the second half of a backward pass.

    Raises:
        Refusal: values that are not finite, of hidden states that are too large for the blocks or the stream.
    """
    described = list(request.asked.message.tensors[:1])
    gradient, kept = request.batch.gradient, request.asked.kept
    if gradient is None:
        results = [(yield from passes.forward(request.batch))]
    else:
        if saved is None:
            gradients = yield from passes.backward(request.batch, gradient)
        else:
            gradients = yield from passes.resume(saved, gradient)
        results = [gradients.hidden]
        if kept is not None:
            described += kept.keep.tensors
            results += [gradient_of(gradients, name) for name in kept.keep.names]
    for result, tensor in zip(results, described, strict=True):
        if not arrives_finite(result, tensor.codec, DTYPES[tensor.dtype]):
            raise bad_request("what the blocks make of this batch is not finite, or too large for the stream")
    return [result.to("cpu", DTYPES[tensor.dtype]) for result, tensor in zip(results, described, strict=True)]


def gradient_of(gradients: Gradients, name: str) -> torch.Tensor:
    """The gradient of the kept tensor `name`."""
    parsed = LoraName.parse(name)
    if parsed is not None:
        return gradients.lora[parsed]
    assert gradients.prompts is not None
    return gradients.prompts


def pack(request: BatchRequest, results: Sequence[torch.Tensor]) -> PackedReply:
    """The reply, under the codecs that the request came with."""
    kept = request.asked.kept
    described = [*request.asked.message.tensors[:1], *(kept.keep.tensors if kept is not None else ())]
    packed = [encode(result, tensor.codec) for result, tensor in zip(results, described, strict=False)]
    payloads = [payload for _, payload in packed]
    return PackedReply([tensor for tensor, _ in packed], payloads, hash_of_payloads(payloads))


def _finite(header: wire.Tensor, payload: bytes | bytearray, what: str) -> torch.Tensor:
    try:
        tensor = decode(header, payload)
    except TensorError as error:
        raise bad_request(str(error)) from None
    if not torch.isfinite(tensor).all():
        raise bad_request(f"{what} hold NaN or infinity" if what.endswith("s") else f"{what} holds NaN or infinity")
    return tensor
