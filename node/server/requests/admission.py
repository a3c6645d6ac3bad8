"""What a server takes: pure checks of sessions and steps against what it hosts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ....protocols import wire_pb2 as wire
from ....protocols.framing import CODECS, ITEM_BYTES, TensorError, wire_nbytes
from ....protocols.ids import Span
from ....protocols.inference import MAX_STEP_BYTES, Refusal, SessionTerms, bad_request

STEP_TOKENS: Final = 2048
"""Rows times positions of one step."""
MAX_TARGETS: Final = 256


@dataclass(frozen=True)
class Hosted:
    """What this server holds and stands for in its receipts."""

    model_version: bytes
    model_name: str
    num_blocks: int
    span: Span
    hidden_size: int
    dtype: str
    quantisation: str
    max_length: int


def check_hosted(model_version: bytes, span: Span, codec: str, dtype: str, hosted: Hosted) -> None:
    """Whether these blocks are here, and such tensors can be read.

    Raises:
        Refusal: with the code and a sentence for the client.
    """
    if model_version != hosted.model_version:
        raise Refusal(
            wire.ERROR_UNKNOWN_MODEL,
            f"this server holds {hosted.model_name} version {hosted.model_version.hex()[:12]}, "
            f"not version {model_version.hex()[:12]}",
        )
    if not hosted.span.covers(span):
        raise Refusal(wire.ERROR_SPAN_NOT_HOSTED, f"blocks {span} are wanted, {hosted.span} are here")
    if codec not in CODECS:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    if dtype not in ITEM_BYTES:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")


def check_client(peer_id: str, allowed: Collection[str]) -> None:
    """Whether this client may use the server; no `allowed` allows everybody.

    Raises:
        Refusal: ERROR_NOT_ALLOWED.
    """
    if allowed and peer_id not in allowed:
        raise Refusal(
            wire.ERROR_NOT_ALLOWED,
            f"it serves only the clients that its owner has listed with --allow-client, and {peer_id} is none of them",
        )


def check_terms(terms: SessionTerms, hosted: Hosted) -> None:
    """Whether this server can hold such a session at all.

    Raises:
        Refusal: with the code and a sentence for the client.
    """
    check_hosted(terms.model_version, terms.span, terms.codec, terms.dtype, hosted)
    if terms.max_length > hosted.max_length:
        raise Refusal(wire.ERROR_TOO_LONG, f"the model takes {hosted.max_length} tokens, not {terms.max_length}")


def check_step(
    step: wire.Step,
    tensors: list[wire.Tensor],
    terms: SessionTerms,
    hosted: Hosted,
    *,
    last: int,
    position: int,
    route_epoch: int,
) -> None:
    """Whether a step fits its session, before any byte of it is interpreted.

    `last` is the sequence number of the last step done, `position` the tokens held, `route_epoch` the newest seen.

    Raises:
        Refusal: ERROR_TOO_LONG leaves the session usable; every other ends it.
    """
    if step.sequence <= last:
        raise bad_request(f"step {step.sequence} came after step {last}")
    if step.route_epoch < route_epoch:
        raise bad_request(f"the step is of route epoch {step.route_epoch}; the session is at {route_epoch}")
    if len(step.targets) > MAX_TARGETS:
        raise bad_request(f"{len(step.targets)} targets; at most {MAX_TARGETS} are allowed")
    if len(tensors) != 1:
        raise bad_request(f"a step carries one tensor, not {len(tensors)}")
    tensor = tensors[0]
    shape = tuple(tensor.shape)
    if len(shape) != 3 or shape[0] != terms.batch or shape[2] != hosted.hidden_size or shape[1] < 1:
        raise bad_request(f"shape {shape} is not [{terms.batch}, tokens, {hosted.hidden_size}]")
    if tensor.codec != terms.codec or tensor.dtype != terms.dtype:
        raise bad_request(
            f"{tensor.dtype} with codec {tensor.codec!r} came; the session speaks {terms.dtype} with {terms.codec!r}"
        )
    try:
        if tensor.nbytes != wire_nbytes(shape, tensor.dtype, tensor.codec) or tensor.nbytes > MAX_STEP_BYTES:
            raise bad_request(f"{tensor.nbytes} bytes cannot be shape {shape} as {tensor.dtype}")
    except TensorError as error:
        raise bad_request(str(error)) from None
    if shape[1] > step_tokens(terms.batch):
        raise bad_request(f"{shape[1]} tokens in one step; at most {step_tokens(terms.batch)} were granted")
    if step.position > position:
        raise bad_request(f"position {step.position} is ahead of the {position} tokens held")
    if step.reorder and (len(step.reorder) != terms.batch or max(step.reorder) >= terms.batch):
        raise bad_request(f"reorder takes a row for each of the {terms.batch} rows")
    if step.position + shape[1] > terms.max_length:
        raise Refusal(
            wire.ERROR_TOO_LONG,
            f"{step.position} tokens and {shape[1]} more pass the session's max_length of {terms.max_length}",
        )


def step_tokens(batch: int) -> int:
    """Tokens of a row that one step may carry."""
    return max(1, STEP_TOKENS // batch)
