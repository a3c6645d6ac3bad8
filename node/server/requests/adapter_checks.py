"""What a server takes of an adapter that a client brings: pure checks, before any byte of it is read."""

from __future__ import annotations

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import (
    MAX_ADAPTER_BYTES,
    MAX_ADAPTER_TENSORS,
    Linears,
    block_of,
    check_tensors,
    hash_of_adapter,
)
from ....protocols.ids import PROTOCOL_VERSION, Span
from ....protocols.inference import Refusal, bad_request
from .admission import Hosted, check_hosted
from .batch_checks import check_bytes


def check_adapter(offer: wire.Adapter, hosted: Hosted, linears: Linears) -> Span:
    """Whether such an adapter can be used here; returns the blocks that it is for.

    Raises:
        Refusal: with the code and a sentence for the client.
    """
    if offer.protocol_version != PROTOCOL_VERSION:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"protocol version {offer.protocol_version}; this node speaks 1")
    try:
        span = Span(offer.span.start, offer.span.end)
    except ValueError as error:
        raise bad_request(str(error)) from None
    check_hosted(offer.model_version, span, "none", "float32", hosted)
    blocks = [(block.block, block.hash) for block in offer.blocks]
    if len({block for block, _ in blocks}) != len(blocks) or hash_of_adapter(blocks) != offer.hash:
        raise bad_request("the adapter's hash is not that of its blocks")
    if len(offer.names) != len(offer.tensors) or len(set(offer.names)) != len(offer.names):
        raise bad_request("an adapter takes a name of its own for each tensor")
    nbytes = sum(tensor.nbytes for tensor in offer.tensors)
    if len(offer.tensors) > MAX_ADAPTER_TENSORS or nbytes > MAX_ADAPTER_BYTES:
        raise Refusal(
            wire.ERROR_TOO_LONG,
            f"an adapter of {len(offer.tensors)} tensors and {nbytes >> 20} MiB; {MAX_ADAPTER_TENSORS} and "
            f"{MAX_ADAPTER_BYTES >> 20} MiB are allowed",
        )
    for tensor in offer.tensors:
        check_bytes(tensor)
    shapes = {name: tuple(each.shape) for name, each in zip(offer.names, offer.tensors, strict=True)}
    try:
        check_tensors(shapes, span, linears, hosted.hidden_size)
    except ValueError as error:
        raise bad_request(str(error)) from None
    if {block_of(name) for name in offer.names} != {block for block, _ in blocks if block in span}:
        raise bad_request(f"the tensors are not all that the adapter has for blocks {span}")
    return span
