"""`/petalnode/inference/1`: one long-lived stream per session and server.

    client                                server
    Open (model version, span, size) ->
                                       <- Granted (session epoch, cache, credits) | Error
    Step (sequence, position, tensor) ->
                                       <- Reply (tensor, receipt) | Error
    ...
    Close ->

- `sequence` grows from request to request. A repeated one gets the cached reply. It is never computed again: in another
  batch the last bits differ.
- `position` is the number of tokens that each row holds before the step. Less than the server holds means: roll back
  to it first. `reorder` then says for each row whose cache it continues (beam search).
- `long_factors` says that the text which the step is a part of is longer than the model was first trained for: rotary
  frequencies of longrope are those of long texts then, for all tokens of the step. Without it they follow from the end
  of the step. A client says it only to servers whose Granted says that they know it.
- `positions` says where tokens stand along the three axes of M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1), where
  that is not their number in the row: among the tokens of a picture, and behind it. A client sends it only to servers
  whose Granted says that they know it.
- `groups` says which tokens see each other both ways, as those of one picture do in some models: for each token of a
  group, how many of it are left. A group is never cut: it is in one step, and computed at once. A client sends it only
  to servers whose Granted says that they know it.
- Hidden states may have features of pictures behind them (`Layout.features`), for a server that holds all blocks which
  add any; `Granted.features` says how many these are. Its answer has none.
- At most `Granted.credits` steps may be in flight.
- A step that names `targets` has its output pushed to the first of them over `/petalnode/push/1`, beside the reply to
  the client. Petals calls that server-to-server communication (ACL demo 2023, section 3.2). `Reply.handed_on` says
  whether that was done: if not, or if the next server stays silent, the client sends the same step itself. Whichever
  comes first counts, and the other is a repeated one.
- `route_epoch` grows when the client changes the chain. A step or push of an older one than was seen is dropped.
- After an Error in answer to a Step the session is closed, except that ERROR_TOO_LONG leaves it as it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar, get_type_hints

from google.protobuf.message import Message

from ..crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from ..crypto.pledge import Pledge
from ..crypto.receipts import Receipt, SessionRoot, StepRequest
from . import wire_pb2 as wire
from .framing import ProtocolError
from .ids import Layout, Span, StreamProtocol
from .prefix import BLOCK_TOKENS, MAX_BLOCKS, MAX_SALT, PREFIX_CODECS, PrefixTerms

INFERENCE: Final = StreamProtocol("/petalnode/inference/1", wire.InferenceFrame)
PUSH: Final = StreamProtocol("/petalnode/push/1", wire.PushFrame)
NONCE_BYTES: Final = 16
EPOCH_BYTES: Final = 16
HASH_BYTES: Final = 32
MAX_BATCH: Final = 1024
MAX_LENGTH: Final = 1 << 20
STEP_TOKENS: Final = 2048
"""Rows times positions of one step."""
MAX_SEQUENCE: Final = 1 << 40
"""Of a step: more than any session comes to, and far from what a message cannot hold."""

LOOK_BACK: Final = 256
"""Receipts of the server before, which came with the last steps, that no server of the chain may take for new ones."""

M = TypeVar("M", bound=Message)
S = TypeVar("S")


class Refusal(Exception):
    """The other side's `Error`, or one that is about to be sent to it: a code and a sentence."""

    def __init__(self, code: wire.ErrorCode.ValueType, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def from_wire(cls, error: wire.Error) -> Refusal:
        """What the other side says is one line."""
        return cls(error.code, " ".join(error.message[:500].split()))

    def to_wire(self) -> wire.Error:
        return wire.Error(code=self.code, message=self.message[:500])


def session_name(nonce: bytes) -> str:
    """By which the logs of client and server name a session: the first 8 hexadecimal digits of the client's nonce."""
    return nonce[:4].hex()


def without_tensors(peer_id: str) -> Callable[[Any], None]:
    """For `MessageStream.receive` where no tensors are due: whoever sends some loses the stream."""
    return partial(_refuse_tensors, peer_id)


def _refuse_tensors(peer_id: str, frame: Any) -> None:
    if frame.tensors:
        raise ProtocolError(f"{peer_id} sent tensors where none are due", peer_id)


def bad_request(message: str) -> Refusal:
    return Refusal(wire.ERROR_BAD_REQUEST, message)


@dataclass(frozen=True)
class SessionTerms:
    """What client and server agreed on when the session was opened.

    `left_padding` has one entry a row, or none; `adapter` is the hash of one, or empty. `prefix` are the names of the
    blocks that the client asks for. `keeps` says whether the server may keep what it computes; both under `salt`.
    """

    model_version: bytes
    span: Span
    max_length: int
    batch: int
    left_padding: tuple[int, ...]
    codec: str
    nonce: bytes
    route_epoch: int
    dtype: str
    adapter: bytes = b""
    prefix: tuple[bytes, ...] = ()
    salt: bytes = b""
    keeps: bool = False

    @property
    def cache_tokens(self) -> int:
        return self.batch * self.max_length

    @property
    def shares(self) -> bool:
        """Whether keys and values may be shared with other sessions."""
        return self.codec in PREFIX_CODECS and (self.keeps or bool(self.prefix))

    @property
    def prefix_root(self) -> bytes:
        """Before the first name of a block."""
        return PrefixTerms(
            model_version=self.model_version,
            span=self.span,
            batch=self.batch,
            left_padding=self.left_padding,
            codec=self.codec,
            dtype=self.dtype,
            adapter=self.adapter,
            salt=self.salt,
        ).root()

    def root(self, client: str, session_epoch: bytes, pledge: bytes, prefix: bytes) -> bytes:
        """What the first receipt of the session has as its previous one. `pledge` is the hash of the one that was
        granted with it, `prefix` the name of the last block that it begins with; empty for none."""
        return SessionRoot(
            client=client,
            nonce=self.nonce,
            session_epoch=session_epoch,
            model_version=self.model_version,
            span=(self.span.start, self.span.end),
            batch=self.batch,
            left_padding=self.left_padding,
            codec=self.codec,
            dtype=self.dtype,
            adapter=self.adapter,
            pledge=pledge,
            prefix=prefix,
        ).hash()


def opened_span(message: wire.Open | wire.BatchOpen) -> Span:
    """The span that is asked for, once version, model and nonce are right.

    Raises:
        Refusal: ERROR_BAD_REQUEST or ERROR_UNSUPPORTED, naming the field.
    """
    if message.protocol_version != 1:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"protocol version {message.protocol_version}; this node speaks 1")
    if len(message.model_version) != HASH_BYTES or len(message.nonce) != NONCE_BYTES:
        raise bad_request("model_version takes 32 bytes and nonce 16")
    try:
        return Span(message.span.start, message.span.end)
    except ValueError as error:
        raise bad_request(str(error)) from None


def terms_of(message: wire.Open) -> SessionTerms:
    """Checks the fields of an Open that need no knowledge of the server.

    Raises:
        Refusal: ERROR_BAD_REQUEST or ERROR_UNSUPPORTED, naming the field.
    """
    opened_span(message)
    if not 1 <= message.batch <= MAX_BATCH:
        raise bad_request(f"batch {message.batch} is not within 1 .. {MAX_BATCH}")
    if not 1 <= message.max_length <= MAX_LENGTH:
        raise bad_request(f"max_length {message.max_length} is not within 1 .. {MAX_LENGTH}")
    padding = tuple(message.left_padding)
    if padding and (len(padding) != message.batch or max(padding) >= message.max_length):
        raise bad_request(f"left_padding takes one number below max_length for each of the {message.batch} rows")
    if message.adapter and len(message.adapter) != HASH_BYTES:
        raise bad_request(f"adapter takes a hash of {HASH_BYTES} bytes")
    _check_prefix(message)
    return _terms(message)


def _terms(message: wire.Open) -> SessionTerms:
    """Raises ValueError: there is no such span."""
    return SessionTerms(
        model_version=message.model_version,
        span=Span(message.span.start, message.span.end),
        max_length=message.max_length,
        batch=message.batch,
        left_padding=tuple(message.left_padding) if any(message.left_padding) else (),
        codec=message.codec,
        nonce=message.nonce,
        route_epoch=message.route_epoch,
        dtype=message.activation_dtype,
        adapter=message.adapter,
        prefix=tuple(message.prefix.blocks),
        salt=message.prefix.salt,
        keeps=message.prefix.keep,
    )


def _check_prefix(message: wire.Open) -> None:
    prefix = message.prefix
    if len(prefix.blocks) > MAX_BLOCKS or any(len(name) != HASH_BYTES for name in prefix.blocks):
        raise bad_request(f"a prefix takes at most {MAX_BLOCKS} names of {HASH_BYTES} bytes")
    if len(prefix.blocks) * BLOCK_TOKENS > message.max_length:
        raise bad_request(f"a prefix of {len(prefix.blocks)} blocks passes max_length {message.max_length}")
    if len(prefix.salt) > MAX_SALT:
        raise bad_request(f"the salt of a prefix takes at most {MAX_SALT} bytes")


def check_hidden_states(
    tensor: wire.Tensor, terms: SessionTerms, hidden_size: int | None = None, features: int = 0
) -> int:
    """The tokens of a row in a step of such a session. Of a model of this hidden size, or any. `features`: for how many
    blocks features may stand behind hidden states. Raises Refusal."""
    shape = tuple(tensor.shape)
    widths = {hidden_size, hidden_size * (1 + features)} if hidden_size is not None else {max(shape[-1:], default=1)}
    if len(shape) != 3 or shape[0] != terms.batch or not shape[1] or not shape[2] or shape[2] not in widths:
        raise bad_request(f"shape {shape} is not [{terms.batch}, tokens, {hidden_size or 'hidden'}]")
    check_format(tensor, terms.codec, terms.dtype, "session")
    return shape[1]


def check_format(tensor: wire.Tensor, codec: str, dtype: str, what: str) -> None:
    """Raises Refusal if the tensor has another form than `what` was opened for."""
    if (tensor.codec, tensor.dtype) != (codec, dtype):
        raise bad_request(f"{tensor.dtype} with codec {tensor.codec!r} came; the {what} speaks {dtype} with {codec!r}")


def check_position(step: wire.Step, tokens: int, terms: SessionTerms, held: int) -> None:
    """Whether a step with these tokens of a row fits a session that holds `held`. Raises Refusal."""
    if step.position > held:
        raise bad_request(f"position {step.position} is ahead of the {held} tokens held")
    if step.reorder and (len(step.reorder) != terms.batch or max(step.reorder) >= terms.batch):
        raise bad_request(f"reorder takes a row for each of the {terms.batch} rows")
    if problem := layout_of(step).problem(terms.batch, tokens, MAX_LENGTH):
        raise bad_request(problem)
    if step.position + tokens > terms.max_length:
        raise Refusal(
            wire.ERROR_TOO_LONG,
            f"{step.position} tokens and {tokens} more pass the session's max_length of {terms.max_length}",
        )


def root_of(
    message: wire.Open, client: str, session_epoch: bytes, pledge: bytes = b"", prefix_tokens: int = 0
) -> bytes:
    """`SessionTerms.root` of the session that `message` opened; it held `prefix_tokens` from the start.

    Raises:
        ValueError: that is not a part of the prefix that was asked for, or there is no such span.
    """
    return _terms(message).root(client, session_epoch, pledge, granted_prefix(message, prefix_tokens))


def granted_prefix(message: wire.Open, prefix_tokens: int) -> bytes:
    """The name of the last block that a session begins with; empty if it begins with none.

    Raises:
        ValueError: this number of tokens is not a part of the prefix that was asked for.
    """
    count, rest = divmod(prefix_tokens, BLOCK_TOKENS)
    if rest or count > len(message.prefix.blocks):
        raise ValueError(f"{prefix_tokens} tokens are no blocks of the prefix that was asked for")
    return bytes(message.prefix.blocks[count - 1]) if count else b""


def hash_of_step(step: wire.Step, tensor: wire.Tensor, payload_hash: bytes) -> bytes:
    """The request hash that both sides compute, and that the receipt carries."""
    return StepRequest(
        sequence=step.sequence,
        position=step.position,
        reorder=tuple(step.reorder),
        route_epoch=step.route_epoch,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        codec=tensor.codec,
        payload_hash=payload_hash,
        upstream_receipt=step.previous_receipt,
        targets=tuple((target.peer_id, target.nonce, target.sequence) for target in step.targets),
        long_factors=step.long_factors,
        positions=tuple(step.positions),
        groups=tuple(step.groups),
    ).hash()


def pushed_step(step: wire.Step, receipt_hash: bytes) -> wire.Step:
    """The step that the first target of `step` gets with the output, whose receipt has this hash.

    The pushing server and the client both make it. So the client knows what the next server was asked.
    """
    return wire.Step(
        sequence=step.targets[0].sequence,
        position=step.position,
        reorder=step.reorder,
        route_epoch=step.route_epoch,
        previous_receipt=receipt_hash,
        targets=step.targets[1:],
        receipt_only=step.targets[0].receipt_only,
        long_factors=step.long_factors,
        positions=step.positions,
        groups=step.groups,
    )


def layout_of(step: wire.Step) -> Layout:
    """Of its tokens; the shape of its hidden states says whether there are features."""
    return Layout(tuple(step.positions), tuple(step.groups))


def sha256(payload: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of a payload as it stands on the wire (0.5 ms per MiB: off the trio thread unless it is small)."""
    return hashlib.sha256(payload).digest()


@cache  # whose types know no classes as keys
def _conversions(statement: type, message: type[Message]) -> tuple[tuple[str, str], ...]:
    """How the fields of a statement stand in its message, where they have the same names: (name, kind)."""
    hints = get_type_hints(statement)
    kinds = []
    for field in dataclasses.fields(statement):
        described = message.DESCRIPTOR.fields_by_name[field.name]
        if described.message_type is not None:
            kind = "span"
        elif hints[field.name] is str and described.type == described.TYPE_BYTES:
            kind = "optional id" if field.default == "" else "id"
        else:
            kind = "plain"
        kinds.append((field.name, kind))
    return tuple(kinds)


def to_wire(statement: Any, message: type[M]) -> M:
    """The message that has the fields of a receipt, a pledge or another signed statement; peer ids in binary."""
    values = {}
    for name, kind in _conversions(type(statement), message):  # type: ignore[arg-type]
        value = getattr(statement, name)
        if kind == "span":
            value = wire.Span(start=value[0], end=value[1])
        elif kind != "plain":
            value = peer_id_to_bytes(value) if value or kind == "id" else b""
        values[name] = value
    return message(**values)


def from_wire(message: Message, statement: type[S]) -> S:
    """The statement in a message. Its signature is not checked.

    Raises:
        ValueError: something in it is no peer id.
    """
    values = {}
    for name, kind in _conversions(statement, type(message)):  # type: ignore[arg-type]
        value = getattr(message, name)
        if kind == "span":
            value = (value.start, value.end)
        elif kind != "plain":
            value = peer_id_from_bytes(value) if value or kind == "id" else ""
        values[name] = value
    return statement(**values)


def receipt_to_wire(receipt: Receipt) -> wire.Receipt:
    return to_wire(receipt, wire.Receipt)


def receipt_from_wire(message: wire.Receipt) -> Receipt:
    """Raises ValueError if `client` is no peer id."""
    return from_wire(message, Receipt)


def pledge_to_wire(pledge: Pledge) -> wire.Pledge:
    return to_wire(pledge, wire.Pledge)


def pledge_from_wire(message: wire.Pledge) -> Pledge:
    """Raises ValueError if `server` or `holder` is no peer id."""
    return from_wire(message, Pledge)
