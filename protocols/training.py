"""`/petalnode/forward/1` and `/petalnode/backward/1`: batches through a span, without a cache.

    client                                        server
    BatchOpen (model version, span, size) ->
                                               <- BatchGranted (credits) | Error
    Keep (deep prompts), pieces ->                                               (no answer)
    BatchRequest (sequence, mask), pieces ->
                                               <- BatchReply (receipt), pieces | Error
    BatchRequest (gradient_follows), pieces ->   (a backward pass, while the gradient is made elsewhere)
    Gradient (sequence), pieces ->
                                               <- BatchReply (receipt), pieces | Error
    ...
    Close ->

One stream carries batch requests of one kind, one behind the other, as long as its client likes. The server may end a
stream that asks for nothing. Fine-tuning as in Petals (NeurIPS 2023, section 3.4): servers treat whatever the client
learns as inputs, and keep nothing of it past the stream.

- A **batch request** is hidden states of [rows, tokens, hidden]; for a backward pass also the gradient with respect to
  the span's output. The server answers the span's output. To a backward pass it answers the gradient with respect to
  the hidden states, then to each tensor kept for this request, by name. It has at most `MICRO_BATCH_TOKENS` tokens,
  unless it is a single row.
- **Deferred backward**: the gradient may follow later, where the grant says so. The server computes forward in the
  meantime and keeps what the backward pass needs. It may drop such a request, for others or when the gradient does not
  come, with ERROR_BUSY. The client then sends all of it on a new stream. Receipts are the same either way.
- **Kept tensors** travel once for the requests that name their number. "prompts" are deep prompts [blocks of the span,
  1 or rows, prefix, hidden]: those of a block are added to the first `prefix` positions of what enters it.
  "3.self_attn.q_proj.lora_A" [rank, in] and "3.self_attn.q_proj.lora_B" [out, rank] change a linear layer of block 3.
  It then returns B A x more than its own.
- Tensors travel in **pieces** of at most `PIECE_BYTES`, one behind the other. So neither side ever holds more than a
  piece for which it has no room. A server begins to read the pieces of a request when it has memory for the request and
  its reply. Until then the stream's window stops the client. At most `BatchGranted.credits` requests may be sent and
  not answered.
- `sequence` counts from 1. After an Error, which answers the first request that has no reply yet, the stream is over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from ..crypto.canonical import digest
from . import wire_pb2 as wire
from .framing import ITEM_BYTES, MAX_TENSORS, MessageStream, wire_nbytes
from .ids import AXES, Span, StreamProtocol
from .inference import HASH_BYTES, MAX_BATCH, Refusal, bad_request, opened_span

MICRO_BATCH_TOKENS: Final = 1024
"""Rows times positions of one batch request (Petals, NeurIPS 2023, section 4.2, footnote 9)."""
PIECE_BYTES: Final = 1 << 20
FORWARD: Final = StreamProtocol(
    "/petalnode/forward/1",
    wire.BatchFrame,
    max_header=256 * 1024,  # the names of an adapter's weights take the most
    max_payload=PIECE_BYTES,
)
BACKWARD: Final = replace(FORWARD, id="/petalnode/backward/1")
KEPT_SETS: Final = 4
"""Numbers of Keep that a server remembers on one stream; a newer one pushes the oldest out."""
MAX_KEPT_TENSORS: Final = 4096
PROMPTS: Final = "prompts"
LORA_PARTS: Final = ("lora_A", "lora_B")
BATCH_DOMAIN: Final = "petalnode/work/1"
KEEP_DOMAIN: Final = "petalnode/keep/1"
NOTHING_KEPT: Final = bytes(HASH_BYTES)

BatchProtocol = StreamProtocol[wire.BatchFrame]
BatchFrames = MessageStream[wire.BatchFrame]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class LoraName:
    """Of a kept tensor that changes the layer at `path` in a block; `part` is one of `LORA_PARTS`."""

    block: int
    path: str
    part: str

    def __str__(self) -> str:
        return f"{self.block}.{self.path}.{self.part}"

    @classmethod
    def parse(cls, name: str) -> LoraName | None:
        """None if it is no such name."""
        block, _, rest = name.partition(".")
        path, _, part = rest.rpartition(".")
        if not block.isdecimal() or len(block) > 9 or not path or part not in LORA_PARTS:
            return None
        return cls(int(block), path, part)


@dataclass(frozen=True)
class BatchTerms:
    """What a stream of batch requests was opened for."""

    model_version: bytes
    span: Span
    codec: str
    dtype: str
    nonce: bytes


def batch_terms_of(message: wire.BatchOpen) -> BatchTerms:
    """Checks the fields of a BatchOpen that need no knowledge of the server.

    Raises:
        Refusal: ERROR_BAD_REQUEST or ERROR_UNSUPPORTED, naming the field.
    """
    return BatchTerms(
        model_version=message.model_version,
        span=opened_span(message),
        codec=message.codec,
        dtype=message.activation_dtype,
        nonce=message.nonce,
    )


def hash_of_batch(protocol: str, request: wire.BatchRequest, payload_hash: bytes, kept_hash: bytes) -> bytes:
    """The request hash that both sides compute, and that the receipt carries.

    `protocol` is the stream's id, `payload_hash` the SHA-256 of the tensors as they stood on the wire. `kept_hash` is
    `hash_of_keep` of what it uses, `NOTHING_KEPT` for nothing.
    """
    return digest(
        BATCH_DOMAIN,
        protocol,
        request.sequence,
        _described(request.tensors),
        request.mask,
        tuple(request.positions),
        payload_hash,
        kept_hash,
    )


def hash_of_keep(keep: wire.Keep, payload_hash: bytes) -> bytes:
    """Names what a server was given to keep; its number, which says nothing, is left out."""
    return digest(KEEP_DOMAIN, tuple(keep.names), _described(keep.tensors), payload_hash)


@dataclass(frozen=True)
class KeptSet:
    """Tensors that a server keeps for several requests, as they travel; `keep` has no number. `hash` names them."""

    keep: wire.Keep
    payloads: tuple[bytes | bytearray, ...]
    hash: bytes

    @classmethod
    def of(cls, keep: wire.Keep, payloads: Iterable[bytes | bytearray]) -> KeptSet:
        """Hashes the bytes: off the trio thread."""
        held = tuple(payloads)
        return cls(keep, held, hash_of_keep(keep, hash_of_payloads(held)))


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch as a server is asked for them, and as both sign it.

    Attributes:
        message: without the numbers that a stream gives it until it is sent.
        payloads: of the hidden states and, in a backward pass, of the gradient of what came of them.
    """

    message: wire.BatchRequest
    payloads: tuple[bytes | bytearray, ...]
    kept: KeptSet | None = None

    def hash(self, protocol: str) -> bytes:
        """As `hash_of_batch`; hashes the bytes: off the trio thread."""
        kept = self.kept.hash if self.kept is not None else NOTHING_KEPT
        return hash_of_batch(protocol, self.message, hash_of_payloads(self.payloads), kept)


def _described(tensors: Iterable[wire.Tensor]) -> tuple[tuple[tuple[int, ...], str, str], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.codec) for tensor in tensors)


def hash_of_payloads(payloads: Iterable[Buffer]) -> bytes:
    """SHA-256 of the payloads one behind the other (0.5 ms per MiB: off the trio thread)."""
    sha = hashlib.sha256()
    for payload in payloads:
        sha.update(payload)
    return sha.digest()


def check_request(request: wire.BatchRequest, backward: bool, widths: tuple[int, int] | None, max_length: int) -> None:
    """Whether a batch has a form that blocks take for texts up to `max_length`. `widths` of what enters the first of
    them and leaves the last; None: any.

    Raises:
        Refusal: with what does not fit.
    """
    if len(request.tensors) != 1 + backward:
        raise bad_request(f"a {'backward' if backward else 'forward'} pass takes {1 + backward} tensors")
    shape, *gradients = (tuple(tensor.shape) for tensor in request.tensors)
    rows, tokens, hidden = shape if len(shape) == 3 else (0, 0, 0)
    entering, leaving = widths or (max(hidden, 1), gradients[0][-1] if gradients and gradients[0] else 0)
    if not 1 <= rows <= MAX_BATCH or not tokens or hidden != entering:
        raise bad_request(f"shape {shape} is not [rows up to {MAX_BATCH}, tokens, {entering if widths else 'hidden'}]")
    if gradients and (gradients[0] != (rows, tokens, leaving) or not 0 < leaving <= hidden):
        raise bad_request(f"a gradient of {gradients[0]} is not of what comes of hidden states {shape}")
    if tokens > max_length:
        raise Refusal(wire.ERROR_TOO_LONG, f"the model takes {max_length} tokens, not {tokens}")
    if rows > 1 and rows * tokens > MICRO_BATCH_TOKENS:
        raise Refusal(wire.ERROR_TOO_LONG, f"{rows} x {tokens} tokens in a request; {MICRO_BATCH_TOKENS} are allowed")
    if request.mask and len(request.mask) != mask_bytes(shape):
        raise bad_request(f"a mask of {len(request.mask)} bytes does not fit {rows} x {tokens} tokens")
    numbers = len(request.positions)
    if numbers and (numbers not in (rows * tokens, AXES * rows * tokens) or max(request.positions) >= max_length):
        some = f"one number or {AXES} below {max_length}"
        raise bad_request(f"positions take {some} for each of {rows} x {tokens} tokens")


def narrower(tensor: wire.Tensor, values: int) -> wire.Tensor:
    """The header of the same hidden states without the last `values` of each token."""
    shape = *tensor.shape[:-1], tensor.shape[-1] - values
    nbytes = wire_nbytes(shape, tensor.dtype, tensor.codec)
    return wire.Tensor(shape=shape, dtype=tensor.dtype, codec=tensor.codec, nbytes=nbytes)


def check_names(names: Sequence[str], tensors: Sequence[wire.Tensor], what: str) -> None:
    """Raises Refusal unless each tensor has a name of its own."""
    if len(names) != len(tensors) or len(set(names)) != len(names):
        raise bad_request(f"{what} takes a name of its own for each tensor")


def check_kept(keep: wire.Keep, span: Span, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of LoRA tensors among those of a Keep, by name: which layers there are is not known here.

    Raises:
        Refusal: another tensor is no deep prompts for these blocks, or has no name of its own.
    """
    check_names(keep.names, keep.tensors, "Keep")
    lora = {}
    for name, tensor in zip(keep.names, keep.tensors, strict=True):
        shape = tuple(tensor.shape)
        if LoraName.parse(name) is not None:
            lora[name] = shape
        elif name != PROMPTS:
            raise Refusal(wire.ERROR_UNSUPPORTED, f"this server knows no tensor {name[:100]!r}: only prompts and LoRA")
        elif len(shape) != 4 or shape[0] != len(span) or shape[3] != hidden_size or not math.prod(shape):
            raise bad_request(f"prompts of {shape} are not [{len(span)}, rows, prefix, {hidden_size}]")
    return lora


def check_prompts(keep: wire.Keep, shape: Sequence[int]) -> None:
    """Raises Refusal if deep prompts of a checked Keep do not fit hidden states of this shape."""
    for name, tensor in zip(keep.names, keep.tensors, strict=True):
        if name == PROMPTS and (tensor.shape[1] not in (1, shape[0]) or tensor.shape[2] > shape[1]):
            raise bad_request(f"prompts of {tuple(tensor.shape)} do not fit hidden states of {tuple(shape)}")


def raw_bytes(tensors: Iterable[wire.Tensor]) -> int:
    """Of the values, without a codec; their dtypes are known."""
    return sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors)


def mask_bytes(shape: Sequence[int]) -> int:
    """Bytes that the mask of a request of [rows, tokens, ...] takes."""
    return math.ceil(shape[0] * shape[1] / 8)


async def send_in_pieces(
    stream: BatchFrames, head: wire.BatchFrame, payloads: Sequence[Buffer], *, timeout: float
) -> None:
    """Sends `head` and behind it the bytes of its tensors; `timeout` is for each piece. One caller at a time.

    Raises:
        PeerError: as `MessageStream.send`.
    """
    await stream.send(head, timeout=timeout)
    await send_pieces(stream, payloads, timeout=timeout)


async def send_pieces(stream: BatchFrames, payloads: Sequence[Buffer], *, timeout: float) -> None:
    """Sends the bytes of tensors whose headers the other side has; as `send_in_pieces`."""
    for views in _pieces(payloads):
        piece = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=view.nbytes) for view in views])
        await stream.send(piece, views, timeout=timeout)


def _pieces(payloads: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    gathered: list[memoryview] = []
    room = PIECE_BYTES
    for payload in payloads:
        view = memoryview(payload).cast("B")
        start = 0
        while start < len(view):
            part = view[start : start + room]
            gathered.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(gathered) == MAX_TENSORS:
                yield gathered
                gathered, room = [], PIECE_BYTES
    if gathered:
        yield gathered


async def receive_pieces(stream: BatchFrames, sizes: Sequence[int], *, timeout: float) -> list[bytearray]:
    """The bytes of tensors of these sizes, of which the sender has spoken; `timeout` is for each piece of full size.

    Raises:
        PeerError: as `MessageStream.receive`.
        Refusal: something else came, or more bytes than that; or the sender's own Error.
    """
    buffers = [bytearray(size) for size in sizes]
    wanted = (view for buffer in buffers if (view := memoryview(buffer)))
    room = next(wanted, None)
    deadline = trio.current_time() + timeout * (1 + sum(sizes) / PIECE_BYTES)
    while room is not None:
        frame, payloads = await stream.receive(timeout=max(0.0, min(timeout, deadline - trio.current_time())))
        if frame.WhichOneof("body") == "error":
            raise Refusal.from_wire(frame.error)
        if frame.WhichOneof("body") != "piece" or not any(payloads):
            raise bad_request("pieces of a tensor must follow each other")
        for payload in payloads:
            left = memoryview(payload)
            while left:
                if room is None:
                    raise bad_request("more bytes came than the tensors have")
                size = min(len(room), len(left))
                room[:size] = left[:size]
                room, left = room[size:] or next(wanted, None), left[size:]
    return buffers
