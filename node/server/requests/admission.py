"""What a server takes: pure checks of sessions, steps, batches and adapters against the blocks that it hosts.

All of them run before any byte of a tensor is read. They raise `Refusal` with the code and a sentence for the client.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import (
    MAX_ADAPTER_BYTES,
    MAX_ADAPTER_TENSORS,
    Linears,
    block_of,
    check_tensors,
    hash_of_adapter,
)
from ....protocols.framing import CODECS, ITEM_BYTES, TensorError, wire_nbytes
from ....protocols.ids import PROTOCOL_VERSION, Boundaries, Span
from ....protocols.inference import (
    INFERENCE,
    STEP_TOKENS,
    Refusal,
    SessionTerms,
    bad_request,
    check_format,
    check_hidden_states,
    check_position,
)
from ....protocols.prefix import LEAST_SHARED_SALT
from ....protocols.training import (
    MAX_KEPT_TENSORS,
    BatchTerms,
    check_kept,
    check_names,
    check_prompts,
    check_request,
    raw_bytes,
)

MAX_TARGETS: Final = 256
PrefixCache = Literal["own", "salted", "off"]
"""Who uses what sessions leave: the peer that left it, all who know its salt too, or nobody."""


@dataclass(frozen=True)
class Hosted:
    """What this server holds and stands for in its receipts. `features`: as `BlockSpan.features`. `boundaries` of
    its blocks; None: what travels is of the hidden size."""

    model_version: bytes
    model_name: str
    num_blocks: int
    span: Span
    hidden_size: int
    dtype: str
    quantisation: str
    max_length: int
    takes_positions: bool = False
    takes_groups: bool = False
    features: int = 0
    boundaries: Boundaries | None = None

    def width(self, block: int) -> int:
        """Of what enters the block of this number."""
        return self.hidden_size if self.boundaries is None else self.boundaries.width(block)


class PriorityPayments(Protocol):
    """Takes points that clients show for priority."""

    def take(self, opened: wire.Open, client: str, terms: SessionTerms) -> Any | None:
        """What was paid; None if what the client shows buys no priority here, which is no error."""

    def give_back(self, payment: Any | None) -> None:
        """The session was not granted: the client may show the payment again."""


# --- opening


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


def check_terms(terms: SessionTerms | BatchTerms, hosted: Hosted) -> None:
    """Whether this server can hold such a session, or compute such batches, at all."""
    check_hosted(terms.model_version, terms.span, terms.codec, terms.dtype, hosted)
    if isinstance(terms, SessionTerms) and terms.max_length > hosted.max_length:
        raise Refusal(wire.ERROR_TOO_LONG, f"the model takes {hosted.max_length} tokens, not {terms.max_length}")


def check_hosted(model_version: bytes, span: Span, codec: str, dtype: str, hosted: Hosted) -> None:
    """Whether these blocks are here, and such tensors can be read."""
    if model_version != hosted.model_version:
        raise Refusal(
            wire.ERROR_UNKNOWN_MODEL,
            f"this server holds {hosted.model_name} version {hosted.model_version.hex()[:12]}, "
            f"not version {model_version.hex()[:12]}",
        )
    if not hosted.span.covers(span):
        raise Refusal(wire.ERROR_SPAN_NOT_HOSTED, f"blocks {span} are wanted, {hosted.span} are here")
    if hosted.boundaries is not None and (refused := hosted.boundaries.refusal(span)):
        raise Refusal(wire.ERROR_SPAN_NOT_HOSTED, refused)
    if codec not in CODECS:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    if dtype not in ITEM_BYTES:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")


def prefix_scope(client: str, salt: bytes, sharing: PrefixCache) -> str | None:
    """Whose kept blocks a session of `client` may use, and leaves its own to: those of one peer, or (empty) of all who
    know the salt; None for nobody's. What others may not use, they cannot find out by the time that it saves."""
    if sharing == "off":
        return None
    return "" if sharing == "salted" and len(salt) >= LEAST_SHARED_SALT else client


# --- steps of a session


def check_step(
    step: wire.Step,
    tensors: Sequence[wire.Tensor],
    terms: SessionTerms,
    hosted: Hosted,
    *,
    last: int,
    position: int,
    route_epoch: int,
) -> None:
    """Whether a step fits its session.

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
    tokens = check_step_tensors(tensors, terms, hosted)
    check_position(step, tokens, terms, position)
    if step.positions:
        _check_takes_positions(hosted)
    if step.groups and not hosted.takes_groups:
        raise bad_request("groups of tokens that see each other came for blocks in which no token sees those behind it")


def layouts_known(hosted: Hosted) -> dict[str, Any]:
    """What of a Granted says which steps this server knows."""
    return {"long_factors": True, "positions": True, "groups": hosted.takes_groups, "features": hosted.features}


def _check_takes_positions(hosted: Hosted) -> None:
    if not hosted.takes_positions:
        raise bad_request("positions along axes came for blocks that count tokens")


def check_step_tensors(tensors: Sequence[wire.Tensor], terms: SessionTerms, hosted: Hosted) -> int:
    """The tokens of a row in a step's hidden states, whose size follows from the session's terms.

    Raises:
        Refusal: they do not fit the session.
    """
    if len(tensors) != 1:
        raise bad_request(f"a step carries one tensor, not {len(tensors)}")
    features = hosted.features if terms.span.start == 0 and hosted.features <= terms.span.end else 0
    tokens = check_hidden_states(tensors[0], terms, hosted.width(terms.span.start), features)
    _check_bytes(tensors[0], INFERENCE.max_payload)
    if tokens > step_tokens(terms.batch):
        raise bad_request(f"{tokens} tokens in one step; at most {step_tokens(terms.batch)} were granted")
    return tokens


def is_prompt(tensors: Sequence[wire.Tensor]) -> bool:
    """Whether a checked step has several tokens of a row, so that computing it for nobody would cost something."""
    return bool(tensors) and tensors[0].shape[1] > 1


def step_tokens(batch: int) -> int:
    """Tokens of a row that one step may carry."""
    return max(1, STEP_TOKENS // batch)


# --- batches of a stream


def check_keep(keep: wire.Keep, terms: BatchTerms, hosted: Hosted, linears: Linears, *, last: int) -> None:
    """Whether tensors can be kept.

    `linears` are the linear layers of the hosted blocks, `last` is the number of the newest set.
    """
    if keep.number != last + 1:
        raise bad_request(f"Keep {keep.number} came after {last}")
    if not 1 <= len(keep.tensors) <= MAX_KEPT_TENSORS:
        raise bad_request(f"Keep takes 1 to {MAX_KEPT_TENSORS} tensors, not {len(keep.tensors)}")
    lora = check_kept(keep, terms.span, hosted.hidden_size)
    for tensor in keep.tensors:
        _check_bytes(tensor)
    _check_lora(lora, terms.span, linears, hosted)


def check_batch(
    request: wire.BatchRequest,
    terms: BatchTerms,
    hosted: Hosted,
    kept: Mapping[int, wire.Keep],
    *,
    backward: bool,
    last: int,
) -> None:
    """Whether a batch fits its stream, which keeps `kept`. `last` is the sequence number before it."""
    if request.sequence != last + 1:
        raise bad_request(f"batch request {request.sequence} came after batch request {last}")
    if request.gradient_follows and not backward:
        raise bad_request("a forward pass takes no gradient")
    widths = hosted.width(terms.span.start), hosted.width(terms.span.end)
    check_request(request, backward, widths, hosted.max_length)
    if len(request.positions) > math.prod(request.tensors[0].shape[:2]):
        _check_takes_positions(hosted)
    for tensor in request.tensors:
        check_format(tensor, terms.codec, terms.dtype, "stream")
        _check_bytes(tensor)
    if request.kept and request.kept not in kept:
        raise bad_request(f"nothing is kept under number {request.kept}")
    if request.kept in kept:
        check_prompts(kept[request.kept], request.tensors[0].shape)


def batch_bytes(request: wire.BatchRequest, keep: wire.Keep | None) -> int:
    """What a checked batch and its reply take, which has gradients of `keep` in a backward pass: raw values."""
    reply = raw_bytes(request.tensors[:1])
    if keep is not None and len(request.tensors) > 1:
        reply += raw_bytes(keep.tensors)
    return raw_bytes(request.tensors) + reply


# --- adapters that clients bring


def check_adapter(offer: wire.Adapter, hosted: Hosted, linears: Linears) -> Span:
    """Whether such an adapter can be used here; returns the blocks that it is for."""
    if offer.protocol_version != PROTOCOL_VERSION:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"protocol version {offer.protocol_version}; this node speaks 1")
    try:
        span = Span(offer.span.start, offer.span.end)
    except ValueError as error:
        raise bad_request(str(error)) from None
    check_hosted(offer.model_version, span, "none", "float32", hosted)
    hashes = [(block.block, block.hash) for block in offer.blocks]
    if len({block for block, _ in hashes}) != len(hashes) or hash_of_adapter(hashes) != offer.hash:
        raise bad_request("the adapter's hash is not that of its blocks")
    check_names(offer.names, offer.tensors, "an adapter")
    nbytes = sum(tensor.nbytes for tensor in offer.tensors)
    if len(offer.tensors) > MAX_ADAPTER_TENSORS or nbytes > MAX_ADAPTER_BYTES:
        raise Refusal(
            wire.ERROR_TOO_LONG,
            f"an adapter of {len(offer.tensors)} tensors and {nbytes >> 20} MiB; {MAX_ADAPTER_TENSORS} and "
            f"{MAX_ADAPTER_BYTES >> 20} MiB are allowed",
        )
    for tensor in offer.tensors:
        _check_bytes(tensor)
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(offer.names, offer.tensors, strict=True)}
    _check_lora(shapes, span, linears, hosted)
    if {block_of(name) for name in offer.names} != {block for block, _ in hashes if block in span}:
        raise bad_request(f"the tensors are not all that the adapter has for blocks {span}")
    return span


# --- tensors


def _check_bytes(tensor: wire.Tensor, most: float = math.inf) -> None:
    """Whether its size is that of its shape, and at most `most` bytes."""
    try:
        if tensor.nbytes != wire_nbytes(tensor.shape, tensor.dtype, tensor.codec) or tensor.nbytes > most:
            raise bad_request(f"{tensor.nbytes} bytes cannot be shape {tuple(tensor.shape)} as {tensor.dtype}")
    except TensorError as error:
        raise bad_request(str(error)) from None


def _check_lora(shapes: Mapping[str, tuple[int, ...]], span: Span, linears: Linears, hosted: Hosted) -> None:
    try:
        check_tensors(shapes, span, linears, hosted.hidden_size)
    except ValueError as error:
        raise bad_request(str(error)) from None
